"""Suspending: a halted job has no pods, and keeps its name, counts and status.

Workers are deleted with their grace period, so they leave after the step they are in; the coordinator goes
when the last of them has. None of these ends is counted. Nothing holds the state of a job without processes:
one that has trained says so (ProgressNotSaved), and begins anew when it is resumed.
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import conditions
from springtide_operator.plan.actions import Action, DeletePod, Event
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.halt import halted
from springtide_operator.plan.observation import Observation


def put_away(observation: Observation) -> list[Action]:
    """Delete the coordinator once no worker process is left that could still talk to it."""
    if any(pod.end is None for pod in observation.workers):
        return []
    return [
        DeletePod(pod.name, pod.uid, reasons.DELETE_SUSPENDED, "the job is suspended and no worker is left")
        for pod in observation.coordinators
        if not pod.deleting
    ]


def truths(job: Job, observation: Observation) -> dict[str, Truth]:
    """All conditions of a halted job."""
    left = sum(pod.end is None for pod in observation.workers)
    text = f"the job is suspended: {halted(job)}"
    if left:
        text += f"; {left} worker{' leaves' if left == 1 else 's leave'}"
    degraded = conditions.degraded(None)
    if job.status.get("generation"):
        degraded = Truth(
            True,
            reasons.PROGRESS_NOT_SAVED,
            "no process holds the job's state while it is suspended: it trains from the beginning when it is"
            " resumed, unless the script saved its own progress",
        )
    stopped = Truth(False, reasons.JOB_SUSPENDED, text)
    return {
        reasons.RUNNING: stopped,
        reasons.RESCALING: stopped,
        reasons.DEGRADED: degraded,
        reasons.SUSPENDED: Truth(True, reasons.JOB_SUSPENDED, text),
    }


def over(old: dict[str, Any]) -> dict[str, Truth]:
    """The condition of a job that goes on: False if it ever was suspended, else none."""
    if conditions.reason_of(old, reasons.SUSPENDED) is None:
        return {}
    return {reasons.SUSPENDED: Truth(False, reasons.JOB_RESUMED, "the job was resumed")}


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Event]:
    """What is told when a job is suspended or resumed."""
    was, now = (conditions.is_true(status, reasons.SUSPENDED) for status in (old, new))
    if was == now:
        return []
    if now:
        return [Event(reasons.JOB_SUSPENDED, "the job is suspended: its workers leave")]
    return [Event(reasons.JOB_RESUMED, "the job is resumed")]
