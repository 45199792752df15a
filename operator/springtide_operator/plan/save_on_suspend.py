"""Saving before suspending: a job with checkpoints is halted in two steps.

First its workers are told to leave, by way of the coordinator: they stop after the same step, write a
checkpoint, and go. When the coordinator has told what was saved, the pods are deleted, as those of any halted
job. Whatever cannot be saved is not waited for longer than SAVE_SECONDS.
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import conditions, sizing
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.actions import DeletePod, Event
from springtide_operator.plan.clock import parse_time
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.suspension import halted

SAVE_SECONDS = 600.0
DEAF_SECONDS = 30.0  # a coordinator that does not answer for so long tells nobody to save
LAST_WORD_SECONDS = 30.0  # for the coordinator to tell, after the last worker's end, what was saved


def leave_by(job: Job) -> float:
    """Unix time at which the members leave whatever is saved; 0 while they are not told to.

    They are told when status says so: an operator that dies in between must find it there.
    """
    since = _halted_since(job)
    return since + SAVE_SECONDS if since is not None and saves(job) else 0.0


def saves(job: Job) -> bool:
    """Whether there is anything to save, and a place for it."""
    return bool(halted(job)) and job.spec.checkpoint is not None and bool(job.status.get("generation"))


def waits(job: Job, observation: Observation, ledger: Ledger, now: float) -> bool:
    """Whether the workers of a halted job are still given time to save, or its coordinator to tell of it.

    All may have saved and left between two calls: only the coordinator knows the name of their checkpoint.
    """
    if not saves(job) or coordinator_policy.current(observation, ledger) is None:
        return False
    since = _halted_since(job)
    if since is None:
        return True  # status says so with this round
    until = since + SAVE_SECONDS
    if not sizing.live_pods(observation):
        until = min(until, _left_at(observation, since) + LAST_WORD_SECONDS)
    deaf_since = observation.unreachable_since
    if now >= until or (deaf_since is not None and now - deaf_since >= DEAF_SECONDS):
        return False
    report = observation.report_of(ledger.incarnation)
    return report is None or report.at < since or not report.put_away


def wakes(job: Job, observation: Observation) -> list[float]:
    """When to look again."""
    until, since = leave_by(job), _halted_since(job)
    if not until or since is None:
        return []
    return [until, _left_at(observation, since) + LAST_WORD_SECONDS]


def _left_at(observation: Observation, since: float) -> float:
    """When the last worker ended that is known of, and not before the job was halted; in unix seconds."""
    ends = [pod.end.at for pod in observation.workers if pod.end is not None and pod.end.at is not None]
    return max([since, *ends])


def let_leave(observation: Observation, ledger: Ledger) -> None:
    """The workers end by themselves: written down before they do, so that none of these ends is counted."""
    for pod in sizing.live_pods(observation):
        ledger.end(pod.slot, reasons.END_SCALED_DOWN)


def stragglers(job: Job, observation: Observation, ledger: Ledger) -> list[DeletePod]:
    """A job is resumed while its workers leave: they were told, and others take their places."""
    if halted(job) or job.spec.checkpoint is None or not conditions.is_true(job.status, reasons.SUSPENDED):
        return []
    live = sizing.live_pods(observation)
    let_leave(observation, ledger)
    return [
        DeletePod(pod.name, pod.uid, reasons.DELETE_SUSPENDED, "it was told to leave before the job resumed")
        for pod in live
    ]


def saved_name(status: dict[str, Any]) -> str:
    """Name of the checkpoint that the job was put away with, if that holds all there was."""
    checkpoint = status.get("checkpoint") or {}
    return str(checkpoint["name"]) if checkpoint.get("upToDate") else ""


def events(old: dict[str, Any], new: dict[str, Any], observation: Observation) -> list[Event]:
    """Training goes on from a checkpoint."""
    report = observation.report
    if report is None or not new.get("restored") or old.get("restored") == new["restored"]:
        return []
    text = f"training goes on from {new['restored']} (step {report.restored_step})"
    if report.not_restored:
        text += f"; newer ones could not be used: {'; '.join(report.not_restored)}"
    return [Event(reasons.EVENT_RESTORED, text[:1000], warning=bool(report.not_restored))]


def _halted_since(job: Job) -> float | None:
    condition = conditions.find(job.status, reasons.SUSPENDED)
    if not halted(job) or condition is None or condition.get("status") != "True":
        return None
    return parse_time(condition.get("lastTransitionTime"))
