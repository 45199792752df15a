"""Hangs: no step is committed for `failurePolicy.hangTimeoutSeconds`, and what `onHang` makes of it.

Only the coordinator's word on the generation that trains now counts, and only while the coordinator answers:
a job that starts, recovers, restores or is suspended does not hang. A worker that is replaced has failed: it
counts against backoffLimit, or as a rule for reason Hung says. Where nobody waits for the late ones, they
are all that holds the job's state, and none is replaced. The coordinator cuts a worker off only once its end
is counted and its pod is being deleted: until then the stall goes on, so that nobody forgets it.

Workers that stand still hold nobody up: the coordinator has cut them off, and hears nothing of them since.
Replace replaces them as well, once they have been away for a minute, unless more than a third of the job's
workers are: then the job or the network is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.api.model import OnHang
from springtide_operator.plan.observation import (
    End,
    LateReport,
    Observation,
    Problem,
    Report,
    StallReport,
    WorkerPod,
)
from springtide_operator.plan.values import timestamp

SHOWN = 3
GRACE_SECONDS = 1  # what hangs does not leave by itself, and its place is needed


def stall(job: Job, observation: Observation) -> StallReport | None:
    """Return the stall that is a hang; None while there is none, or while it is not certain.

    Args:
        job: with its status.
        observation: of the job.
    """
    report = _current_report(job, observation)
    if report is None or report.stall is None or report.phase not in ("RUNNING", "ENDING"):
        return None
    limit = job.spec.failure_policy.hang_timeout_seconds
    return report.stall if report.stall.seconds >= limit else None


def _current_report(job: Job, observation: Observation) -> Report | None:
    """Return the word of the job's coordinator, while it can be reached and the job is to train."""
    incarnation = (job.status.get("coordinator") or {}).get("incarnation", 0)
    known = not job.halted and observation.unreachable_since is None
    return observation.report_of(incarnation) if known else None


def with_hung_workers(job: Job, observation: Observation) -> Observation:
    """Return the observation with workers that are late or stand still counted as ended, if onHang says so.

    Args:
        job: with its policy.
        observation: with the coordinator's report.
    """
    observation = _with_vanished_workers(job, observation)
    found = stall(job, observation)
    if found is None or not _replaces(job, found):
        return observation
    late = {member.pod_uid: member for member in found.late}
    nodes = _nodes(observation)
    limit = job.spec.failure_policy.hang_timeout_seconds

    def judge(pod: WorkerPod) -> WorkerPod:
        if pod.uid not in late or pod.end is not None or pod.deleting:
            return pod
        text = f"hung: no step was committed for {limit} s, and others wait: {_one(late[pod.uid], nodes)}"
        return replace(pod, end=End(reasons.END_FAILED, reasons.HUNG, text))

    return replace(observation, workers=tuple(judge(pod) for pod in observation.workers))


def too_many_vanished(vanished: int, workers: int) -> bool:
    """Return whether so many stand still at once that none is replaced. One alone always may be.

    Args:
        vanished: workers that stand still.
        workers: pods of the job that live, those included.
    """
    return vanished > 1 and 3 * vanished > workers


def vanished_workers(job: Job, observation: Observation) -> list[WorkerPod]:
    """Return the pods that run, and whose processes were members and stand still; none while the coordinator
    that says so is not the job's, cannot be reached, or does not train.

    Args:
        job: with its status.
        observation: of the job.
    """
    report = _current_report(job, observation)
    if report is None or report.phase != "RUNNING":
        return []
    return [pod for pod in observation.workers if pod.live and pod.running and pod.uid in report.vanished]


def _with_vanished_workers(job: Job, observation: Observation) -> Observation:
    if job.spec.failure_policy.on_hang is not OnHang.REPLACE:
        return observation
    found = {pod.uid for pod in vanished_workers(job, observation)}
    if not found or too_many_vanished(len(found), sum(pod.live for pod in observation.workers)):
        return observation
    nodes = _nodes(observation)

    def judge(pod: WorkerPod) -> WorkerPod:
        if pod.uid not in found:
            return pod
        place = f" on node {nodes[pod.uid]}" if pod.uid in nodes else ""
        text = f"hung: worker {pod.name}{place} stands still; nothing was heard of it for a minute"
        return replace(pod, end=End(reasons.END_FAILED, reasons.HUNG, text))

    return replace(observation, workers=tuple(judge(pod) for pod in observation.workers))


def goes(pod: WorkerPod) -> bool:
    """Whether the pod is being deleted since it hangs, and its process may still be there."""
    return pod.end is None and pod.deleting and pod.deleted_because == reasons.DELETE_HUNG


def problem(job: Job, observation: Observation) -> Problem | None:
    """Describe a hang that is not ended by replacing workers; None without one.

    Args:
        job: with its policy.
        observation: with the coordinator's report.
    """
    found = stall(job, observation)
    if found is None or _replaces(job, found):
        return None
    text = describe(job, found, observation)
    if job.spec.failure_policy.on_hang is OnHang.REPLACE:
        text += "; none is replaced, since " + (
            "nobody would hold the job's state" if found.late else "it cannot be told who is late"
        )
    return Problem(reasons.HUNG, text)


def fatal(job: Job, observation: Observation) -> Problem | None:
    """Return the problem with which a job fails that hangs; None where it does not, or shall not fail.

    Args:
        job: with its policy.
        observation: with the coordinator's report.
    """
    found = stall(job, observation)
    if found is None or job.spec.failure_policy.on_hang is not OnHang.FAIL_JOB:
        return None
    return Problem(reasons.HUNG, describe(job, found, observation))


def describe(job: Job, found: StallReport, observation: Observation) -> str:
    """Describe a hang, without numbers that change while it lasts.

    Args:
        job: with its status.
        found: the hang.
        observation: of the job.
    """
    limit = job.spec.failure_policy.hang_timeout_seconds
    what = f"step {found.step}" if found.step else "the end of the loop"
    text = f"no step was committed for more than {limit} s, since {timestamp(found.since)}: {what} waits for "
    if not found.late:
        return text + "all: each worker waits for the others' gradients (see the network between them)"
    nodes = _nodes(observation)
    text += "; ".join(_one(member, nodes) for member in found.late[:SHOWN])
    more = len(found.late) - SHOWN
    return text + (f"; and {more} more" if more > 0 else "")


def _one(member: LateReport, nodes: Mapping[str, str]) -> str:
    text = f"worker {member.pod}"
    if member.pod_uid in nodes:
        text += f" on node {nodes[member.pod_uid]}"
    if not member.doing:
        return text + ", of which nothing was heard in this step"
    text += f", {member.doing}"
    if member.since:
        text += f" since {timestamp(member.since)}"
    return text + (f" ({member.where})" if member.where else "")


def _replaces(job: Job, found: StallReport) -> bool:
    return job.spec.failure_policy.on_hang is OnHang.REPLACE and bool(found.late) and found.waiting > 0


def _nodes(observation: Observation) -> dict[str, str]:
    return {pod.uid: pod.node for pod in observation.workers if pod.node}
