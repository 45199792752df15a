"""The disturbances themselves. Each returns when it was done, to whom, and the process that it killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from springtide_demo import scenario
from springtide_demo.kube import Kube
from springtide_demo.observe import PodView, node_to_drain
from springtide_kube.errors import ApiRefusal
from springtide_local.strays import program_of


@dataclass(frozen=True)
class Seen:
    """The pods at the moment of an event. `active` names the workers that commit."""

    workers: Sequence[PodView]
    coordinator: PodView | None
    operator: PodView | None
    active: frozenset[str]


@dataclass(frozen=True)
class Act:
    """An action of the demo: its moment (unix s), the pods it aimed at, the killed process, a line for
    people.
    """

    at: float
    line: str
    uids: frozenset[str] = field(default_factory=frozenset)
    pid: int | None = None


class NotPossibleError(Exception):
    """The event's target is not there (yet): its message says which. Worth another try."""


def carry_out(kind: str, kube: Kube, namespace: str, job: str, seen: Seen) -> Act:
    """Carry out one event of the story.

    Args:
        kind: of the event, one of `scenario.ORDER`.
        kube: the cluster.
        namespace: of the job.
        job: its name.
        seen: the processes that were seen last, from which the target is chosen.

    Returns:
        The time, the target and the process that was killed.

    Raises:
        NotPossibleError: there is no process that the event could hit.
        ApiRefusal: the API server refuses.
        ValueError: the story has no such event.
    """
    if kind == scenario.KILL_WORKER:
        # The first one: it leads the ring and reports for all, so its loss costs the most.
        targets = sorted((p for p in seen.workers if p.name in seen.active and p.pid), key=lambda p: p.name)
        return _kill(targets[0] if targets else None, "worker")
    if kind == scenario.KILL_COORDINATOR:
        return _kill(seen.coordinator, "coordinator")
    if kind == scenario.KILL_OPERATOR:
        return _kill(seen.operator, "operator")
    if kind in (scenario.SCALE_UP, scenario.SCALE_DOWN):
        size = scenario.WORKERS_SCALED_UP if kind == scenario.SCALE_UP else scenario.WORKERS_AT_LAST
        at = time.time()
        kube.scale(namespace, job, size)
        return Act(at, f"scale trainingjobs/{job} --replicas={size}")
    if kind == scenario.DRAIN_NODE:
        return _drain(kube, seen)
    raise ValueError(f"no such event: {kind}")


def _kill(pod: PodView | None, what: str) -> Act:
    if pod is None or pod.pid is None:
        raise NotPossibleError(f"no {what} process runs at the moment")
    at = time.time()
    try:
        os.kill(program_of(pod.pid), signal.SIGKILL)
    except ProcessLookupError as error:
        raise NotPossibleError(f"the {what} process {pod.pid} of {pod.name} has just ended") from error
    return Act(at, f"kill -9 {pod.pid}  ({pod.name} on {pod.node})", frozenset({pod.uid}), pod.pid)


def _drain(kube: Kube, seen: Seen) -> Act:
    others = [pod for pod in (seen.coordinator, seen.operator) if pod is not None]
    try:
        node = node_to_drain(seen.workers, others)
    except ValueError as error:
        raise NotPossibleError(str(error)) from error
    at = time.time()
    kube.cordon(node)
    here = kube.pods_on(node)
    for pod in here:
        try:
            kube.evict(pod["metadata"]["namespace"], pod["metadata"]["name"])
        except ApiRefusal as error:
            if error.code != 404:  # it has gone meanwhile
                raise
    names = ", ".join(pod["metadata"]["name"] for pod in here)
    return Act(at, f"drain {node}  ({names})", frozenset(pod["metadata"]["uid"] for pod in here))
