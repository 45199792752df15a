"""Progress in status: numbers that always move are written at most every 15 s; everything else at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan import remaining
from springtide_operator.plan.actions import Event
from springtide_operator.plan.observation import Finished, Report, ShareReport, TakenReport
from springtide_operator.plan.values import parse_time, timestamp

INTERVAL_SECONDS = 15.0
MAX_VALUES = 64
MAX_CAUSES = 8
MAX_TEXT = 1024

# Not written on their own account more often than INTERVAL_SECONDS.
_SLOW = (
    "step",
    "samplesPerSecond",
    "goodput",
    "data",
    "values",
    "recoveries",
    "lastRecoverySeconds",
    "statesLost",
    "lostSeconds",
    "slowWorker",
    "checkpoint",
    "restored",
    remaining.PROGRESS,
    remaining.COMPLETION,
)


def numbers(
    report: Report | None, old: dict[str, Any], nodes: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """Return the progress keys of status: from the report, or as they were.

    Args:
        report: of the coordinator; None: it does not answer.
        old: status as it was.
        nodes: by name of pod; None: not known.
    """
    result = {key: old[key] for key in ("generation", *_SLOW) if key in old}
    if report is None:
        return result
    if report.generation is not None:
        result["generation"] = report.generation
    if report.step is not None:
        result["step"] = max(report.step, old.get("step", 0)) if report.states_lost == 0 else report.step
    if report.phase == "RUNNING" and not report.opaque:
        result["samplesPerSecond"] = "0" if report.still else rounded(report.samples_per_second)
    if report.training and not report.opaque:
        result["goodput"] = f"{min(1.0, max(0.0, report.goodput)):.3f}"
    if report.data is not None:
        result["data"] = data(report.data, report.taken)
    if report.values:
        result["values"] = values(report.values)
    seen = counters_seen(report, old)
    result["recoveries"] = old.get("recoveries", 0) + max(0, report.recoveries - seen[0])
    result["statesLost"] = old.get("statesLost", 0) + max(0, report.states_lost - seen[1])
    lost = lost_seconds(report, old)
    if lost:
        result["lostSeconds"] = lost
    saved = checkpoint(report, old)
    if saved is not None:
        result["checkpoint"] = saved
    if report.restored:
        result["restored"] = report.restored
    result.pop("slowWorker", None)
    if report.slow is not None:
        result["slowWorker"] = {
            "pod": report.slow.pod,
            "node": (nodes or {}).get(report.slow.pod) or "",
            "stepSeconds": f"{report.slow.busy:.3g}",
            "medianSeconds": f"{report.slow.median:.3g}",
        }
    if report.recovery_seconds is not None:
        result["lastRecoverySeconds"] = f"{report.recovery_seconds:.3f}"
    return result


def checkpoint(report: Report | None, old: dict[str, Any]) -> dict[str, Any] | None:
    """Return status.checkpoint: the newest one that is whole, and whether it holds all that a job had that is
    put away.

    A job that trains is ahead of it.

    Args:
        report: of the coordinator; None: it does not answer.
        old: status as it was.
    """
    before: dict[str, Any] | None = old.get("checkpoint")
    if report is None:
        return before
    told = report.checkpoint
    if told is None:
        ahead = before is not None and before.get("upToDate") and report.step is not None
        return {**before, "upToDate": False} if before is not None and ahead else before
    return {
        "name": told.name[:128],
        "uri": told.uri[:2048],
        "step": told.step,
        "time": timestamp(told.at),
        "upToDate": report.all_saved and not report.training,
    }


def lost_seconds(report: Report, old: dict[str, Any]) -> dict[str, str]:
    """Return the seconds lost by cause over the job's life: what status has, and what the coordinator counted
    since.

    Args:
        report: of the coordinator.
        old: status as it was.
    """
    before = old.get("coordinator") or {}
    same = (before.get("incarnation"), before.get("restart")) == (report.incarnation, report.restart)
    seen = (before.get("lostSeconds") or {}) if same else {}
    total = dict(old.get("lostSeconds") or {})
    for cause, seconds in sorted(report.lost_seconds.items())[:MAX_CAUSES]:
        gained = max(0.0, seconds - float(seen.get(cause, 0.0)))
        total[cause] = f"{float(total.get(cause, 0.0)) + gained:.3f}"
    return total


def counters_seen(report: Report, old: dict[str, Any]) -> tuple[int, int]:
    """Return what of this coordinator process's counts status already holds; another process counts anew.

    Args:
        report: of the coordinator.
        old: status as it was.

    Returns:
        Recoveries, and states lost.
    """
    before = old.get("coordinator") or {}
    if (before.get("incarnation"), before.get("restart")) != (report.incarnation, report.restart):
        return 0, 0
    return before.get("recoveries", 0), before.get("statesLost", 0)


def recovered(report: Report | None, old: dict[str, Any]) -> list[Event]:
    """Return events about the troubles after which training has gone on, each once.

    Args:
        report: the coordinator's; None: it has not answered.
        old: status before the plan.
    """
    if report is None:
        return []
    told, _ = counters_seen(report, old)
    return [
        Event(
            reasons.EVENT_RECOVERED,
            f"{failure.reason}; training goes on in generation {failure.generation},"
            f" {failure.seconds:.2f} s after the step before",
        )
        for failure in report.failures
        if failure.number > told
    ]


def final(finished: Finished, old: dict[str, Any]) -> dict[str, Any]:
    """Return the progress keys of a job that succeeded: the last worker's word, where it says something.

    Args:
        finished: that word.
        old: status as it was.
    """
    result = {key: old[key] for key in ("generation", *_SLOW) if key in old}
    if finished.generation is not None:
        result["generation"] = finished.generation
    if finished.step is not None:
        result["step"] = finished.step
    if finished.data:
        result["data"] = data(finished.data, finished.taken)
    result.pop("slowWorker", None)
    if finished.values:
        result["values"] = values(finished.values)
    return result


def data(source: Mapping[str, int], taken: TakenReport | None = None) -> dict[str, Any]:
    """Return status.data.

    Args:
        source: the ledger's counts.
        taken: what lies before the positions of a pass over shards; None: nothing is told.
    """
    keys = ("epoch", "seen", "repeated", "lost", "skipped", "totalSeen")
    counts: dict[str, Any] = {key: max(0, int(source.get(key, 0))) for key in keys}
    if taken is None:
        return counts
    told = {
        "step": max(0, taken.step),
        # An operator of a release that does not know `taken` leaves it as it is: this tells that it is old.
        "totalSeen": counts["totalSeen"],
        "samples": max(0, taken.samples),
        "shards": taken.shards[:MAX_TEXT],
        "begun": taken.begun[:MAX_TEXT],
    }
    return counts | {"taken": told}


def values(source: Mapping[str, float]) -> dict[str, str]:
    return {key[:128]: f"{source[key]:.6g}" for key in sorted(source)[:MAX_VALUES]}


def rounded(value: float) -> str:
    """Three significant digits below 100, whole above."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def throttle(old: dict[str, Any], new: dict[str, Any], now: float) -> dict[str, Any]:
    """Return the status to write: the old one where only progress moved and the last write of it is too
    young.

    A recovery and a lost state are events, and are written with them: else they would be told of again.

    Args:
        old: status as it was.
        new: status as it is to be.
        now: in unix seconds.
    """
    told = all(old.get(key, 0) == new.get(key, 0) for key in ("recoveries", "statesLost"))
    told = told and (old.get("samplesPerSecond") == "0") == (new.get("samplesPerSecond") == "0")
    if told and same_but_progress(old, new):
        if all(old.get(key) == new.get(key) for key in _SLOW) and _shares(old) == _shares(new):
            return old
        last = parse_time(old.get("progressTime"))
        if last is not None and 0 <= now - last < INTERVAL_SECONDS:
            return old
    return {**new, "progressTime": timestamp(now)}


def shares(report: Report | None, old: dict[str, Any]) -> dict[str, Any]:
    """Return status.workers.balance under its key, where parts follow speed.

    Args:
        report: of the coordinator; None: it does not answer.
        old: status as it was.
    """
    told = _shares(old) if report is None else [_share(share) for share in report.shares]
    return {"balance": told} if told else {}


def _share(share: ShareReport) -> dict[str, Any]:
    seconds = f"{share.sample_seconds:.2g}" if share.sample_seconds else ""
    return {"name": share.name[:253], "samples": share.samples, "secondsPerSample": seconds}


def _shares(status: dict[str, Any]) -> list[dict[str, Any]]:
    return (status.get("workers") or {}).get("balance") or []


def same_but_progress(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two statuses differ in nothing but numbers that always move.

    Args:
        old: status as it was.
        new: status as it is to be.
    """
    return _without_progress(old) == _without_progress(new)


def _without_progress(status: dict[str, Any]) -> dict[str, Any]:
    result = {key: value for key, value in status.items() if key not in _SLOW and key != "progressTime"}
    # What a resumed job begins from is written at once: the next round may not see it any more.
    result["upToDate"] = (status.get("checkpoint") or {}).get("upToDate")
    result["restored"] = status.get("restored")
    if "workers" in result:
        result["workers"] = {key: value for key, value in result["workers"].items() if key != "balance"}
    coordinator = dict(result.get("coordinator") or {})
    for key in ("recoveries", "statesLost", "lostSeconds"):
        coordinator.pop(key, None)
    return {**result, "coordinator": coordinator}
