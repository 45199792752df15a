"""Completion: the job succeeds when a worker says Finished, never by exit codes alone; it fails for stated
reasons.

activeDeadlineSeconds counts from status.startTime, which suspending takes away and resuming sets anew, as for
a Kubernetes Job.
"""

from __future__ import annotations

from dataclasses import dataclass

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import hangs, memory, restarts, template
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Finished, Observation, WorkerPod
from springtide_operator.plan.values import parse_time, timestamp

LAST_REPORT_SECONDS = 60.0
LAST_CALLS_SECONDS = 15.0  # of failed calls after the end, until the coordinator is given up


@dataclass(frozen=True)
class Outcome:
    succeeded: bool
    reason: str
    message: str
    finished: Finished | None = None


def decide(job: Job, observation: Observation, ledger: Ledger, now: float) -> Outcome | None:
    """Decide whether the job has succeeded or failed; None while it goes on.

    Args:
        job: with its limits.
        observation: of its pods and its coordinator.
        ledger: of its restarts.
        now: unix seconds.
    """
    pod = finished_worker(observation, ledger)
    if pod is not None and pod.end is not None and pod.end.finished is not None:
        text = f"worker {pod.name} finished" + (f": {pod.end.message}" if pod.end.exit_code else "")
        return Outcome(True, reasons.WORKER_FINISHED, text, pod.end.finished)
    if ledger.fatal is not None:
        return Outcome(False, ledger.fatal_reason, ledger.fatal)
    exceeded = restarts.exceeded(job, ledger)
    if exceeded is not None:
        return Outcome(False, exceeded.reason, exceeded.message)
    poison = poisoned(observation, ledger)
    if poison is not None:
        return Outcome(False, reasons.POISON_STEP, poison)
    hung = hangs.fatal(job, observation)
    if hung is not None:
        return Outcome(False, hung.reason, hung.message)
    late = deadline_exceeded(job, now)
    if late is not None:
        return Outcome(False, reasons.DEADLINE_EXCEEDED, late)
    invalid = template.fatal(job, observation)
    return Outcome(False, reasons.INVALID_TEMPLATE, invalid) if invalid is not None else None


def awaits_last_report(outcome: Outcome, observation: Observation, ledger: Ledger, now: float) -> bool:
    """Return whether the coordinator of a job that succeeded, or whose model does not fit, is still to be
    asked, once, what it knows of the end.

    A job may have trained and ended between two calls: then nothing of it (what it was restored from, what it
    lost, what memory its model takes) has been heard. One that cannot be reached for some time after the end
    is not waited for; calls before the end may have come before it listened. Its node may be late to say that
    it runs: a worker that finished under it, or was told by it to begin, proves that it did.

    Args:
        outcome: how the job ends.
        observation: of the job.
        ledger: with the incarnation in status.
        now: in unix seconds.
    """
    at, since = ended_at(outcome, observation), observation.unreachable_since
    if at is None or abs(now - at) > LAST_REPORT_SECONDS:
        return False
    if since is not None and now - max(since, at) >= LAST_CALLS_SECONDS:
        return False
    coordinator = next((c for c in observation.coordinators if c.incarnation == ledger.incarnation), None)
    if coordinator is None or not coordinator.live:
        return False
    under = outcome.finished.incarnation if outcome.finished is not None else ledger.incarnation
    if coordinator.running_since is None and under != ledger.incarnation:
        return False
    report = observation.report_of(ledger.incarnation)
    if report is None:
        return True
    ended = {pod.uid for pod in observation.workers if pod.end is not None}
    return report.asked_living is not None and not ended.isdisjoint(report.asked_living)


def ended_at(outcome: Outcome, observation: Observation) -> float | None:
    """Return when the last of the workers ended that finished, or whose model does not fit.

    Args:
        outcome: of the job.
        observation: of its pods.

    Returns:
        Unix seconds by its node's clock; None where none has, or where the job ends for another reason.
    """
    ends = [pod.end for pod in observation.workers if pod.end is not None]
    if outcome.reason == reasons.MEMORY_TOO_SMALL:
        ends = [end for end in ends if end.exception == memory.ERROR]
    else:
        ends = [end for end in ends if outcome.finished is not None and end.finished is not None]
    return max((end.at for end in ends if end.at is not None), default=None)


def poisoned(observation: Observation, ledger: Ledger) -> str | None:
    """Describe a step that ends one worker after the other; None while there is none.

    Args:
        observation: with the coordinator's report.
        ledger: with the incarnation that is believed.
    """
    report = observation.report_of(ledger.incarnation)
    if report is None or report.poison is None:
        return None
    found = report.poison
    return (
        f"step {found.step} ({found.samples}) has ended {' and '.join(found.workers)} with the same "
        f"exception, and would end the next worker too: {found.detail}"
    )


def finished_worker(observation: Observation, ledger: Ledger) -> WorkerPod | None:
    """Return a worker whose Finished counts.

    It counts from a generation of the coordinator incarnation in status, and from one that this coordinator
    has adopted. From another it counts only when no worker process is left: then its coordinator was replaced
    after all had ended, and no other history of the job can exist.

    Args:
        observation: of the job.
        ledger: with the incarnation in status.

    Returns:
        None where there is none.
    """
    report = observation.report_of(ledger.incarnation)
    adopted = (report.generation_incarnation, report.generation) if report is not None else None
    said = [pod for pod in observation.workers if pod.end is not None and pod.end.finished is not None]
    alone = all(pod.end is not None for pod in observation.workers)
    for pod in sorted(said, key=lambda pod: (pod.slot, pod.attempt)):
        assert pod.end is not None
        finished = pod.end.finished
        assert finished is not None
        named = (finished.incarnation, finished.generation)
        if alone or finished.incarnation == ledger.incarnation or named == adopted:
            return pod
    return None


def deadline(job: Job) -> float | None:
    """Unix seconds at which the job's time is over; None without a limit, or while it is not active."""
    limit, since = job.spec.active_deadline_seconds, parse_time(job.status.get("startTime"))
    return since + limit if limit is not None and since is not None and not job.halted else None


def deadline_exceeded(job: Job, now: float) -> str | None:
    """Return the reason with which a job fails whose time is over; None while there is time.

    Args:
        job: with its deadline.
        now: unix seconds.
    """
    at = deadline(job)
    if at is None or now < at:
        return None
    limit = job.spec.active_deadline_seconds
    return (
        f"the job was active for {limit} s, its activeDeadlineSeconds, since {timestamp(at - (limit or 0))}"
    )


def wakes(job: Job) -> list[float]:
    """Return when to look again, in unix seconds; empty without a deadline."""
    at = deadline(job)
    return [] if at is None else [at]
