"""Views of pod objects, with the fields that the demo needs. PURE."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from springtide_demo.survivors import WorkerProcess

Object = dict[str, Any]

_PROCESS = "process://"


@dataclass(frozen=True)
class PodView:
    """A pod as the demo sees it. `pid` is the process that runs now; None when none does."""

    name: str
    uid: str
    node: str
    phase: str
    pid: int | None
    ready: bool
    leaving: bool
    deleted_because: str
    message: str
    exit_code: int | None
    past_pids: tuple[int, ...]

    @property
    def outcome(self) -> Object:
        """The worker's outcome from its termination message; empty when it left none."""
        try:
            parsed = json.loads(self.message)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


def pod_view(pod: Mapping[str, Any]) -> PodView:
    """Read a pod of one container (of several, the first)."""
    meta, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or [{}]
    state = containers[0].get("state") or {}
    terminated = state.get("terminated") or {}
    last = (containers[0].get("lastState") or {}).get("terminated") or {}
    conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
    ended = [pid for one in (last, terminated) if (pid := process_id(one.get("containerID"))) is not None]
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        node=(pod.get("spec") or {}).get("nodeName") or "",
        phase=status.get("phase") or "Pending",
        pid=process_id(containers[0].get("containerID")) if "running" in state else None,
        ready=conditions.get("Ready") == "True",
        leaving="deletionTimestamp" in meta,
        deleted_because=(meta.get("annotations") or {}).get("springtide.dev/deleted-because", ""),
        message=terminated.get("message") or "",
        exit_code=terminated.get("exitCode"),
        past_pids=tuple(ended),
    )


def process_id(container_id: str | None) -> int | None:
    """Return the process of a container of the embedded cluster (`process://PID`)."""
    if not container_id or not container_id.startswith(_PROCESS):
        return None
    return int(container_id.removeprefix(_PROCESS))


class WorkerWatch:
    """Remembers every worker process that was ever seen, and when it was seen to have ended."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, int], WorkerProcess] = {}
        self.outcome: Object = {}

    def update(self, pods: Iterable[PodView], now: float) -> None:
        """Take a whole listing of the job's worker pods.

        Args:
            pods: all worker pods of the job; a process that is not among them has ended.
            now: in unix seconds.
        """
        running: set[tuple[str, int]] = set()
        for pod in pods:
            for pid in (*pod.past_pids, *((pod.pid,) if pod.pid is not None else ())):
                key = (pod.uid, pid)
                self._processes.setdefault(key, WorkerProcess(pod.name, pod.uid, pid, pod.node))
                if pid == pod.pid:
                    running.add(key)
            outcome = pod.outcome
            if outcome.get("outcome") == "Finished":
                self.outcome = self.outcome or outcome
                for key, process in self._processes.items():
                    if key[0] == pod.uid:
                        self._processes[key] = replace(process, outcome="Finished")
        for key, process in self._processes.items():
            if key not in running and process.ended_at is None:
                self._processes[key] = replace(process, ended_at=now)

    def processes(self) -> list[WorkerProcess]:
        """Return all processes in order of their pods' names."""
        return sorted(self._processes.values(), key=lambda process: (process.pod, process.pid))


def node_to_drain(workers: Iterable[PodView], others: Iterable[PodView]) -> str:
    """Return the node to drain: with workers, best without coordinator and operator, then with the fewest.

    Raises ValueError when no worker runs anywhere.

    Args:
        workers: the job's worker pods.
        others: pods of coordinator and operator.

    Raises:
        ValueError: no worker runs anywhere.
    """
    counts: dict[str, int] = {}
    for pod in workers:
        if pod.pid is not None and pod.node:
            counts[pod.node] = counts.get(pod.node, 0) + 1
    if not counts:
        raise ValueError("no node runs a worker")
    controllers = {pod.node for pod in others}
    return min(counts, key=lambda node: (node in controllers, counts[node], node))
