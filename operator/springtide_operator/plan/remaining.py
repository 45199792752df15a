"""How much of a job's work is done, and when the rest will be, from steps and their speed. PURE.

Only what is measured counts: while nothing is trained, and before the speed at the present number of workers
is known, there is no estimate. It assumes that steps go on as fast as they do now; what failures and changes
of size will cost is not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from springtide_operator.plan.observation import Report
from springtide_operator.plan.values import LAST_SECOND, parse_time, timestamp

PROGRESS = "progress"
COMPLETION = "estimatedCompletionTime"

# An estimate that moves by less than this stays as it was: seconds, and a share of the time that is left.
NOISE_SECONDS = 5.0
NOISE_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a job's steps.

    step: committed ones; None: none is known of. planned: that the job has committed at its end; 0: nobody
    knows. seconds_per_step: from commit to commit at the present number of workers; 0: not measured yet.
    committed_at: when the newest step was, in unix seconds; None: not known. trains: steps are committed now.
    """

    step: int | None
    planned: int = 0
    seconds_per_step: float = 0.0
    committed_at: float | None = None
    trains: bool = False


def percent(figures: Figures) -> int | None:
    """Return the share of the steps that is done, rounded down, 0..99: all is done only when the job has
    succeeded, since what comes after the last step may fail. None where the end is not known.
    """
    if figures.step is None or figures.planned <= 0:
        return None
    return min(99, 100 * figures.step // figures.planned)


def completion(figures: Figures, now: float, before: float | None = None) -> float | None:
    """Estimate when the last step is committed.

    Args:
        figures: what is known of the job's steps.
        now: in unix seconds.
        before: the estimate of before, which stays where the new one differs by noise alone, in unix seconds;
            None: there was none.

    Returns:
        Unix seconds, not before `now`; None where there is nothing to estimate by, or nothing left to do.
    """
    if not figures.trains or figures.step is None or figures.seconds_per_step <= 0:
        return None
    left = figures.planned - figures.step
    if left <= 0:
        return None
    # From the newest commit on: else the estimate would run ahead of a step that takes long, and jump back.
    since = now if figures.committed_at is None else min(now, figures.committed_at)
    at = max(now, since + left * figures.seconds_per_step)
    if at >= LAST_SECOND:
        return None
    if before is not None and before >= now:
        noise = max(NOISE_SECONDS, NOISE_SHARE * (at - now))
        if abs(at - before) <= noise:
            return before
    return at


def with_estimate(
    numbers: dict[str, Any], report: Report | None, old: dict[str, Any], now: float, *, trains: bool
) -> dict[str, Any]:
    """Return the progress keys of status with the job's progress and the estimate of its end.

    A coordinator that does not answer, or has heard of no step yet, changes nothing in what is done; the
    estimate stays while the workers train on, until its time has come.

    Args:
        numbers: the progress keys of status.
        report: of the coordinator; None: it does not answer.
        old: status as it was.
        now: in unix seconds.
        trains: whether the job trains.
    """
    result = {key: value for key, value in numbers.items() if key not in (PROGRESS, COMPLETION)}
    before = parse_time(old.get(COMPLETION))
    if report is None or report.last_commit_at is None:
        if PROGRESS in old:
            result[PROGRESS] = old[PROGRESS]
        if trains and before is not None and before >= now:
            result[COMPLETION] = old[COMPLETION]
        return result
    figures = Figures(
        numbers.get("step"),
        report.planned_steps,
        report.seconds_per_step,
        report.last_commit_at,
        trains and report.phase == "RUNNING" and not report.still,
    )
    done, at = percent(figures), completion(figures, now, before)
    if done is not None:
        result[PROGRESS] = done
    if at is not None:
        result[COMPLETION] = timestamp(at)
    return result


def at_the_end(numbers: dict[str, Any], succeeded: bool) -> dict[str, Any]:
    """Return the progress keys of a job that has ended: all is done, or it stays where it failed.

    Args:
        numbers: the progress keys of status.
        succeeded: how it ended.
    """
    result = {key: value for key, value in numbers.items() if key != COMPLETION}
    return {**result, PROGRESS: 100} if succeeded else result
