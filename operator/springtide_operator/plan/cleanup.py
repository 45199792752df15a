"""Clean-up: ended pods of a running job, and all that a job leaves behind when it ends."""

from __future__ import annotations

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.api.model import PodCleanup
from springtide_operator.plan import hangs, servers
from springtide_operator.plan.actions import Action, DeleteJob, DeletePod, DeleteService
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, WorkerPod
from springtide_operator.plan.retry import held_back
from springtide_operator.plan.values import timestamp

KEEP_FAILED = 5  # newest failed pods kept for their logs
PATIENCE_SECONDS = 60.0  # for workers that still run when another finished (they may be saving)
LEFT_SECONDS = 5  # of grace for what runs on in a pod whose worker has ended: it has nothing to leave behind


def ended_pods(observation: Observation, ledger: Ledger) -> list[Action]:
    """Delete counted, ended pods of a running job, except the newest failed ones.

    Args:
        observation: of the job.
        ledger: says which ends are counted.

    Returns:
        One deletion for each.
    """

    def is_counted(pod: WorkerPod) -> bool:
        entry = ledger.slots.get(pod.slot)
        if entry is None or pod.end is None or pod.deleting or pod.finished:
            return False
        return pod.attempt < entry.attempt or (pod.attempt == entry.attempt and entry.ended is not None)

    ended = [pod for pod in observation.workers if is_counted(pod)]
    failed = [
        pod for pod in ended if pod.terminal and pod.end is not None and pod.end.kind == reasons.END_FAILED
    ]
    failed.sort(key=lambda pod: (pod.created_at, pod.slot, pod.attempt), reverse=True)
    keep = {pod.uid for pod in failed[:KEEP_FAILED]}
    return [_replaced(pod) for pod in ended if pod.uid not in keep]


def _replaced(pod: WorkerPod) -> DeletePod:
    if pod.end is not None and pod.end.reason == reasons.HUNG and not pod.terminal:
        why = "it hangs, and its end is counted"
        return DeletePod(pod.name, pod.uid, reasons.DELETE_HUNG, why, grace_seconds=hangs.GRACE_SECONDS)
    return DeletePod(
        pod.name, pod.uid, _because(pod), "it ended, and its end is counted", grace_seconds=_grace(pod)
    )


def _because(pod: WorkerPod) -> str:
    lost = not pod.terminal and pod.end is not None and pod.end.reason == reasons.DELETE_NODE_LOST
    return reasons.DELETE_NODE_LOST if lost else reasons.DELETE_REPLACED


def after_the_end(
    job: Job, observation: Observation, succeeded: bool, ended_at: float, now: float
) -> tuple[list[Action], float | None]:
    """Delete what an ended job needs no more.

    The coordinator goes after the workers, since leaving ones still talk to it; then its Service, whose
    address is scarce. Secret and NetworkPolicy stay with the job.

    Args:
        job: with its status.
        observation: of the job.
        succeeded: how the job ended.
        ended_at: when the job ended, in unix seconds.
        now: in unix seconds.

    Returns:
        Actions, and the unix time by which to look again; None: at any time.
    """
    actions: list[Action] = []
    wake_at: float | None = None
    policy = job.spec.pod_cleanup
    ended = ended_at if observation.steady is None else observation.ended_since
    # Counted by the steady clock, and from the round on that ends the job.
    patient_for = PATIENCE_SECONDS - (0.0 if ended is None else observation.seen_for(ended, now))
    for pod in observation.workers:
        if pod.deleting or policy is PodCleanup.NONE:
            continue
        if pod.end is not None and pod.terminal:
            if policy is PodCleanup.ALL:
                actions.append(_over(pod, "podCleanup is All"))
        elif succeeded and pod.running and pod.end is None and patient_for > 0:
            wake_at = now + patient_for
        else:
            actions.append(_over(pod, "the job has ended"))
    if all(pod.end is not None for pod in observation.workers):
        why = "no worker is left to serve"
        actions += servers.put_away(observation, reasons.DELETE_JOB_OVER, why)
        for coordinator in observation.coordinators:
            if not coordinator.deleting:
                actions.append(
                    DeletePod(
                        coordinator.name,
                        coordinator.uid,
                        reasons.DELETE_JOB_OVER,
                        why,
                    )
                )
        held = held_back(observation, "service", now)
        if not observation.coordinators and service_left(job, observation) and not held:
            actions.append(DeleteService("the job has ended, and nobody serves behind it"))
    return actions, wake_at


def service_left(job: Job, observation: Observation) -> bool:
    """Return whether an ended job may still have its Service.

    Services are not watched: status says that it had one, the shell's memory that it is gone.

    Args:
        job: with its status.
        observation: of the job.
    """
    return bool((job.status.get("coordinator") or {}).get("address")) and not observation.service_gone


def expire(job: Job, ended_at: float, now: float) -> tuple[list[Action], float | None]:
    """Delete the job itself, ttlSecondsAfterFinished after its end.

    Args:
        job: with its status.
        ended_at: when the job ended, in unix seconds.
        now: in unix seconds.

    Returns:
        Actions, and before that the unix time at which they are due.
    """
    ttl = job.spec.ttl_seconds_after_finished
    if ttl is None:
        return [], None
    if now < ended_at + ttl:
        return [], ended_at + ttl
    return [DeleteJob(f"it ended at {timestamp(ended_at)}, and ttlSecondsAfterFinished is {ttl}")], None


def _over(pod: WorkerPod, why: str) -> DeletePod:
    return DeletePod(pod.name, pod.uid, reasons.DELETE_JOB_OVER, why, grace_seconds=_grace(pod))


def _grace(pod: WorkerPod) -> int | None:
    """Return the grace period in seconds of a pod whose worker has ended while other containers run on; None,
    which is the template's, for all others. A kubelet takes that of the first deletion, whatever comes after.
    """
    if pod.end is None or pod.terminal or pod.end.reason in (reasons.DELETE_NODE_LOST, reasons.HUNG):
        return None  # judged so by others: its process may run
    return LEFT_SECONDS
