"""Suspending: a halted job has no pods, and keeps its name, counts and status.

Workers are deleted with their grace period, so they leave after the step they are in; the coordinator goes
when the last of them has. None of these ends is counted. A job without checkpoints says that its progress is
gone (ProgressNotSaved).

A job with checkpoints is halted in two steps. First its workers are told to leave, by way of the coordinator:
they stop after the same step, write a checkpoint, and go. When the coordinator has told what was saved, the
pods are deleted, as those of any halted job. Whatever cannot be saved is not waited for longer than
SAVE_SECONDS, counted from when this process first saw that the job is halted (`first_seen`).
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import conditions
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.actions import Action, DeletePod, Event
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, Problem
from springtide_operator.plan.values import parse_time


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
    """Return all conditions of a halted job.

    Args:
        job: with its status.
        observation: of the job.
        problem: what keeps it halted that a person must act on.
        saving: its workers still save its state.
        checkpoint: as in status.
    """
    left = sum(pod.end is None for pod in observation.workers)
    text = f"the job {'is suspended' if job.spec.suspend else 'has no pods'}: {job.halted}"
    if left:
        text += f"; {left} worker{' leaves' if left == 1 else 's leave'}"
    degraded = conditions.degraded(problem)
    if saving:
        text += "; its state is being saved"
    elif problem is None and job.status.get("generation"):
        degraded = _saved(checkpoint)
    why = job.halt_reason
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
    """Return the condition of a job that goes on: False if it ever was halted, else none.

    Args:
        job: with its status.
        old: status as it was.
    """
    before = conditions.reason_of(old, reasons.SUSPENDED)
    if before is None:
        return {}
    queue = job.status.get("queue")
    if queue and before != reasons.JOB_RESUMED:
        return {reasons.SUSPENDED: Truth(False, reasons.ADMITTED, queue.get("message") or "")}
    return {reasons.SUSPENDED: Truth(False, reasons.JOB_RESUMED, "the job was resumed")}


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Event]:
    """Return the events about a job that is halted, for another reason, or goes on.

    Args:
        old: status before the plan.
        new: status after it.
    """
    was, now = (conditions.is_true(status, reasons.SUSPENDED) for status in (old, new))
    before, why = (conditions.reason_of(status, reasons.SUSPENDED) for status in (old, new))
    if why is None or (was, before if was else None) == (now, why if now else None):
        return []
    if why == reasons.JOB_SUSPENDED:
        return [Event(why, "the job is suspended: its workers leave")]
    if why == reasons.JOB_RESUMED:
        return [Event(why, "the job is resumed")]
    return [Event(why, conditions.message_of(new, reasons.SUSPENDED), warning=why == reasons.EVICTED)]


SAVE_SECONDS = 600.0
DEAF_SECONDS = 30.0  # a coordinator that does not answer for so long tells nobody to save
LAST_REPORT_SECONDS = 30.0  # for the coordinator to tell, after the last worker's end, what was saved


def leave_at(job: Job, observation: Observation) -> float:
    """Return when the members leave whatever is saved, by the operator's steady clock; 0 while they are not
    told to.

    They are told when status says so: an operator that dies in between must find it there.

    Args:
        job: with its status.
        observation: of the job.
    """
    since = _halted_since(job, observation)
    return since + SAVE_SECONDS if since is not None and saves(job) else 0.0


def leave_by(job: Job) -> float:
    """Return the same in unix time, for coordinators that know no durations; 0 while they are not told to."""
    since = _halted_at(job)
    return since + SAVE_SECONDS if since is not None and saves(job) else 0.0


def saves(job: Job) -> bool:
    """Whether there is anything to save, and a place for it."""
    return bool(job.halted) and job.spec.checkpoint is not None and bool(job.status.get("generation"))


def waits(job: Job, observation: Observation, ledger: Ledger, now: float) -> bool:
    """Return whether the workers of a halted job are still given time to save, or its coordinator to tell of
    it.

    All may have saved and left between two calls: only the coordinator knows the name of their checkpoint.

    Args:
        job: with its status.
        observation: of the job.
        ledger: of this round.
        now: in unix seconds.
    """
    if not saves(job) or coordinator_policy.current(observation, ledger) is None:
        return False
    since = _halted_since(job, observation)
    if since is None:
        return True  # status says so with this round
    if observation.seen_for(_until(observation, since), now) >= 0:
        return False
    deaf_since = observation.unreachable_since if observation.steady is None else observation.deaf_since
    if deaf_since is not None and observation.seen_for(deaf_since, now) >= DEAF_SECONDS:
        return False
    report = observation.report_of(ledger.incarnation)
    if report is None or not report.put_away:
        return True
    at = report.at if observation.steady is None else report.steady_at
    return at is None or at < since


def wakes(job: Job, observation: Observation, now: float) -> list[float]:
    """Return when to look again, in unix seconds.

    Args:
        job: that is halted.
        observation: of its pods.
        now: in unix seconds.
    """
    since = _halted_since(job, observation)
    if since is None or not saves(job):
        return []
    return [now - observation.seen_for(_until(observation, since), now)]


def _until(observation: Observation, since: float) -> float:
    """Return until when a halted job is waited for, by the steady clock.

    Args:
        observation: of the job.
        since: when it was halted, by that clock.
    """
    until = since + SAVE_SECONDS
    if observation.live_pods:
        return until
    return min(until, _left_at(observation, since) + LAST_REPORT_SECONDS)


def _left_at(observation: Observation, since: float) -> float:
    """Return when the last known worker ended, and not before the job was halted; by the steady clock."""
    if observation.steady is not None:
        return observation.left_since if observation.left_since is not None else observation.steady
    ends = [pod.end.at for pod in observation.workers if pod.end is not None and pod.end.at is not None]
    return max([since, *ends])


def let_leave(observation: Observation, ledger: Ledger) -> None:
    """Note that the workers end by themselves: written down before they do, so that none of these ends is
    counted.

    Args:
        observation: of the job.
        ledger: is changed in place.
    """
    for pod in observation.live_pods:
        ledger.end(pod.slot, reasons.END_SCALED_DOWN)


def stragglers(job: Job, observation: Observation, ledger: Ledger) -> list[DeletePod]:
    """Delete workers that still leave while their job is resumed: they were told, and others take their
    places.

    Args:
        job: with its status.
        observation: of the job.
        ledger: is changed in place.

    Returns:
        One deletion for each.
    """
    if job.halted or job.spec.checkpoint is None or not conditions.is_true(job.status, reasons.SUSPENDED):
        return []
    live = observation.live_pods
    let_leave(observation, ledger)
    return [
        DeletePod(pod.name, pod.uid, reasons.DELETE_SUSPENDED, "it was told to leave before the job resumed")
        for pod in live
    ]


def saved_name(status: dict[str, Any]) -> str:
    """Name of the checkpoint that the job was put away with, if that holds all there was."""
    checkpoint = status.get("checkpoint") or {}
    return str(checkpoint["name"]) if checkpoint.get("upToDate") else ""


def events_of_saving(old: dict[str, Any], new: dict[str, Any], observation: Observation) -> list[Event]:
    """Return the event that training goes on from a checkpoint.

    Args:
        old: status as it was.
        new: status as it is to be.
        observation: of the job.
    """
    report = observation.report
    if report is None or not new.get("restored") or old.get("restored") == new["restored"]:
        return []
    text = f"training goes on from {new['restored']} (step {report.restored_step})"
    if report.not_restored:
        text += f"; newer ones could not be used: {'; '.join(report.not_restored)}"
    return [Event(reasons.EVENT_RESTORED, text[:1000], warning=bool(report.not_restored))]


def _halted_since(job: Job, observation: Observation) -> float | None:
    """Return since when the job is halted, by the steady clock; None while status does not say that it is."""
    at = _halted_at(job)
    return at if at is None or observation.steady is None else observation.halted_since


def _halted_at(job: Job) -> float | None:
    """Return since when the job is halted, in unix seconds; None while status does not say that it is."""
    condition = conditions.find(job.status, reasons.SUSPENDED)
    if not job.halted or condition is None or condition.get("status") != "True":
        return None
    return parse_time(condition.get("lastTransitionTime"))
