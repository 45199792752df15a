"""Suspending: a halted job has no pods, and keeps its name, counts and status.

Workers are deleted with their grace period, so they leave after the step they are in; the coordinator goes
when the last of them has. None of these ends is counted. A job with checkpoints saves its state before
(`putaway`), and goes on from there when it is resumed; one without says that its progress is gone
(ProgressNotSaved).
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import conditions
from springtide_operator.plan import suspension as halt
from springtide_operator.plan.actions import Action, DeletePod, Event
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.observation import Observation, Problem
from springtide_operator.plan.suspension import halted


def put_away(observation: Observation) -> list[Action]:
    """Delete the coordinator once no worker process is left that could still talk to it; the servers go with
    it (`servers.decide`).
    """
    if any(pod.end is None for pod in observation.workers):
        return []
    return [
        DeletePod(pod.name, pod.uid, reasons.DELETE_SUSPENDED, "the job is suspended and no worker is left")
        for pod in observation.coordinators
        if not pod.deleting
    ]


def truths(
    job: Job,
    observation: Observation,
    problem: Problem | None = None,
    saving: bool = False,
    checkpoint: dict[str, Any] | None = None,
) -> dict[str, Truth]:
    """All conditions of a halted job.

    problem: what keeps it halted that a person must act on. saving: its workers still save its state.
    checkpoint: as in status.
    """
    left = sum(pod.end is None for pod in observation.workers)
    text = f"the job {'is suspended' if job.spec.suspend else 'has no pods'}: {halted(job)}"
    if left:
        text += f"; {left} worker{' leaves' if left == 1 else 's leave'}"
    degraded = conditions.degraded(problem)
    if saving:
        text += "; its state is being saved"
    elif problem is None and job.status.get("generation"):
        degraded = _saved(checkpoint)
    why = halt.reason(job)
    stopped = Truth(False, why, text)
    return {
        reasons.RUNNING: stopped,
        reasons.RESCALING: stopped,
        reasons.DEGRADED: degraded,
        reasons.SUSPENDED: Truth(True, why, text),
    }


def _saved(checkpoint: dict[str, Any] | None) -> Truth:
    """Whether a job without processes has lost anything."""
    if checkpoint is None:
        return Truth(
            True,
            reasons.PROGRESS_NOT_SAVED,
            "no process holds the job's state while it is suspended: it trains from the beginning when it is"
            " resumed, unless the script saved its own progress",
        )
    where = f"checkpoint {checkpoint['name']} (step {checkpoint['step']})"
    if checkpoint.get("upToDate"):
        return Truth(False, reasons.HEALTHY, f"{where} holds the job's state")
    return Truth(
        True,
        reasons.PROGRESS_NOT_SAVED,
        f"the newest checkpoint is {where}: when the job is resumed, what came after is trained again",
    )


def over(job: Job, old: dict[str, Any]) -> dict[str, Truth]:
    """The condition of a job that goes on: False if it ever was halted, else none."""
    before = conditions.reason_of(old, reasons.SUSPENDED)
    if before is None:
        return {}
    queue = job.status.get("queue")
    if queue and before != reasons.JOB_RESUMED:
        return {reasons.SUSPENDED: Truth(False, reasons.ADMITTED, queue.get("message") or "")}
    return {reasons.SUSPENDED: Truth(False, reasons.JOB_RESUMED, "the job was resumed")}


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Event]:
    """What is told when a job is halted, for another reason, or goes on."""
    was, now = (conditions.is_true(status, reasons.SUSPENDED) for status in (old, new))
    before, why = (conditions.reason_of(status, reasons.SUSPENDED) for status in (old, new))
    if why is None or (was, before if was else None) == (now, why if now else None):
        return []
    if why == reasons.JOB_SUSPENDED:
        return [Event(why, "the job is suspended: its workers leave")]
    if why == reasons.JOB_RESUMED:
        return [Event(why, "the job is resumed")]
    return [Event(why, conditions.message_of(new, reasons.SUSPENDED), warning=why == reasons.EVICTED)]
