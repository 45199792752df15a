"""A make-believe cluster for the demo's story: pods are idle processes, commits come with time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]
STEP_SECONDS = 0.004


@dataclass
class FakePod:
    name: str
    node: str
    process: subprocess.Popen[bytes]
    deleted_because: str = ""
    message: str = ""

    def to_object(self) -> Object:
        code = self.process.poll()
        identity = f"process://{self.process.pid}"
        if code is None:
            state: Object = {"running": {}}
        else:
            state = {"terminated": {"exitCode": code, "message": self.message, "containerID": identity}}
        annotations = {"springtide.dev/deleted-because": self.deleted_because} if self.deleted_because else {}
        return {
            "metadata": {
                "name": self.name,
                "uid": f"uid-{self.name}",
                "namespace": "default",
                "annotations": annotations,
            },
            "spec": {"nodeName": self.node},
            "status": {
                "phase": "Running" if code is None else "Failed" if code else "Succeeded",
                "conditions": [{"type": "Ready", "status": "True" if code is None else "False"}],
                "containerStatuses": [{"containerID": identity, "state": state}],
            },
        }


@dataclass
class FakeCluster:
    """Answers as `Kube` does, and reacts as the operator and the coordinator would, at once.

    `total_steps` steps end the job. `fails`: the job fails at its first commit with this message.
    """

    steps: Path
    total_steps: int
    fails: str = ""
    pods_: dict[str, FakePod] = field(default_factory=dict)
    wanted: int = 3
    generation: int = 1
    step: int = 0
    _last: float = 0.0
    _members: list[str] = field(default_factory=list)
    _attempt: int = 0
    cordoned: str = ""

    def start(self) -> None:
        for name, node in (("operator", "node-0"), ("digits-coordinator-1", "node-1")):
            self.pods_[name] = FakePod(name, node, idle())
        self._last = time.time()

    def stop(self) -> None:
        for pod in self.pods_.values():
            end(pod.process)

    # ---- as Kube

    def pods(self, namespace: str, selector: str) -> list[Object]:
        self._go_on()
        ours = namespace != "default"
        return [pod.to_object() for pod in self.pods_.values() if (pod.name == "operator") == ours]

    def job(self, namespace: str, name: str) -> Object:
        conditions = []
        if self.fails and self.step:
            conditions.append({"type": "Failed", "status": "True", "reason": "Broken", "message": self.fails})
        if self.step >= self.total_steps:
            conditions.append(
                {"type": "Succeeded", "status": "True", "reason": "WorkerFinished", "message": ""}
            )
        return {"status": {"state": "Running", "conditions": conditions}}

    def scale(self, namespace: str, name: str, replicas: int) -> None:
        self.wanted = replicas

    def cordon(self, node: str) -> None:
        self.cordoned = node

    def pods_on(self, node: str) -> list[Object]:
        return [
            pod.to_object() for pod in self.pods_.values() if pod.node == node and pod.process.poll() is None
        ]

    def evict(self, namespace: str, name: str) -> None:
        if name not in self.pods_:
            raise ApiRefusal(404, "NotFound", "not found")
        end(self.pods_[name].process)

    # ---- what happens

    def _go_on(self) -> None:
        """Bring the workers to their number, then write the steps since the last call."""
        for name in ("operator", "digits-coordinator-1"):
            if self.pods_[name].process.poll() is not None:
                end(self.pods_[name].process)
                self.pods_[name].process = idle()
        alive = sorted(
            name for name, pod in self.pods_.items() if "-worker-" in name and pod.process.poll() is None
        )
        for name in alive[self.wanted :]:
            self.pods_[name].deleted_because = "ScaledDown"
            end(self.pods_[name].process)
        for _ in range(self.wanted - len(alive)):
            self._attempt += 1
            name = f"digits-worker-{self._attempt}-0"
            self.pods_[name] = FakePod(name, f"node-{1 + self._attempt % 3}", idle())
            alive.append(name)
        members = alive[: self.wanted]
        if members != self._members:
            self.generation += bool(self._members)
            self._members = members
            self._last = time.time()
        self._write()

    def _write(self) -> None:
        now = time.time()
        # At its last size the job is over soon: the story needs no more of it.
        seconds = STEP_SECONDS if len(self._members) != 2 or self.wanted != 2 else STEP_SECONDS / 50
        while self._last + seconds <= now and self.step < self.total_steps:
            self._last += seconds
            self.step += 1
            record = {
                "step": self.step,
                "generation": self.generation,
                "incarnation": [1, 0],
                "time": self._last,
                "step_seconds": STEP_SECONDS,
                "samples": 8,
                "values": {"loss": 1.0 / self.step},
            }
            for name in self._members:
                with (self.steps / f"{name}.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
        if self.step >= self.total_steps:
            for name in self._members:
                data = {"totalSeen": 8 * self.total_steps, "repeated": 0, "lost": 0}
                message = {"outcome": "Finished", "data": data, "values": {"test_accuracy": 0.98}}
                self.pods_[name].message = json.dumps(message)
                end(self.pods_[name].process)


def idle() -> subprocess.Popen[bytes]:
    """A process that waits until it is told to end, or is killed."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()
