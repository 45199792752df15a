"""Jobs whose workers only pretend: they speak the termination message and train nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from e2e_cluster import E2ECluster

Object = dict[str, Any]

# FAKE: run (until SIGTERM), finish, exit0, raise.
CODE = """
import json, os, signal, sys
def say(**outcome):
    with open(os.environ["SPRINGTIDE_TERMINATION_LOG"], "w") as file:
        json.dump(outcome, file)
def leave(*_):
    say(outcome="Left", reason="SIGTERM")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
mode = os.environ["FAKE"]
if mode == "finish":
    print("done", flush=True)
    say(outcome="Finished", incarnation=[1, 0], generation=1, step=12, values={"accuracy": 0.9},
        data={"epoch": 2, "seen": 0, "repeated": 0, "lost": 0, "skipped": 0, "totalSeen": 64})
elif mode == "raise":
    def load():
        raise FileNotFoundError("no data in /nowhere")
    load()
elif mode == "run":
    print("runs", flush=True)
    while True:
        signal.pause()
"""


def fake_job(name: str, image: str, mode: str = "run", replicas: int = 1, **spec: Any) -> Object:
    """A TrainingJob of pretended workers. `pod` and `container` add to its template, `labels` and
    `annotations` are the job's;
    other keywords are fields of the spec.
    """
    container = {
        "name": "worker",
        "image": image,
        "command": ["python", "-c", CODE],
        "env": [{"name": "FAKE", "value": mode}],
    }
    pod: Object = {"terminationGracePeriodSeconds": 5, "containers": [container]}
    pod |= spec.pop("pod", {})
    container |= spec.pop("container", {})
    workers = {
        "replicas": replicas,
        "minReplicas": 1,
        "maxReplicas": 6,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": name,
            "labels": spec.pop("labels", {}),
            "annotations": spec.pop("annotations", {}),
        },
        "spec": {"workers": workers, **spec},
    }


def read(cluster: E2ECluster, *arguments: str) -> Object:
    """An object, or a list of them, as `kubectl get` gives it."""
    answer: Object = json.loads(cluster.kubectl("get", *arguments, "-o", "json"))
    return answer


@dataclass(frozen=True)
class FakeJob:
    """A job in a namespace, with questions and accidents."""

    cluster: E2ECluster
    namespace: str
    name: str

    def start(self, mode: str = "run", replicas: int = 1, **spec: Any) -> FakeJob:
        self.cluster.apply(
            fake_job(self.name, self.cluster.image, mode, replicas, **spec), namespace=self.namespace
        )
        return self

    def patch_of(self, **spec: Any) -> tuple[str, ...]:
        """kubectl's arguments for a change of the spec."""
        return (
            "patch",
            f"stj/{self.name}",
            "-n",
            self.namespace,
            "--type=merge",
            "-p",
            json.dumps({"spec": spec}),
        )

    def read(self) -> Object:
        return read(self.cluster, "trainingjobs.springtide.dev", self.name, "-n", self.namespace)

    def status(self) -> Object:
        status: Object = self.read().get("status") or {}
        return status

    def condition(self, kind: str) -> Object:
        found: list[Object] = self.status().get("conditions") or []
        return next((c for c in found if c["type"] == kind), {})

    def pods(self, role: str = "worker") -> dict[str, Object]:
        """Return the pods by name, also those that end or are being deleted."""
        labels = f"springtide.dev/job={self.name},springtide.dev/role={role}"
        items = read(self.cluster, "pods", "-n", self.namespace, "-l", labels)["items"]
        return {pod["metadata"]["name"]: pod for pod in items}

    def all_pods(self) -> list[Object]:
        return [*self.pods().values(), *self.pods("coordinator").values()]

    def running(self) -> dict[str, str]:
        """Names and uids of the worker pods that run and are to stay."""
        return {
            name: pod["metadata"]["uid"]
            for name, pod in self.pods().items()
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def until_running(self, *slots_and_attempts: str, seconds: float = 60) -> dict[str, str]:
        """Wait until exactly these workers run, "0-0", "1-2", ..., and the operator has written them down as
        running: it counts nothing for a pod that is gone before, and gives back first what does not run yet.
        """
        wanted = {f"{self.name}-worker-{place}" for place in slots_and_attempts}
        found: dict[str, str] = {}

        def there() -> bool:
            found.clear()
            found.update(self.running())
            return set(found) == wanted and self._written_down(set(found.values()))

        try:
            self.cluster.until(seconds, f"workers {sorted(wanted)} to run", there)
        except AssertionError as error:
            status = self.status()
            raise AssertionError(f"{error}; running: {sorted(found)}; status: {status}") from None
        return found

    def _written_down(self, uids: set[str]) -> bool:
        status = self.status()
        slots: dict[str, Object] = status.get("slots") or {}
        known = uids <= {entry.get("uid") for entry in slots.values() if "ended" not in entry}
        return known and (status.get("workers") or {}).get("ready") == len(uids)

    def until_events(self, *reasons: str, text: str = "") -> None:
        """Wait until the job's namespace has events of all these reasons, each with the text in a message.

        The operator tells of what it does after it has done it.
        """

        def told() -> bool:
            items = read(self.cluster, "events", "-n", self.namespace)["items"]
            return set(reasons) <= {event["reason"] for event in items if text in event["message"]}

        self.cluster.until(60, f"events {sorted(reasons)} {text}".rstrip(), told)

    def until_status(self, what: str, true: Callable[[Object], bool], seconds: float = 60) -> Object:
        """Wait until the status is so; return it."""
        last: list[Object] = [{}]

        def holds() -> bool:
            last[0] = self.status()
            return true(last[0])

        try:
            self.cluster.until(seconds, what, holds)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {last[0]}") from None
        return last[0]

    def until_condition(self, kind: str, reason: str = "", seconds: float = 60) -> Object:
        def true() -> Object | None:
            found = self.condition(kind)
            return found if found.get("status") == "True" and reason in ("", found["reason"]) else None

        try:
            return self.cluster.until(seconds, f"condition {kind} {reason}", true)
        except AssertionError as error:
            raise AssertionError(f"{error}; status: {self.status()}") from None


def kill(cluster: E2ECluster, pod: Object) -> None:
    """kill -9 of the pod's process where it is one of this machine; else the pod is deleted by force."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    container = statuses[0].get("containerID") or ""
    if container.startswith("process://"):
        os.kill(int(container.removeprefix("process://")), signal.SIGKILL)
        return
    meta = pod["metadata"]
    cluster.kubectl("delete", "pod", meta["name"], "-n", meta["namespace"], "--force", "--grace-period=0")
