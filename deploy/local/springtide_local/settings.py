"""Settings of a cluster, and the folders of its files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from springtide_local.quantities import parse_quantity

MOST_NODES = 200
LEASES = "kube-node-lease"

# On a Node object: `killed`, `stopped` or `crashed` makes the node fail; without it the node works (see
# `kubelet.node`).
STATE_ANNOTATION = "springtide.dev/local-node"
KILLED = "killed"
STOPPED = "stopped"
CRASHED = "crashed"

# An environment variable that names a folder: a cluster that ends leaves its count of requests there.
AUDIT_VARIABLE = "SPRINGTIDE_LOCAL_AUDIT"


@dataclass(frozen=True)
class NodeTimes:
    """Seconds. `heartbeat`: between two renewals of a lease; `grace`: of silence until a node is NotReady
    (Kubernetes: 10 and 40-50);

    `toleration`: the longest that a pod stays on a NotReady node, which Kubernetes sets to 300 unless the
    pod says otherwise.
    """

    heartbeat: float = 1.0
    grace: float = 4.0
    toleration: float = 5.0


@dataclass(frozen=True)
class Settings:
    """Each node has `cpus`, `memory` (Kubernetes quantities), `gpus` and room for `pods`; all of it is only
    said, not enforced.

    `pretend`: an address; when given, pods are only said to run, and to have that address (for benchmarks).

    `pod_logs`: a folder where the logs of pods stay when these are gone (`kubelet.kept_logs`); otherwise they
    go with their pod.

    `dns`: without it no name resolves in any pod, as in a cluster whose DNS is down.

    `token_seconds`: no token of a service account lives longer (kube-apiserver's
    `--service-account-max-token-expiration`); 0: as long as is asked for.
    """

    nodes: int = 3
    cpus: str = "8"
    memory: str = "32Gi"
    gpus: int = 0
    pods: int = 110
    times: NodeTimes = field(default_factory=NodeTimes)
    kubeconfig: str = ""
    pretend: str = ""
    pod_logs: str = ""
    dns: bool = True
    token_seconds: float = 0.0

    def check(self) -> None:
        """Raise ValueError with what is wrong and what to give instead."""
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"--nodes {self.nodes} is out of range: give 1 to {MOST_NODES}")
        if self.gpus < 0:
            raise ValueError(f"--gpus {self.gpus} is out of range: give 0 or more")
        for option, value in (("--cpus", self.cpus), ("--memory", self.memory)):
            try:
                positive = parse_quantity(value) > 0
            except ValueError as error:
                raise ValueError(f"{option} {error}") from None
            if not positive:
                raise ValueError(f"{option} {value} must be more than 0")
        if self.times.heartbeat <= 0 or self.times.grace < 2 * self.times.heartbeat:
            raise ValueError(
                f"a node's grace ({self.times.grace:g} s) must be at least two heartbeats "
                f"({self.times.heartbeat:g} s each)"
            )

    def capacity(self) -> dict[str, str]:
        capacity = {
            "cpu": self.cpus,
            "memory": self.memory,
            "pods": str(self.pods),
            "ephemeral-storage": "100Gi",
        }
        if self.gpus:
            capacity["nvidia.com/gpu"] = str(self.gpus)
        return capacity

    def dump(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, text: str) -> Settings:
        content: dict[str, Any] = json.loads(text)
        return cls(**{**content, "times": NodeTimes(**content["times"])})


@dataclass(frozen=True)
class Files:
    """A cluster's data folder. `run` lives as long as one run of the cluster."""

    data: Path

    @property
    def settings(self) -> Path:
        return self.data / "settings.json"

    @property
    def state(self) -> Path:
        """Written when the cluster is ready: see `process.State`."""
        return self.data / "cluster.json"

    @property
    def identity(self) -> Path:
        """The id of the latest run, by which its processes are known."""
        return self.data / "cluster-id"

    @property
    def lock(self) -> Path:
        """Locked for as long as a cluster runs here or is being cleaned up."""
        return self.data / "lock"

    @property
    def log(self) -> Path:
        return self.data / "log"

    @property
    def images(self) -> Path:
        return self.data / "images.json"

    @property
    def kubeconfig(self) -> Path:
        return self.data / "kubeconfig"

    @property
    def pki(self) -> Path:
        return self.data / "pki"

    @property
    def run(self) -> Path:
        return self.data / "run"


def node_names(count: int) -> list[str]:
    return [f"springtide-{index}" for index in range(count)]


def default_data() -> Path:
    """`$XDG_STATE_HOME/springtide/local`, or the same below `~/.local/state`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "springtide" / "local"
