"""Trace how pods of one job are replaced, its coordinator too, and the job as a whole.

A pod's replacement is a part of the coordinator's trace of its loss, whose name comes with the answer to
Sync, mostly before the new pod runs. Spans wait for it for a while, and are then parts of the job's own
trace. Nothing is written down: an operator that takes over describes the pods that are lost from then on.

Used by the task that plans the job's rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.plan.observation import CoordinatorPod, Observation, ServerPod, WorkerPod
from springtide_protocol.tracing import (
    Attributes,
    AttributeValue,
    Span,
    SpanEvent,
    TraceContext,
    Tracer,
    of_coordinator,
    of_job,
    parse,
)

PATIENCE_SECONDS = 10.0
"""Limit of the wait for the coordinator's word on which change a pod was lost in."""
FORGET_SECONDS = 3600.0
"""A place that was empty for longer is another matter: the job was made smaller, or there is no room."""

# Nobody takes the place of a pod that was deleted for one of these.
_WANTED = {
    reasons.DELETE_SCALE_DOWN,
    reasons.DELETE_SUSPENDED,
    reasons.DELETE_JOB_OVER,
    reasons.DELETE_GIVEN_UP,
}
Place = tuple[str, int]
"""Role and slot."""
Pod = WorkerPod | ServerPod | CoordinatorPod


@dataclass(slots=True)
class _Gap:
    """Hold a place whose pod was lost; times are unix seconds.

    Attributes:
        pod: the lost one.
        reason: it is, as far as its status says.
        successor: the pod that takes its place.
    """

    pod: Pod
    reason: str
    noticed_at: float
    successor: Pod | None = None
    events: list[SpanEvent] = field(default_factory=list)
    placed: bool = False


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Hold a place that is taken, until it is known in which change it was lost."""

    gap: _Gap
    place: Place
    ended: float


class JobSpans:
    """Follow the pods of one job."""

    def __init__(self, tracer: Tracer, namespace: str, name: str, uid: str) -> None:
        """Begin without having seen any pod.

        Args:
            tracer: takes the spans.
            namespace: of the job.
            name: of the job.
            uid: of the job.
        """
        self._tracer, self._uid = tracer, uid
        self._named: dict[str, AttributeValue] = {
            "springtide.job": name,
            "springtide.job.uid": uid,
            "k8s.namespace.name": namespace,
        }
        self._present: dict[Place, Pod] = {}
        self._gaps: dict[Place, _Gap] = {}
        self._waiting: list[_Waiting] = []

    def look(self, job: Job, observation: Observation, now: float) -> None:
        """Compare the pods with those of the last look.

        Args:
            job: the TrainingJob.
            observation: of its pods, and the coordinator's last answer.
            now: in unix seconds.
        """
        if not self._tracer.enabled:
            return
        if job.halted:
            self._present, self._gaps = {}, {}
        else:
            self._compare(observation, now)
        self._describe(observation, now)

    def ended(self, before: Mapping[str, Any], after: Mapping[str, Any], created: str) -> None:
        """Record the job itself, once its end has been written.

        Args:
            before: the status that there was.
            after: the status that was written.
            created: the job's creationTimestamp.
        """
        over = after.get("completionTime")
        if not self._tracer.enabled or not over or before.get("completionTime"):
            return
        state = str(after.get("state") or "")
        failed = state == reasons.STATE_FAILED
        attributes: dict[str, AttributeValue] = {**self._named, "springtide.state": state}
        for key in ("step", "generation", "recoveries"):
            if isinstance(after.get(key), int):
                attributes[f"springtide.{key}"] = after[key]
        whole, ended = self._tracer.begin(of_job(self._uid)), _unix(str(over))
        began = min(_unix(created), ended)
        error = _message(after) if failed else ""
        self._tracer.record(Span("job", whole, began, ended, None, attributes, error=error))

    # ---- inside

    def _compare(self, observation: Observation, now: float) -> None:
        present = _present(observation)
        all_pods = {pod.uid: pod for pod in _pods(observation)}
        for place, known in self._present.items():
            here = present.get(place)
            if (here is None or here.uid != known.uid) and place not in self._gaps:
                lost = all_pods.get(known.uid, known)
                if getattr(lost, "deleted_because", None) not in _WANTED:
                    self._gaps[place] = _Gap(lost, _reason(lost), now)
        self._present = present
        for place, gap in list(self._gaps.items()):
            here = present.get(place)
            if here is not None and here.uid != gap.pod.uid:
                self._follow(gap, here, now)
                if _runs(here, observation):
                    self._waiting.append(_Waiting(gap, place, now))
                    del self._gaps[place]
            elif now - gap.noticed_at > FORGET_SECONDS:
                del self._gaps[place]

    def _follow(self, gap: _Gap, pod: Pod, now: float) -> None:
        if gap.successor is None or gap.successor.uid != pod.uid:
            gap.events.append(SpanEvent("pod created", now, {"k8s.pod.name": pod.name}))
            gap.placed = False
        gap.successor = pod
        if pod.node is not None and not gap.placed:
            gap.placed = True
            gap.events.append(SpanEvent("pod scheduled", now, {"k8s.node.name": pod.node}))

    def _describe(self, observation: Observation, now: float) -> None:
        """Record the places that are taken, as soon as it is known what they belong to."""
        left = []
        for waiting in self._waiting:
            change = self._change(waiting, observation)
            told = change is not None or isinstance(waiting.gap.pod, CoordinatorPod)
            if not told and now - waiting.ended < PATIENCE_SECONDS:
                left.append(waiting)
            else:
                self._record(waiting, change)
        self._waiting = left

    def _change(self, waiting: _Waiting, observation: Observation) -> TraceContext | None:
        """Return the change in which a pod was lost; None where nobody has said so yet."""
        report, lost = observation.report, waiting.gap.pod
        told = () if report is None else report.traces
        return next((parse(trace.traceparent) for trace in told if lost.uid in trace.lost_pods), None)

    def _record(self, waiting: _Waiting, change: TraceContext | None) -> None:
        gap, successor = waiting.gap, waiting.gap.successor
        assert successor is not None
        role, slot = waiting.place
        tracer, job = self._tracer, self._tracer.begin(of_job(self._uid))
        attributes: Attributes = {
            **self._named,
            "springtide.role": role,
            "springtide.slot": slot,
            "springtide.lost_pod": gap.pod.name,
            "springtide.reason": gap.reason[:500],
            "k8s.pod.name": successor.name,
        }
        name = "replace pod"
        parent: TraceContext | None = change or job
        context = tracer.child_of(change or job)
        if isinstance(successor, CoordinatorPod):  # a trace of its own, whose name that one computes, too
            name, parent = "replace coordinator", None
            context = tracer.begin(of_coordinator(self._uid, successor.incarnation, 0))
        events = (*gap.events, SpanEvent("pod runs", waiting.ended))
        linked = () if parent is job else (job,)
        span = Span(name, context, gap.noticed_at, waiting.ended, parent, attributes, events, linked)
        tracer.record(span)


def _pods(observation: Observation) -> Iterable[Pod]:
    yield from observation.workers
    yield from observation.servers
    yield from observation.coordinators


def _present(observation: Observation) -> dict[Place, Pod]:
    """Return the pod of each place: of several that are to stay, the newest."""
    found: dict[Place, Pod] = {}
    for pod in sorted(filter(_live, _pods(observation)), key=_number):
        found[_place(pod)] = pod
    return found


def _live(pod: Pod) -> bool:
    return pod.live


def _number(pod: Pod) -> int:
    return pod.incarnation if isinstance(pod, CoordinatorPod) else pod.attempt


def _place(pod: Pod) -> Place:
    if isinstance(pod, CoordinatorPod):
        return names.ROLE_COORDINATOR, 0
    return (names.ROLE_WORKER if isinstance(pod, WorkerPod) else names.ROLE_PARAMETER_SERVER), pod.slot


def _runs(pod: Pod, observation: Observation) -> bool:
    """Return whether a pod does what it is for; a coordinator does when it has answered."""
    if not isinstance(pod, CoordinatorPod):
        return pod.running
    report = observation.report
    return pod.running_since is not None and report is not None and report.incarnation >= pod.incarnation


def _reason(pod: Pod) -> str:
    """Return why a pod is lost, as far as it says."""
    if isinstance(pod, WorkerPod) and pod.end is not None:
        return f"{pod.end.reason}: {pod.end.message}".strip(": ")
    if isinstance(pod, CoordinatorPod):
        return pod.why_lost
    return pod.disruption or pod.deleted_because or ""


def _unix(text: str) -> float:
    """Return the time that an RFC 3339 text names, in unix seconds; 0 for what is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _message(status: Mapping[str, Any]) -> str:
    """Return why a job has failed, as its condition says."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == reasons.FAILED and condition.get("status") == "True":
            return f"{condition.get('reason')}: {condition.get('message')}"[:500]
    return reasons.STATE_FAILED
