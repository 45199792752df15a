"""Standbys: pods beyond the workers wanted that wait, warmed up, to take a place in the group.

A standby's pod is like any worker's: the coordinator decides who of those that are ready takes part. So any
pod is a worker as long as workers are lacking, and no standby keeps one from starting. They are asked for as
extra workers are (`capacity`): once all workers train, as long as nodes take them and the API server does not
refuse them; they are given back first, as soon as a pod that is needed finds no node.

Which pods stand by is noted in the ledger, so that it is known of those that have ended, too: their ends
count in no budget, and only hold up the next standby.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import capacity, elasticity
from springtide_operator.plan.actions import Event
from springtide_operator.plan.capacity import Extras, Room
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation, Report, WorkerPod
from springtide_operator.plan.values import timestamp

STATUS = "standby"
ROLE = "standby"
"""Under which the backoff of standbys, and the API server's refusals of them, are filed."""
LACKS = "NotSupported"
_NAMES = {
    reasons.SIZE_TRYING: "Starting",
    reasons.SIZE_EXTRA: "FewerThanWanted",
    reasons.SIZE_NO_ROOM: reasons.SIZE_NO_ROOM,
    reasons.SIZE_YIELDED: reasons.SIZE_YIELDED,
    reasons.SIZE_WAITING: reasons.SIZE_WAITING,
    reasons.SIZE_MAXIMUM: "AllMade",
}
_REASONS = {name: reason for reason, name in _NAMES.items()}


def wanted(job: Job) -> int:
    """Return how many standbys the manifest wants, as far as the job's queue has admitted them; 0 for a job
    that is to have no pods.
    """
    if job.halted:
        return 0
    admitted = (job.status.get("queue") or {}).get("workers")
    left = max(0, int(admitted) - elasticity.size(job)) if admitted else job.spec.workers.standby
    return min(job.spec.workers.standby, left)


def size(job: Job) -> int:
    """Return how many are asked for now, by the decision in status."""
    return min(wanted(job), int(_entry(job).get("asked") or 0))


def is_ready(pod: WorkerPod, report: Report | None, per_pod: int) -> bool:
    """Return whether all processes of a pod wait, warmed up, outside of a group that trains.

    Args:
        pod: of a worker.
        report: of the coordinator; None: it has not answered.
        per_pod: processes in each pod.
    """
    if report is None or not pod.live:
        return False
    own = [member.waiting for member in report.members if member.pod_uid == pod.uid and member.connected]
    return all(own) and len(own) >= per_pod


def pods(live: Sequence[WorkerPod], ledger: Ledger) -> list[WorkerPod]:
    """Return those of the pods that stand by, or are made to.

    Args:
        live: one pod per slot.
        ledger: with who they are.
    """
    return [pod for pod in live if pod.slot in ledger.slots and ledger.slots[pod.slot].standby]


def decide(
    job: Job, live: Sequence[WorkerPod], observation: Observation, held_back: bool, now: float
) -> elasticity.Sized:
    """Decide anew how many standbys are asked for.

    Args:
        job: with its status, and the size of this round.
        live: one pod per slot.
        observation: of the job.
        held_back: standbys that ended wait to be made again.
        now: in unix seconds.
    """
    if not wanted(job):
        return elasticity.Sized(_with(job, None))
    report = observation.report_of((job.status.get("coordinator") or {}).get("incarnation", 0))
    before = _read(_entry(job))
    if report is not None and not report.seats:
        text = (
            "the coordinator is of a release that knows no standbys: they come with its successor, that is"
            " when the job is suspended and resumed"
        )
        return elasticity.Sized(_with(job, _written(Extras(message=text), LACKS)))
    room = _room(job, live, observation, report, held_back, now)
    after = capacity.step(before, room, now)
    if not after.extra and after.reason == reasons.SIZE_WAITING and not room.may_grow:
        after = replace(after, message="standbys are made when all workers wanted train")
    return elasticity.Sized(_with(job, _written(after)), (), tuple(after.wakes(room, now)))


def _room(
    job: Job,
    live: Sequence[WorkerPod],
    observation: Observation,
    report: Report | None,
    held_back: bool,
    now: float,
) -> Room:
    workers, beyond = elasticity.size(job), wanted(job)
    refusal = observation.refusals.get(ROLE)
    refused = refusal is not None and not refusal.transient and now < refusal.retry_at
    return Room(
        replicas=workers,
        maximum=workers + beyond,
        patience=float(job.spec.elasticity.patience_seconds),
        placed=sum(pod.placed for pod in live),
        stuck=any(elasticity.is_stuck(pod) for pod in live),
        leaving=sum(pod.deleting and pod.end is None for pod in observation.workers),
        crowd=elasticity.crowd(observation, now),
        refused=refusal.message if refusal is not None and refused else "",
        open_nodes=elasticity.open_nodes(observation),
        may_grow=_all_train(report, observation, workers),
        held_back=held_back,
        what="standbys",
        limit=f"workers.standby {beyond}",
    )


def _all_train(report: Report | None, observation: Observation, workers: int) -> bool:
    if report is None or report.phase != "RUNNING" or observation.unreachable_since is not None:
        return False
    return len({member.pod_uid for member in report.members if member.active}) >= workers


def status(
    job: Job, live: Sequence[WorkerPod], observation: Observation, ledger: Ledger, now: float
) -> dict[str, Any]:
    """Return what is written of standbys: {} where none are wanted.

    Args:
        job: with the decision of this round.
        live: one pod per slot.
        observation: of the job.
        ledger: of this round.
        now: in unix seconds.
    """
    entry = _entry(job)
    if not entry:
        return {}
    report = observation.report_of(ledger.incarnation)
    known = report is not None and observation.unreachable_since is None
    standing = pods(live, ledger)
    ready = sum(is_ready(pod, report, job.spec.workers.processes_per_pod) for pod in standing)
    if not known:
        ready = min(int(entry.get("ready") or 0), len(standing))
    shown: dict[str, Any] = {
        "trouble": _trouble(standing, job, observation, ledger, now)[:1024],
        "lastEnd": ledger.standby_end[:1024],
    }
    if report is not None and report.steps_in:
        shown |= {"steppedIn": report.steps_in[:1024], "steppedInGeneration": report.generation}
    return {
        **entry,
        "wanted": wanted(job),
        "replicas": len(standing),
        "ready": ready,
        "summary": f"{ready}/{wanted(job)}",
        **{key: value for key, value in shown.items() if value},
    }


def events(old: dict[str, Any], new: dict[str, Any]) -> list[Event]:
    """Return the event of standbys that have taken places of others, once for each generation.

    Args:
        old: status before the plan.
        new: status after it.
    """
    before, now = old.get(STATUS) or {}, new.get(STATUS) or {}
    generation = now.get("steppedInGeneration")
    if generation is None or generation == before.get("steppedInGeneration"):
        return []
    return [Event(reasons.EVENT_STANDBY_STEPPED_IN, str(now.get("steppedIn", "")))]


def _trouble(
    standing: Sequence[WorkerPod], job: Job, observation: Observation, ledger: Ledger, now: float
) -> str:
    """Return why standbys that are asked for are not ready, where that is more than a matter of time."""
    refusal = observation.refusals.get(ROLE)
    if refusal is not None and not refusal.hidden(now) and len(standing) < size(job):
        return f"the API server refuses their pods: {refusal.message}"
    for pod in standing:
        if pod.problem is not None and not elasticity.is_stuck(pod):
            return pod.problem.message
    backoff = ledger.backoff(ROLE)
    if len(standing) < size(job) and now < backoff.until:
        return (
            f"standbys end soon after they begin ({backoff.count} times of late); the next one is made after"
            f" {timestamp(backoff.until)}"
        )
    return ""


def _read(entry: dict[str, Any]) -> Extras:
    reason = _REASONS.get(str(entry.get("reason", "")), "")
    asked, settled = int(entry.get("asked") or 0), int(entry.get("settled") or 0)
    return Extras.from_status({**entry, "extra": asked, "workers": settled, "reason": reason})


def _written(extras: Extras, reason: str = "") -> dict[str, Any]:
    entry = extras.to_status()
    entry["asked"], entry["settled"] = entry.pop("extra"), entry.pop("workers")
    return entry | {"reason": reason or _NAMES.get(extras.reason, extras.reason)}


def _entry(job: Job) -> dict[str, Any]:
    return job.status.get(STATUS) or {}


_SHOWN = ("ready", "steppedIn", "steppedInGeneration")


def _with(job: Job, entry: dict[str, Any] | None) -> Job:
    """Return the job with a decision in its status, and with what was shown last."""
    status = {key: value for key, value in job.status.items() if key != STATUS}
    if entry is None:
        return replace(job, status=status)
    shown = {key: value for key, value in _entry(job).items() if key in _SHOWN}
    return replace(job, status={**status, STATUS: {**shown, **entry}})
