"""The kubelet's memory of one container. Times are seconds since 1970."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from springtide_local.kubelet.restarts import Backoff


@dataclass(frozen=True)
class Waiting:
    reason: str
    message: str = ""


@dataclass(frozen=True)
class Running:
    container_id: str
    started_at: float


@dataclass(frozen=True)
class Terminated:
    exit_code: int
    reason: str
    started_at: float
    finished_at: float
    signal: int = 0
    message: str = ""
    container_id: str = ""


State = Waiting | Running | Terminated


@dataclass
class ContainerRecord:
    """`passed_startup` and `ready` are what the probes say of the running container (true where there is no
    such probe).

    `retry_at`: not before this moment is a container made that could not be made (image, configuration).
    """

    name: str
    kind: Literal["init", "sidecar", "main"]
    image: str = ""
    image_id: str = ""
    state: State = field(default_factory=lambda: Waiting("ContainerCreating"))
    last: Terminated | None = None
    restarts: int = 0
    starts: int = 0
    passed_startup: bool = False
    ready: bool = False
    backoff: Backoff = field(default_factory=Backoff)
    pull_backoff: Backoff = field(default_factory=Backoff)
    retry_at: float = 0.0

    @property
    def ended(self) -> Terminated | None:
        """How it ended last, unless it runs again."""
        if isinstance(self.state, Terminated):
            return self.state
        return self.last if isinstance(self.state, Waiting) else None


def new_records(pod_spec: dict[str, object]) -> dict[str, ContainerRecord]:
    """A record for each container of the pod, init containers first and in order."""
    records: dict[str, ContainerRecord] = {}
    inits = pod_spec.get("initContainers") or []
    mains = pod_spec["containers"]
    assert isinstance(inits, list)
    assert isinstance(mains, list)
    for container in inits:
        kind: Literal["init", "sidecar"] = "sidecar" if container.get("restartPolicy") == "Always" else "init"
        records[container["name"]] = ContainerRecord(
            container["name"], kind, container["image"], state=Waiting("PodInitializing")
        )
    for container in mains:
        state = Waiting("PodInitializing" if inits else "ContainerCreating")
        records[container["name"]] = ContainerRecord(
            container["name"], "main", container["image"], state=state
        )
    return records
