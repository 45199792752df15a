"""The demo's result: what is measured, and which promises it keeps."""

from __future__ import annotations

import statistics
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from springtide_demo import scenario
from springtide_demo.commits import Commit
from springtide_demo.gaps import QUIET_WINDOW_SECONDS, gap_after
from springtide_demo.machine import Load, Machine
from springtide_demo.survivors import WorkerProcess

LEAST_ACCURACY = 0.97
LONGEST_RECOVERY_SECONDS = 1.0
LARGEST_LOSS_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Promise:
    """A line of the verdict: what was promised, what was measured, and whether it holds.

    judged: false where seconds were missed while others had the machine: that says nothing about the promise.
    timing: a promise about seconds; one that is missed is shown as slow and fails nothing, since all went on.
    """

    text: str
    measured: str
    holds: bool
    judged: bool = True
    timing: bool = False

    @property
    def broken(self) -> bool:
        """Say whether it was missed in a way that fails the demo."""
        return not self.holds and not self.timing


def float32(value: float) -> float:
    """Round to the nearest float32, the precision in which the losses are computed."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def loss_curve_max_difference(curve: Sequence[Commit], reference: Sequence[Commit]) -> float:
    """Return the largest difference of the global loss (float32) at equal steps.

    Args:
        curve: the job's surviving commits.
        reference: those of the undisturbed run.

    Raises:
        ValueError: only one of the two has a step, or it has no loss: a part is no comparison. The first such
            steps are named.
    """
    ours = {commit.step: commit.loss for commit in curve}
    theirs = {commit.step: commit.loss for commit in reference}
    for name, steps in (
        ("the undisturbed run", sorted(ours.keys() - theirs.keys())),
        ("the job", sorted(theirs.keys() - ours.keys())),
    ):
        if steps:
            raise ValueError(f"{name} has no record of {len(steps)} steps, the first of them {steps[:5]}")
    differences = []
    for step, loss in ours.items():
        other = theirs[step]
        if loss is None or other is None:
            raise ValueError(f"step {step} has no loss: the script must report(loss=...)")
        differences.append(abs(float32(loss) - float32(other)))
    return max(differences, default=0.0)


def median_step_seconds(curve: Sequence[Commit]) -> float:
    """Return the median time between consecutive commits, in seconds; 0 with fewer than two."""
    times = [commit.unix_time for commit in curve]
    return statistics.median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0


def events(
    curve: Sequence[Commit], done: Sequence[scenario.Done], machine: Machine | None = None
) -> list[dict[str, Any]]:
    """Return the report's events in order; `at_seconds` counts from the first commit.

    Args:
        curve: the surviving commits in order of their steps; not empty.
        done: the events, in order.
        machine: knows what others took of it at the time of each; None: not told.

    Raises:
        ValueError: a gap cannot be measured (`gap_after`); the event's kind is named.
    """
    start = curve[0].unix_time
    found = []
    for index, event in enumerate(done):
        later = done[index + 1].at if index + 1 < len(done) else float("inf")
        causes_none = event.kind in (scenario.KILL_COORDINATOR, scenario.KILL_OPERATOR)
        horizon = min(later, event.at + QUIET_WINDOW_SECONDS) if causes_none else later
        try:
            gap = gap_after(curve, event.at, horizon)
        except ValueError as error:
            raise ValueError(f"{event.kind}: {error}") from error
        seen = {
            "kind": event.kind,
            "at_seconds": round(event.at - start, 3),
            "gap_seconds": round(gap.seconds, 4),
            "generation": None if gap.generation is None else gap.generation.number,
        }
        if machine is not None:
            load = machine.between(event.at, gap.until)
            seen["machine"] = {"others": round(load.others, 3), "idle": round(load.idle, 3)}
        found.append(seen)
    return found


def build(
    curve: Sequence[Commit],
    reference: Sequence[Commit],
    done: Sequence[scenario.Done],
    outcome: Mapping[str, Any],
    restarts: Sequence[WorkerProcess],
    final_workers: int,
    machine: Machine | None = None,
) -> dict[str, Any]:
    """Return the report as plain data.

    Args:
        curve: the surviving commits in order of their steps.
        reference: those of the undisturbed run: its samples were to be seen.
        done: the events, in order.
        outcome: from the termination message of a worker that finished: its `data` is the check that travels
            with the parameters.
        restarts: worker processes that ended although no event aimed at them.
        final_workers: members of the last generation.
        machine: knows what others took of it; None: not told.

    Raises:
        ValueError: something that the report must say is not known.
    """
    data, values = outcome.get("data") or {}, outcome.get("values") or {}
    for name, place, key in (
        ("values.test_accuracy", values, "test_accuracy"),
        ("data.totalSeen", data, "totalSeen"),
    ):
        if key not in place:
            raise ValueError(f"the workers' outcome lacks {name}: {dict(outcome)}")
    return {
        "test_accuracy": values["test_accuracy"],
        "samples": {
            "expected": sum(commit.samples for commit in reference),
            "seen": data["totalSeen"],
            "repeated": data["repeated"],
            "lost": data["lost"],
        },
        "first_commit_unix": round(curve[0].unix_time, 3),
        "median_step_seconds": round(median_step_seconds(curve), 5),
        "events": events(curve, done, machine),
        "survivor_restarts": len(restarts),
        "final_workers": final_workers,
        "loss_curve_max_difference": loss_curve_max_difference(curve, reference),
    }


def promises(report: Mapping[str, Any]) -> list[Promise]:
    """Return the verdict on a report of `build`."""
    samples = report["samples"]
    happened = {event["kind"]: event for event in report["events"]}
    gaps = {kind: event["gap_seconds"] for kind, event in happened.items()}
    unnoticed = max(0.1, 5 * report["median_step_seconds"])
    lines = [
        Promise(
            "all six disturbances happened while it trained",
            f"{len(gaps)} of {len(scenario.ORDER)}",
            set(gaps) == set(scenario.ORDER),
        ),
        Promise(
            "no survivor's process restarted",
            str(report["survivor_restarts"]),
            report["survivor_restarts"] == 0,
        ),
        Promise(
            "every sample counted exactly once per epoch",
            "{seen} of {expected}, repeated {repeated}, lost {lost}".format(**samples),
            samples["seen"] == samples["expected"] and samples["repeated"] == samples["lost"] == 0,
        ),
        Promise(
            f"the same loss curve as one undisturbed process (within {LARGEST_LOSS_DIFFERENCE:g})",
            f"{report['loss_curve_max_difference']:.1e}",
            report["loss_curve_max_difference"] <= LARGEST_LOSS_DIFFERENCE,
        ),
        Promise(
            f"it learned (test accuracy at least {LEAST_ACCURACY})",
            f"{report['test_accuracy']:.4f}",
            report["test_accuracy"] >= LEAST_ACCURACY,
        ),
        Promise(
            f"it ends at the size asked for last ({scenario.WORKERS_AT_LAST})",
            str(report["final_workers"]),
            report["final_workers"] == scenario.WORKERS_AT_LAST,
        ),
    ]
    for kind, limit, text in (
        (scenario.KILL_WORKER, LONGEST_RECOVERY_SECONDS, "a killed worker costs at most"),
        (scenario.KILL_COORDINATOR, unnoticed, "a killed coordinator goes unnoticed: at most"),
        (scenario.KILL_OPERATOR, unnoticed, "a killed operator goes unnoticed: at most"),
    ):
        lines.append(_about_seconds(f"{text} {limit:.2f} s between two commits", limit, happened.get(kind)))
    return lines


def _about_seconds(text: str, limit: float, event: Mapping[str, Any] | None) -> Promise:
    if event is None:
        return Promise(text, "did not happen", False)
    gap, load = event["gap_seconds"], Load(**event.get("machine", {}))
    if gap <= limit:
        return Promise(text, f"{gap:.3f} s", True, timing=True)
    if load.busy:
        measured = f"{gap:.3f} s; not judged: the machine is busy ({load})"
        return Promise(text, measured, False, judged=False, timing=True)
    return Promise(text, f"{gap:.3f} s ({load})", False, timing=True)
