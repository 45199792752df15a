"""How long a pod that is being deleted is waited for: no longer than it has something to leave behind.

A pod's grace period (120 s for workers) is there to finish the step and hand the state over. A process that
has not begun, or has left, needs none of it, and nothing ends it before: its first process is process 1 of
its container, to which the kernel delivers only the signals that it catches, and a shell there passes none
on. So the operator deletes such a pod once more, with a shorter grace. It never deletes here what nobody else
has deleted, and never by force; the API server lets a later deletion shorten the grace and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.actions import ShortenGrace
from springtide_operator.plan.halt import halted
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import CoordinatorPod, Observation, Report, ServerPod, WorkerPod

AnyPod = WorkerPod | ServerPod | CoordinatorPod

NOTHING_SECONDS = 2  # for a process that holds nothing: what kubelets give at least
LEFT_SECONDS = 5  # for what still runs in a pod whose worker has left, and for pods of a job that is no more


def of_gone_job(pods: Iterable[AnyPod]) -> list[ShortenGrace]:
    """Return what shortens the end of a deleted job's pods: their work is nobody's any more.

    A worker that hears the signal ends in less: it drops its step when no coordinator comes back.
    """
    why = "its job was deleted"
    return [found for pod in pods if (found := _shortened(pod, LEFT_SECONDS, why)) is not None]


def of_deleted_job(observation: Observation) -> list[ShortenGrace]:
    """Return the same for a job that is still there, and waits for its pods or for somebody's finalizer."""
    pods: list[AnyPod] = [*observation.workers, *observation.servers, *observation.coordinators]
    return of_gone_job(pods)


def shorten(
    job: Job, observation: Observation, ledger: Ledger, now: float, failed: bool = False
) -> list[ShortenGrace]:
    """Return what shortens the end of those pods of a job that have nothing to leave behind.

    Args:
        job: it is there, and may be suspended or ended.
        observation: with the coordinator's word; one that learns its members has none.
        ledger: of the job's status.
        now: in unix seconds.
        failed: the job has ended without success: its workers hold nothing wanted, unless they can save it.
    """
    report = _word(job, observation, ledger, now)
    alone = bool(halted(job) or failed) and coordinator_policy.current(observation, ledger) is None
    result: list[ShortenGrace] = []
    for pod in observation.workers:
        if pod.gone_by is None or pod.terminal or pod.unreachable:
            continue
        if found := _worker(job, pod, report, alone, failed):
            action = _shortened(pod, *found)
            result += [action] if action is not None else []
    idle = bool(halted(job) or failed) and all(pod.end is not None for pod in observation.workers)
    for server in observation.servers:
        if server.gone_by is None or server.lost or server.unreachable:
            continue
        if idle or (report is not None and _server_holds_nothing(server, report)):
            why = "no worker is left to serve" if idle else "it has not come to serve"
            action = _shortened(server, LEFT_SECONDS, why)
            result += [action] if action is not None else []
    return result


def _worker(
    job: Job, pod: WorkerPod, report: Report | None, alone: bool, failed: bool
) -> tuple[int, str] | None:
    """(seconds, why) where the pod has nothing to leave; None where it may have."""
    if pod.end is not None:
        if pod.end.reason in (reasons.DELETE_NODE_LOST, reasons.HUNG):
            return None  # judged so by others: its process may run, and is none that a kubelet hears of
        return LEFT_SECONDS, "its worker has ended, and other containers run"
    if failed and job.spec.checkpoint is None:
        return LEFT_SECONDS, "the job has failed"
    if alone:
        return LEFT_SECONDS, "there is no coordinator to leave from, and none will come"
    if report is None or pod.uid not in report.told_leaving:
        return None
    members = [member for member in report.members if member.pod_uid == pod.uid]
    if not members and (pod.uid in report.silent or not pod.running):
        return NOTHING_SECONDS, "its script has not come to springtide.init()"
    if not members:
        return LEFT_SECONDS, "its worker has left"
    if all(member.starting for member in members):
        return NOTHING_SECONDS, "its script has not come to its training loop"
    return None


def _server_holds_nothing(pod: ServerPod, report: Report) -> bool:
    """Whether a coordinator that was told of its end neither hears nor needs it."""
    return pod.uid in report.told_leaving and all(server.pod_uid != pod.uid for server in report.servers)


def _word(job: Job, observation: Observation, ledger: Ledger, now: float) -> Report | None:
    """Return the coordinator's word on who is a member, where it is certain to know that.

    One that has not taken a job's running generation over yet has not heard of all who are in it. Nor, for
    a while after it did, of all who are not: a worker on its way out may still write a checkpoint.
    """
    report = observation.report_of(ledger.incarnation)
    if report is None or observation.unreachable_since is not None or report.reason == "Reconnecting":
        return None
    pod = coordinator_policy.current(observation, ledger)
    since = pod.running_since if pod is not None else None
    if (ledger.incarnation > 1 or report.restart) and (
        since is None or now - since < coordinator_policy.LEARNING_SECONDS
    ):
        return None
    taken_over = report.generation is not None or not (job.status.get("generation") or report.restart)
    return report if taken_over else None


def _shortened(pod: AnyPod, seconds: int, why: str) -> ShortenGrace | None:
    if pod.gone_by is None or pod.deletion_asked_at is None or pod.gone_by - pod.deletion_asked_at <= seconds:
        return None
    return ShortenGrace(pod.name, pod.uid, seconds, why)
