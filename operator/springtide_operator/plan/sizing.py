"""Pods for a size: all workers of the target are made at once, the highest slots are given back. Standbys are
made when all workers of the target run, and given back before any of them.

The size itself is decided in `elasticity`, the number of standbys in `standby`.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import elasticity, restarts, standby
from springtide_operator.plan.actions import Action, CreateStandby, CreateWorker, DeletePod
from springtide_operator.plan.ledger import Ledger, Slot
from springtide_operator.plan.observation import Observation, WorkerPod
from springtide_operator.plan.retry import held_back


def target(job: Job) -> int:
    """Worker pods that are to exist."""
    return 0 if job.halted else elasticity.size(job)


def expected(job: Job, observation: Observation) -> int:
    """Return how many workers are to train: extra ones that no node has taken yet are not waited for.

    Args:
        job: with its status.
        observation: of the job.
    """
    return 0 if job.halted else elasticity.expected(job, observation.live_pods)


def settled_slots(observation: Observation) -> set[int]:
    """Slots whose newest pod Finished without ending the job yet: its word counts once the others ended."""
    return {pod.slot for pod in observation.newest_pods.values() if pod.finished}


def wanted_slots(job: Job, observation: Observation) -> list[int]:
    """Return the slots that are to have a pod: those that have one, then the lowest free ones; no more than
    the target.

    Args:
        job: with its status.
        observation: of the job.
    """
    have = [pod.slot for pod in observation.live_pods]
    settled = settled_slots(observation)
    missing = target(job) - len(have) - len(settled)
    taken = settled | set(have)
    free = (slot for slot in range(len(taken) + max(0, missing)) if slot not in taken)
    return sorted(have + [slot for _, slot in zip(range(missing), free, strict=False)])


def missing_slots(job: Job, observation: Observation) -> list[int]:
    """Return the wanted slots that have no live pod; those of standbys are not among them.

    Args:
        job: with its status.
        observation: of the job.
    """
    have = {pod.slot for pod in observation.live_pods}
    return [slot for slot in wanted_slots(job, observation) if slot not in have]


def missing_standbys(job: Job, observation: Observation) -> list[int]:
    """Return the slots in which standbys are to be made: none before all wanted workers run.

    Args:
        job: with its status.
        observation: of the job.
    """
    live = observation.live_pods
    if sum(pod.running for pod in live) < target(job) or missing_slots(job, observation):
        return []
    taken = settled_slots(observation) | {pod.slot for pod in live}
    missing = max(0, target(job) + standby.size(job) - len(taken))
    return [slot for slot in range(len(taken) + missing) if slot not in taken][:missing]


def decide(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Action]:
    """Return creations or deletions of workers, never both for the size's sake.

    Args:
        job: with its status.
        observation: of the job.
        ledger: attempts are raised in it.
        now: in unix seconds.
    """
    live = observation.live_pods
    actions: list[Action] = [*_duplicates(observation, ledger)]
    if victims := _victims(job, live, observation, ledger):
        return actions + _give_back(job, victims, len(live), ledger)
    address = observation.service.address if observation.service is not None else None
    if address is None or not observation.secret_made or held_back(observation, "worker", now):
        return actions
    for slot in missing_slots(job, observation):
        if restarts.waits(ledger, slot, now):
            continue
        before = ledger.slots.get(slot)
        attempt = _next_attempt(job, slot, before, observation)
        why = f"{target(job)} workers are wanted"
        if said := elasticity.why(job):
            why += f": {said}"
        if before is not None and before.ended is not None:
            why = f"slot {slot}'s last pod ended: {before.ended}"
        avoid = before.avoid if before is not None else None
        if avoid is not None:
            why += f", not on node {avoid}"
        moves, edited = (None, False) if before is None else (before.moves, before.edited)
        ledger.slots[slot] = Slot(attempt, avoid=avoid, moves=moves, edited=edited)
        actions.append(CreateWorker(slot, attempt, address, why, avoid))
    if held_back(observation, standby.ROLE, now):
        return actions
    for slot in missing_standbys(job, observation):
        if restarts.waits_as_standby(ledger, slot, now):
            continue
        before = ledger.slots.get(slot)
        attempt = _next_attempt(job, slot, before, observation)
        why = f"{standby.wanted(job)} standbys are wanted"
        avoid = before.avoid if before is not None else None
        ledger.slots[slot] = Slot(
            attempt, avoid=avoid, edited=before is not None and before.edited, standby=True
        )
        actions.append(CreateStandby(slot, attempt, address, why, avoid))
    return actions


def _next_attempt(job: Job, slot: int, before: Slot | None, observation: Observation) -> int:
    """The same number again where the pod was never seen (its creation was refused, or nobody lived to
    try).
    """
    attempt = 0
    if before is not None:
        attempt = before.attempt + 1 if before.ended is not None else before.attempt
    while names.worker_name(job.name, slot, attempt) in observation.taken:
        attempt += 1
    return attempt


def _victims(
    job: Job, live: Sequence[WorkerPod], observation: Observation, ledger: Ledger
) -> list[WorkerPod]:
    """Return the pods to give back: of those that train the highest slots, where more train than are wanted;
    of the others, where there are too many still, first those that do not run, then those that are not ready,
    then the highest slots. A worker that trains runs, also where its node has not said so yet.
    """
    report = observation.report
    members = report.members if report is not None else ()
    uids = {member.pod_uid for member in members if member.active and not member.leaving}
    if report is None:  # those that trained when somebody last knew
        standing = standby.pods(live, ledger)
        known = {slot for slot, entry in ledger.slots.items() if entry.healthy}
        uids = {pod.uid for pod in live if pod.slot in known and pod not in standing}
    training = sorted((pod for pod in live if pod.uid in uids), key=lambda pod: -pod.slot)
    per_pod = job.spec.workers.processes_per_pod
    others = sorted(
        (pod for pod in live if pod.uid not in uids),
        key=lambda pod: (pod.running, standby.is_ready(pod, report, per_pod), -pod.slot),
    )
    too_many = max(0, len(training) - target(job))
    beyond = max(0, len(live) - too_many - target(job) - standby.size(job))
    return [*training[:too_many], *others[:beyond]]


def _give_back(job: Job, victims: list[WorkerPod], live: int, ledger: Ledger) -> list[Action]:
    """Give back pods. The ledger says so before they are deleted: a pod that goes at once leaves nobody to
    ask why.
    """
    text = f"{target(job)} of {live} workers are wanted"
    if job.spec.workers.standby:
        text += f", and {standby.size(job)} standbys"
    if said := elasticity.why(job):
        text += f": {said}"
    because = reasons.DELETE_SCALE_DOWN
    if job.halted:
        text, because = job.halted, reasons.DELETE_SUSPENDED
    for pod in victims:
        ledger.end(pod.slot, reasons.END_SCALED_DOWN)
    return [DeletePod(pod.name, pod.uid, because, text) for pod in victims]


def _duplicates(observation: Observation, ledger: Ledger) -> list[Action]:
    """A slot has one live pod, that of the highest attempt; and one that it takes over from, for a while."""
    newest = observation.newest_pods
    return [
        DeletePod(pod.name, pod.uid, reasons.DELETE_SUPERSEDED, f"{newest[pod.slot].name} took its slot")
        for pod in observation.workers
        if pod.live and pod.attempt < newest[pod.slot].attempt and ledger.slots[pod.slot].moves != pod.uid
    ]
