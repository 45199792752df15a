"""Restarts: every end of a worker pod is counted once, and failed workers come back after a growing,
decaying delay.
"""

from __future__ import annotations

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan.actions import Event
from springtide_operator.plan.ledger import Ledger, Slot, timestamp
from springtide_operator.plan.observation import End, Observation, WorkerPod

BACKOFF_LIMIT_SECONDS = 300.0
BACKOFF_DECAY_SECONDS = 300.0
QUICK_SECONDS = 10.0  # a pod that lives shorter than this feeds the backoff, whoever ended it


def backoff_delay(count: int) -> float:
    """Seconds before a failed worker is replaced: none for the first failure, then 1, 2, 4, ... 300."""
    return 0.0 if count <= 1 else float(min(BACKOFF_LIMIT_SECONDS, 2.0 ** min(count - 2, 20)))


def decayed(count: int, last: float, now: float) -> int:
    """One failure is forgotten for every five minutes without one."""
    return max(0, count - int(max(0.0, now - last) // BACKOFF_DECAY_SECONDS))


def newest_pods(observation: Observation) -> dict[int, WorkerPod]:
    """The pod with the highest attempt of each slot."""
    result: dict[int, WorkerPod] = {}
    for pod in observation.workers:
        if pod.slot not in result or pod.attempt > result[pod.slot].attempt:
            result[pod.slot] = pod
    return result


def how_it_ended(pod: WorkerPod) -> End | None:
    """The end that is counted; None while the pod is to stay.

    A pod that is being deleted has ended for the job, also while its process still leaves: a deletion that
    nobody
    but us asked for is a preemption. If it had failed before the deletion was asked, it stays a failure.
    """
    if pod.end is not None and pod.end.kind == reasons.END_FINISHED:
        return pod.end
    if pod.deleting:
        before = (
            pod.end is not None
            and pod.end.at is not None
            and pod.deletion_asked_at is not None
            and pod.end.at < pod.deletion_asked_at
        )
        if pod.end is not None and before:
            return pod.end
        if pod.deleted_because is not None:
            return End(reasons.END_SCALED_DOWN, pod.deleted_because, "deleted by the operator")
        return End(reasons.END_PREEMPTED, "Deleted", pod.disruption or "the pod was deleted")
    return pod.end


def account(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Event]:
    """Count every end not counted yet, in the ledger; the events tell of them.

    A slot's entry holds the attempt counted last, so an operator that dies after writing status counts
    nothing twice, and one that dies before counts it at its next start.
    """
    events: list[Event] = []
    newest = newest_pods(observation)
    for slot, pod in newest.items():
        entry = ledger.slots.get(slot)
        newer = entry is None or pod.attempt > entry.attempt
        if newer or (entry is not None and pod.attempt == entry.attempt and entry.uid != pod.uid):
            ledger.slots[slot] = Slot(pod.attempt, pod.uid)
        elif entry is not None and entry.ended == reasons.END_SCALED_DOWN and pod.live:
            # It was to be given back, and was not: whoever still wants that says so again in this round.
            ledger.slots[slot] = Slot(pod.attempt, pod.uid)
    for slot in sorted(ledger.slots):
        entry = ledger.slots[slot]
        if entry.ended is not None or entry.uid is None:
            continue
        found = newest.get(slot)
        if found is None or found.attempt < entry.attempt:
            end: End | None = End(reasons.END_PREEMPTED, "Vanished", "the pod is gone without a trace")
            events += _count(job, ledger, slot, None, end, now)
            continue
        end = how_it_ended(found)
        if end is not None:
            events += _count(job, ledger, slot, found, end, now)
    return events


def _count(
    job: Job, ledger: Ledger, slot: int, pod: WorkerPod | None, end: End | None, now: float
) -> list[Event]:
    assert end is not None
    name = pod.name if pod is not None else f"of slot {slot}"
    ledger.end(slot, end.kind)
    quick = pod is not None and now - pod.created_at < QUICK_SECONDS
    if end.kind == reasons.END_FAILED:
        ledger.failures += 1
        ledger.last_failure = {
            "pod": name,
            "reason": end.reason[:128],
            "message": end.message[:2048],
            "exitCode": end.exit_code,
            "time": timestamp(end.at if end.at is not None else now),
        }
        _raise_backoff(ledger, now)
        limit = job.spec.failure_policy.backoff_limit
        counted = f"failure {ledger.failures}, failurePolicy.backoffLimit is {limit}"
        text = f"worker {name}: {end.message} ({counted})"
        return [Event(reasons.EVENT_WORKER_FAILED, text, warning=True)]
    if end.kind in (reasons.END_PREEMPTED, reasons.END_LEFT):
        ledger.preemptions += 1
        if quick:
            _raise_backoff(ledger, now)
        return [
            Event(reasons.EVENT_WORKER_PREEMPTED, f"worker {name}: {end.message}; not counted as a failure")
        ]
    return []


def _raise_backoff(ledger: Ledger, now: float) -> None:
    ledger.backoff_count = decayed(ledger.backoff_count, ledger.backoff_last, now) + 1
    ledger.backoff_last = now
    ledger.backoff_until = now + backoff_delay(ledger.backoff_count)


def waits(ledger: Ledger, slot: int, now: float) -> bool:
    """True while the slot's next pod is held back."""
    entry = ledger.slots.get(slot)
    held = (reasons.END_FAILED, reasons.END_PREEMPTED, reasons.END_LEFT, reasons.END_FINISHED)
    return entry is not None and entry.ended in held and now < ledger.backoff_until


def exceeded(job: Job, ledger: Ledger) -> str | None:
    """The message with which the job fails once more workers failed than it endures."""
    limit = job.spec.failure_policy.backoff_limit
    if ledger.failures <= limit:
        return None
    last = ledger.last_failure or {}
    return (
        f"worker {last.get('pod', '?')}: {last.get('message', 'failed')}"
        f" ({ledger.failures} worker failures, failurePolicy.backoffLimit is {limit})"
    )
