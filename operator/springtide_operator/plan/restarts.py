"""Restarts: every end of a worker pod is counted once, against the budget that its cause belongs to, and the
worker comes back after a growing, decaying delay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from springtide_operator.api import reasons
from springtide_operator.api.failure_rules import RuleAction
from springtide_operator.api.job import Job
from springtide_operator.plan import elasticity, rules, standby
from springtide_operator.plan.actions import Action, DeletePod, Event
from springtide_operator.plan.ledger import Ledger, Slot, open_ones, take_in
from springtide_operator.plan.observation import End, Observation, Problem, WorkerPod
from springtide_operator.plan.retry import QUICK_SECONDS
from springtide_operator.plan.rules import Verdict
from springtide_operator.plan.values import timestamp

ROLE = "worker"

# What the end of a pod was that we deleted, by the reason that we wrote on it.
_OWN_DELETIONS = {
    reasons.DELETE_GIVEN_UP: reasons.END_FAILED,
    reasons.DELETE_HUNG: reasons.END_FAILED,
    reasons.DELETE_NODE_LOST: reasons.END_PREEMPTED,
    reasons.DELETE_STUCK: reasons.END_PREEMPTED,
    reasons.DELETE_OUTDATED: reasons.END_OUTDATED,
}
_UNCOUNTED = (
    reasons.END_FINISHED,
    reasons.END_SCALED_DOWN,
    reasons.END_SURPLUS,
    reasons.END_OUTDATED,
)


_HELD = (
    reasons.END_FAILED,
    reasons.END_PREEMPTED,
    reasons.END_LEFT,
    reasons.END_FINISHED,
    reasons.END_SURPLUS,
)
"""Ends after which the next pod may have to wait."""


class Ended(NamedTuple):
    """One end that was not counted before. `pod`: None where it left no trace."""

    slot: int
    pod: WorkerPod | None
    end: End
    verdict: Verdict
    moved: bool = False  # another pod has its slot already
    worked: bool = False  # it took part in training

    @property
    def is_counted(self) -> bool:
        return self.end.kind not in _UNCOUNTED

    def lived(self, now: float) -> float:
        """Seconds from its process's start, or its own, to its end."""
        if self.pod is None:  # nobody knows
            return math.inf if self.worked else 0.0
        if self.end.waiting:
            return 0.0
        began = self.pod.started_at if self.pod.started_at is not None else self.pod.created_at
        return max(0.0, (self.end.at if self.end.at is not None else now) - began)

    @property
    def name(self) -> str:
        return self.pod.name if self.pod is not None else f"of slot {self.slot}"

    @property
    def cause(self) -> str:
        """Ends of one cause that come together are one decision."""
        detail = self.end.exception or (str(self.end.exit_code) if self.end.exit_code else "")
        return "/".join(part for part in (self.verdict.counts, self.end.reason, detail) if part)[:128]


def how_it_ended(pod: WorkerPod) -> End | None:
    """The end that is counted; None while the pod is to stay.

    A pod that is being deleted has ended for the job, also while its process still leaves: a deletion that
    nobody but us asked for is a preemption. If it had failed before the deletion was asked, it stays a
    failure.
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
            kind = _OWN_DELETIONS.get(pod.deleted_because, reasons.END_SCALED_DOWN)
            return End(kind, pod.deleted_because, "deleted by the operator")
        reason = pod.disruption_reason or "Deleted"
        return End(reasons.END_PREEMPTED, reason, pod.disruption or "the pod was deleted")
    return pod.end


def record_exits(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Event]:
    """Count every end not counted yet; the events tell of them.

    A slot's entry holds the attempt counted last, so an operator that dies after writing status counts
    nothing twice, and one that dies before counts it at its next start.

    Args:
        job: with its status.
        observation: of the job.
        ledger: is changed in place.
        now: in unix seconds.
    """
    newest = observation.newest_pods
    _meet(newest, ledger)
    _note_who_trains(observation, ledger)
    _note_who_stands_by(job, newest, observation, ledger)
    idle: list[Ended] = []
    by_uid = {pod.uid: pod for pod in observation.workers}
    groups: dict[str, list[Ended]] = {}
    for slot in sorted(ledger.slots):
        entry = ledger.slots[slot]
        if entry.moves is not None:
            ended = _look(job, slot, by_uid.get(entry.moves))
            if ended is not None:
                ledger.slots[slot] = replace(entry, moves=None)
                if ended.is_counted:
                    groups.setdefault(ended.cause, []).append(ended._replace(moved=True))
        if entry.ended is not None or entry.uid is None:
            continue
        found = newest.get(slot)
        ended = _look(job, slot, found if found is not None and found.attempt >= entry.attempt else None)
        stood_by = entry.standby and not _took_part(entry.uid, observation)
        if ended is not None and ended.is_counted and stood_by:
            idle.append(ended._replace(worked=entry.healthy))
        elif ended is not None and ended.is_counted:
            groups.setdefault(ended.cause, []).append(ended._replace(worked=entry.healthy))
        elif ended is not None:
            ledger.end(slot, ended.end.kind)
            if ended.end.kind == reasons.END_SURPLUS:
                ledger.raise_backoff(ROLE, now)  # the next one would be, too, until the job's end is read
    ledger.incidents = open_ones(ledger.incidents, now)
    events = [_decide(job, ledger, cause, together, now) for cause, together in groups.items()]
    return events + _end_standbys(ledger, idle, now)


def _meet(newest: Mapping[int, WorkerPod], ledger: Ledger) -> None:
    """Write down the uids of pods that are seen for the first time."""
    for slot, pod in newest.items():
        entry = ledger.slots.get(slot)
        if entry is None or pod.attempt > entry.attempt:
            ledger.slots[slot] = Slot(pod.attempt, pod.uid)
        elif pod.attempt < entry.attempt:
            continue
        elif entry.uid != pod.uid:
            ledger.slots[slot] = Slot(pod.attempt, pod.uid, moves=entry.moves, standby=entry.standby)
        elif entry.ended in (reasons.END_SCALED_DOWN, reasons.END_OUTDATED) and pod.live:
            # It was to go, and did not: whoever still wants that says so again in this round.
            ledger.slots[slot] = Slot(pod.attempt, pod.uid, moves=entry.moves, standby=entry.standby)


def _note_who_trains(observation: Observation, ledger: Ledger) -> None:
    """A worker that has taken part stays known for that, also when the coordinator is gone with it."""
    report = observation.report_of(ledger.incarnation)
    if report is None or not report.training:
        return
    active = {member.pod_uid for member in report.members if member.active}
    for slot, entry in ledger.slots.items():
        if entry.uid in active and entry.ended is None and not entry.healthy:
            ledger.slots[slot] = replace(entry, healthy=True)


def _note_who_stands_by(
    job: Job, newest: Mapping[int, WorkerPod], observation: Observation, ledger: Ledger
) -> None:
    """Note which pods live beyond the workers wanted: of those that do not train as many as are lacking are
    workers, those that are ready first; the rest stands by. Without the coordinator's word all stay what they
    are.
    """
    if not job.spec.workers.standby:
        for slot, entry in ledger.slots.items():
            if entry.standby and entry.ended is None:
                ledger.slots[slot] = replace(entry, standby=False)
        return
    report = observation.report_of(ledger.incarnation)
    if report is None or not report.training or job.halted:
        return
    active = {member.pod_uid for member in report.members if member.active}
    present = [
        pod
        for slot, pod in sorted(newest.items())
        if pod.live and (known := ledger.slots.get(slot)) and known.uid == pod.uid and known.ended is None
    ]
    per_pod = job.spec.workers.processes_per_pod
    others = [pod for pod in present if pod.uid not in active]
    others.sort(key=lambda pod: (not standby.is_ready(pod, report, per_pod), pod.slot))
    lacking = max(0, elasticity.size(job) - (len(present) - len(others)))
    stand_by = {pod.slot for pod in others[lacking:]}
    ready_ones = {pod.slot for pod in others[lacking:] if standby.is_ready(pod, report, per_pod)}
    if len(ready_ones) >= job.spec.workers.standby:
        ledger.standby_end = ""  # what it was is over
    for pod in present:
        entry = ledger.slots[pod.slot]
        ready = pod.slot in ready_ones
        ledger.slots[pod.slot] = replace(entry, standby=pod.slot in stand_by, healthy=entry.healthy or ready)


def _took_part(uid: str, observation: Observation) -> bool:
    """Return whether a generation had a pod: it was let in, and ended before the operator could hear that it
    trained.
    """
    return observation.report is not None and uid in observation.report.former_members


def _end_standbys(ledger: Ledger, ended: Sequence[Ended], now: float) -> list[Event]:
    """Write down the ends of standbys, which only hold up the next ones where they do not live long."""
    events = []
    backoff = ledger.backoff(standby.ROLE)
    for one in ended:
        healthy = backoff.healthy(one.lived(now), one.worked, now)
        node = one.pod.node if one.pod is not None else None
        ledger.end(
            one.slot, one.end.kind, node if one.verdict.action is RuleAction.REPLACE else None, healthy
        )
        ledger.standby_end = f"standby {one.name}: {one.end.message}"[:1024]
        failed = one.end.kind == reasons.END_FAILED
        text = f"{ledger.standby_end}; it took no part, and counts in no budget"
        events.append(Event(reasons.EVENT_STANDBY_ENDED, text, warning=failed))
    if not ended:
        return []
    if any(not ledger.slots[one.slot].healthy for one in ended):
        ledger.raise_backoff(standby.ROLE, now)
    else:
        ledger.ease_backoff(standby.ROLE, now)
    return events


def _look(job: Job, slot: int, pod: WorkerPod | None) -> Ended | None:
    """How a slot's pod ended; None while it is to stay."""
    end: End | None = End(reasons.END_PREEMPTED, "Vanished", "the pod is gone without a trace")
    if pod is not None:
        end = how_it_ended(pod) or _waits_in_vain(job, pod)
    if end is None:
        return None
    return Ended(slot, pod, end, rules.judge(job.spec.failure_policy.rules, end))


def _waits_in_vain(job: Job, pod: WorkerPod) -> End | None:
    """A pod that waits for what a rule says not to wait for has failed."""
    if not pod.live or pod.running or pod.problem is None or not pod.problem.cause:
        return None
    end = End(reasons.END_FAILED, pod.problem.cause, pod.problem.message, waiting=True)
    verdict = rules.judge(job.spec.failure_policy.rules, end)
    return end if verdict.rule and verdict.action is not RuleAction.IGNORE else None


def _decide(job: Job, ledger: Ledger, cause: str, together: Sequence[Ended], now: float) -> Event:
    """One restart decision for workers that ended together for one cause."""
    slots = [ended.slot for ended in together]
    ledger.incidents, new = take_in(ledger.incidents, cause, slots, now)
    first, verdict = together[0], together[0].verdict
    backoff = ledger.backoff(ROLE)
    healthy = {one.slot: backoff.healthy(one.lived(now), one.worked, now) for one in together}
    for ended in together:
        if ended.moved:
            continue
        node = ended.pod.node if ended.pod is not None else None
        avoid = node if verdict.action is RuleAction.REPLACE else None
        ledger.end(ended.slot, ended.end.kind, avoid, healthy[ended.slot])
    counts = ledger.counts
    quick = any(one.pod is not None and now - one.pod.created_at < QUICK_SECONDS for one in together)
    failed = first.end.kind == reasons.END_FAILED or verdict.counts == rules.FAILURE
    if new and all(healthy.values()):
        ledger.ease_backoff(ROLE, now)
    elif new and (failed or quick):
        ledger.raise_backoff(ROLE, now)
    if failed:
        last = max(together, key=lambda one: one.end.at or now)
        ledger.last_failure = {
            "pod": last.name,
            "reason": last.end.reason[:128],
            "message": last.end.message[:2048],
            "exitCode": last.end.exit_code,
            "time": timestamp(last.end.at if last.end.at is not None else now),
        }
    who = f"worker {first.name}"
    if len(together) > 1:
        who += f" and {len(together) - 1} more"
    text = f"{who}: {first.end.message}"
    ruled = f"; {verdict.rule}" if verdict.rule else ""
    if verdict.action is RuleAction.FAIL_JOB:
        ledger.fatal = f"{text} ({verdict.rule})" if verdict.rule else text
        ledger.fatal_reason = verdict.reason
    if verdict.counts == rules.FAILURE:
        counts.failures += new
        counts.failed_workers += len(together)
        limit = job.spec.failure_policy.backoff_limit
        counted = f"failure {counts.failures}, failurePolicy.backoffLimit is {limit}"
        return Event(reasons.EVENT_WORKER_FAILED, f"{text} ({counted}{ruled})", warning=True)
    if verdict.counts == rules.IGNORED:
        counts.ignored += new
        return Event(reasons.EVENT_WORKER_IGNORED, f"{text} (not counted{ruled})")
    counts.preemptions += new
    counts.preempted_workers += len(together)
    return Event(reasons.EVENT_WORKER_PREEMPTED, f"{text}; not counted as a failure{ruled}")


def give_up(observation: Observation, ledger: Ledger) -> list[Action]:
    """Delete the pods that were counted as failed while they wait for what a rule says not to wait for.

    Args:
        observation: of the job.
        ledger: with what was counted in this round.

    Returns:
        One deletion for each.
    """
    result: list[Action] = []
    for slot, pod in sorted(observation.newest_pods.items()):
        entry = ledger.slots.get(slot)
        counted = entry is not None and entry.attempt == pod.attempt and entry.ended == reasons.END_FAILED
        if pod.live and counted:
            why = pod.problem.message if pod.problem is not None else "it was counted as failed"
            result.append(DeletePod(pod.name, pod.uid, reasons.DELETE_GIVEN_UP, why))
    return result


def waits(ledger: Ledger, slot: int, now: float) -> bool:
    """Return whether the slot's next pod is held back. That of a healthy one is not, whatever others do.

    Args:
        ledger: with what was counted in this round.
        slot: number of the worker.
        now: in unix seconds.
    """
    entry = ledger.slots.get(slot)
    if entry is None or entry.healthy or entry.ended not in _HELD:
        return False
    return now < ledger.backoff(ROLE).until


def waits_as_standby(ledger: Ledger, slot: int, now: float) -> bool:
    """Return whether the slot's next pod, which is to stand by, is held back: as a worker's after a worker,
    else by the ends of standbys.

    Args:
        ledger: with what was counted in this round.
        slot: number of the worker.
        now: in unix seconds.
    """
    entry = ledger.slots.get(slot)
    if entry is None or not entry.standby:
        return waits(ledger, slot, now) or now < ledger.backoff(standby.ROLE).until
    return entry.ended in _HELD and not entry.healthy and now < ledger.backoff(standby.ROLE).until


def exceeded(job: Job, ledger: Ledger) -> Problem | None:
    """Return the problem with which the job fails once more restarts were needed than it endures; None
    before.

    Args:
        job: with its limits.
        ledger: with its counts.
    """
    policy, counts = job.spec.failure_policy, ledger.counts
    if counts.failures > policy.backoff_limit:
        last = ledger.last_failure or {}
        text = (
            f"worker {last.get('pod', '?')}: {last.get('message', 'failed')}"
            f" ({counts.failures} worker failures, failurePolicy.backoffLimit is {policy.backoff_limit})"
        )
        return Problem(reasons.BACKOFF_LIMIT_EXCEEDED, text)
    limit = policy.preemption_limit
    if limit is not None and counts.preemptions > limit:
        text = (
            f"workers were preempted, evicted or deleted {counts.preemptions} times,"
            f" failurePolicy.preemptionLimit is {limit}"
        )
        return Problem(reasons.PREEMPTION_LIMIT_EXCEEDED, text)
    return None
