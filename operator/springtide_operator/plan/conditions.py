"""Conditions carry the truth; the state for people is derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import sight, sizing
from springtide_operator.plan.completion import Outcome
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, Problem, Report, ServerPod, WorkerPod
from springtide_operator.plan.values import timestamp

# The short pause while a generation is formed is no news; one that lasts is.
PAUSE_SECONDS = 4.0
# A worker that tells of a step within it trains, whoever cannot be reached.
IDLE_SECONDS = 2.0

_ORDER = (
    reasons.RUNNING,
    reasons.RESCALING,
    reasons.DEGRADED,
    reasons.SUSPENDED,
    reasons.SUCCEEDED,
    reasons.FAILED,
    *reasons.READINESS,
)


@dataclass(frozen=True)
class Truth:
    """Status, reason and message of one condition."""

    true: bool
    reason: str
    message: str


def running(job: Job, observation: Observation, ledger: Ledger, old: dict[str, Any], now: float) -> Truth:
    """Return whether training goes on.

    Without the coordinator's word it is what it was: workers do not need it to train.

    Args:
        job: with its status.
        observation: of the job.
        ledger: with the incarnation and the slots.
        old: status as it was.
        now: in unix seconds.
    """
    before = find(old, reasons.RUNNING)
    was = before is not None and before.get("status") == "True"
    report = observation.report_of(ledger.incarnation)
    if (unknown := _unknown(observation, report, before)) is not None:
        return unknown
    if report is None:
        if was and before is not None and any(pod.running for pod in observation.workers):
            return Truth(True, before["reason"], before["message"])
        if not ledger.slots:
            return Truth(False, reasons.NOT_STARTED, "the job's coordinator and workers are being made")
        return Truth(False, reasons.COORDINATOR_STARTING, "waits for the coordinator")
    if report.training:
        return _stalled(report) or _training(sizing.expected(job, observation), report)
    if was and report.last_commit_at is not None and now - report.last_commit_at < PAUSE_SECONDS:
        assert before is not None
        return Truth(True, before["reason"], before["message"])
    if report.phase == "FORMING":
        return Truth(False, reasons.FORMING, report.message or "the workers form their group")
    waiting = _some(report.waiting_for)
    text = report.message or "waits for workers"
    if waiting and waiting not in text:
        text += f" (waits for {waiting})"
    if report.last_commit_at is not None:
        text = f"no step since {timestamp(report.last_commit_at)}: {text}"
    return Truth(False, reasons.WAITING_FOR_WORKERS, text)


def _training(want: int, report: Report) -> Truth:
    count = active_workers(report)
    if report.phase in ("ENDING", "AFTER_LOOP"):
        return Truth(True, reasons.FINISHING, f"{count} workers are at the end of the training loop")
    verb = "trains" if count == 1 else "train"
    text = f"{count} of {want} workers {verb} in generation {report.generation}"
    if report.still and report.last_commit_at is not None and not report.opaque:
        text += f"; no step since {timestamp(report.last_commit_at)}"
    return Truth(True, reasons.TRAINING, text)


def _unknown(observation: Observation, report: Report | None, before: dict[str, Any] | None) -> Truth | None:
    """Say that nothing is known of a job that trained: its coordinator does not answer, and no worker tells
    of a step. Workers do not need it to train, so what they tell themselves counts.
    """
    seen, was = observation.sight, before is not None and before.get("status") == "True"
    told = before is not None and before.get("reason") == reasons.COORDINATOR_UNREACHABLE
    if seen is None or seen.silence < sight.TESTIMONY_SECONDS or before is None or not (was or told):
        if told and before is not None and report is None:
            return Truth(False, before["reason"], before["message"])  # until the next coordinator knows
        return None
    idle = sight.idle(observation)
    step_seconds = report.step_seconds if report is not None else 0.0
    if idle is not None and idle < max(IDLE_SECONDS, 3 * step_seconds):
        return Truth(True, before["reason"], before["message"]) if was else None
    if report is not None and report.opaque:
        return None  # its workers tell of no steps
    pods: list[WorkerPod | ServerPod] = [*observation.workers, *observation.servers]
    silent = [pod.name for pod in pods if sight.is_unheard(pod, observation)]
    named = (p for p in observation.coordinators if p.uid == seen.coordinator)
    who = next((f"{p.name} (node {p.node})" for p in named), "the coordinator")
    since = f" since {timestamp(report.last_commit_at)}" if report and report.last_commit_at else ""
    text = f"no step is known of{since}: {who} does not answer"
    if silent:
        text += f", and nothing is heard of {sight.some(sorted(silent))}"
    return Truth(False, reasons.COORDINATOR_UNREACHABLE, text)


def _stalled(report: Report) -> Truth | None:
    """Members are out of reach and no step has been reported for much longer than steps take."""
    if report.phase != "RUNNING" or not report.waiting_for or not report.still:
        return None
    if report.reason not in ("Reconnecting", "OperatorUnreachable") or report.last_commit_at is None:
        return None
    text = (
        f"no step since {timestamp(report.last_commit_at)}: {report.message or report.reason}"
        f" (waits for {_some(report.waiting_for)})"
    )
    return Truth(False, reasons.WAITING_FOR_WORKERS, text)


def wakes(old: dict[str, Any], observation: Observation, ledger: Ledger, now: float) -> list[float]:
    """Return when a pause becomes news, in unix seconds.

    Args:
        old: status as it was.
        observation: of the job.
        ledger: with the incarnation and the slots.
        now: in unix seconds.
    """
    report, seen = observation.report_of(ledger.incarnation), observation.sight
    if seen is not None and seen.silence < sight.TESTIMONY_SECONDS:
        return [now + sight.TESTIMONY_SECONDS - seen.silence]
    if report is None or report.training or not is_true(old, reasons.RUNNING):
        return []
    return [report.last_commit_at + PAUSE_SECONDS] if report.last_commit_at is not None else []


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def active_workers(report: Report) -> int:
    """Pods with a member in the current generation."""
    return len({member.pod_uid for member in report.members if member.active})


def rescaling(job: Job, observation: Observation, ledger: Ledger, started: bool) -> Truth:
    """Return whether the number of training workers differs from the target.

    Args:
        job: with its status.
        observation: of the job.
        ledger: with the incarnation and the slots.
        started: training has started.
    """
    report = observation.report_of(ledger.incarnation)
    if not started or report is None:
        return Truth(False, reasons.NOT_STARTED, "training has not started")
    want = sizing.expected(job, observation)
    active = {member.pod_uid for member in report.members if member.active}
    live = observation.live_pods
    uids = {pod.uid for pod in live}
    if len(active) > want or active - uids:
        leaving = len(active - uids) or len(active) - want
        if len(uids) >= want and len(active) <= want:
            text = "1 worker leaves and is" if leaving == 1 else f"{leaving} workers leave and are"
            return Truth(True, reasons.REPLACING_WORKERS, f"{text} replaced")
        text = "1 worker leaves" if leaving == 1 else f"{leaving} workers leave"
        return Truth(True, reasons.SCALING_DOWN, f"{text}, {want} wanted")
    joining = want - len(active & uids)
    if joining <= 0:
        return Truth(False, reasons.AT_SIZE, f"{want} workers train, as wanted")
    newest = observation.newest_pods
    again = False
    for slot in sizing.wanted_slots(job, observation):
        pod = newest.get(slot)
        entry = ledger.slots.get(slot)
        if pod is not None and pod.live and pod.uid in active:
            continue
        again = again or (entry is not None and (entry.attempt > 0 or entry.ended is not None))
    reason = reasons.REPLACING_WORKERS if again else reasons.SCALING_UP
    verb = "being replaced" if again else "joining"
    return Truth(True, reason, f"{joining} of {want} workers {'is' if joining == 1 else 'are'} {verb}")


def degraded(problem: Problem | None) -> Truth:
    if problem is None:
        return Truth(False, reasons.HEALTHY, "nothing keeps the job from what is wanted")
    return Truth(True, problem.reason, problem.message)


def at_the_end(outcome: Outcome) -> dict[str, Truth]:
    """All conditions of a job that has ended."""
    final = reasons.SUCCEEDED if outcome.succeeded else reasons.FAILED
    text = "the job has ended"
    return {
        reasons.RUNNING: Truth(False, final, text),
        reasons.RESCALING: Truth(False, final, text),
        reasons.DEGRADED: Truth(False, final, text),
        final: Truth(True, outcome.reason, outcome.message),
    }


def write(truths: dict[str, Truth], old: dict[str, Any], generation: int, now: float) -> list[dict[str, Any]]:
    """Return the list for status; lastTransitionTime moves only when the status does.

    Args:
        truths: conditions by type.
        old: status as it was.
        generation: of the job's spec, as metadata has it.
        now: in unix seconds.
    """
    result = []
    for kind in _ORDER:
        truth = truths.get(kind)
        if truth is None:
            continue
        before = find(old, kind)
        status = "True" if truth.true else "False"
        moved = before is None or before.get("status") != status
        result.append(
            {
                "type": kind,
                "status": status,
                "reason": truth.reason,
                "message": truth.message[:4096],
                "lastTransitionTime": timestamp(now)
                if moved or before is None
                else before["lastTransitionTime"],
                "observedGeneration": generation,
            }
        )
    return result


def state(truths: dict[str, Truth], observation: Observation, started: bool) -> str:
    """Return one word for people.

    Args:
        truths: conditions by type.
        observation: of the job.
        started: training has started.
    """
    if reasons.SUCCEEDED in truths:
        return reasons.STATE_SUCCEEDED
    if reasons.FAILED in truths:
        return reasons.STATE_FAILED
    if is_suspended(truths):
        by_user = truths[reasons.SUSPENDED].reason == reasons.JOB_SUSPENDED
        return reasons.STATE_SUSPENDED if by_user else reasons.STATE_QUEUED
    if truths[reasons.RUNNING].true:
        return reasons.STATE_RESCALING if truths[reasons.RESCALING].true else reasons.STATE_RUNNING
    if started:
        return reasons.STATE_RECOVERING
    if any(pod.running for pod in observation.workers):
        return reasons.STATE_STARTING
    return reasons.STATE_PENDING


def message(truths: dict[str, Truth]) -> str:
    """One sentence for people: the outcome, or what is wrong, or what goes on."""
    for kind in (reasons.FAILED, reasons.SUCCEEDED):
        if kind in truths:
            return truths[kind].message[:4096]
    parts = [truths[reasons.SUSPENDED if is_suspended(truths) else reasons.RUNNING].message]
    if truths[reasons.DEGRADED].true:
        parts.append(truths[reasons.DEGRADED].message)
    return "; ".join(parts)[:4096]


def is_suspended(truths: dict[str, Truth]) -> bool:
    return reasons.SUSPENDED in truths and truths[reasons.SUSPENDED].true


def is_true(status: dict[str, Any], kind: str) -> bool:
    """Return whether a condition is there and True.

    Args:
        status: of the job.
        kind: type of the condition.
    """
    condition = find(status, kind)
    return condition is not None and condition.get("status") == "True"


def reason_of(status: dict[str, Any], kind: str) -> str | None:
    """Return the reason of a condition; None where it is not there.

    Args:
        status: of the job.
        kind: type of the condition.
    """
    condition = find(status, kind)
    return None if condition is None else condition.get("reason")


def message_of(status: dict[str, Any], kind: str) -> str:
    """Return the message of a condition; "" where it is not there.

    Args:
        status: of the job.
        kind: type of the condition.
    """
    condition = find(status, kind)
    return "" if condition is None else str(condition["message"])


def find(status: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """Return a condition; None where it is not there.

    Args:
        status: of the job.
        kind: type of the condition.
    """
    for condition in status.get("conditions") or []:
        if condition.get("type") == kind:
            return dict(condition)
    return None
