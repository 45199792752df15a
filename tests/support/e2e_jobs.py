"""Small jobs for the end-to-end tests, and what is asked about them."""

from __future__ import annotations

import json
import re
import textwrap
import time
from dataclasses import dataclass
from typing import Any

from e2e_cluster import E2ECluster, RefusedError
from uncompiled import uncompiled

from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]

# Trains a line through points that lie on one; says a step every quarter of a second, so that its log shows
# that it goes on. A step takes as many seconds as the ConfigMap's `pace` says at the moment; without it 10 ms
# or, in a job that is to last, 100 ms: it trains while others, which use the same processors, are waited for.
TRAIN = uncompiled("""
import os, time
import torch
import springtide

springtide.init()
torch.manual_seed(0)
x = torch.linspace(-1, 1, 64).unsqueeze(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = springtide.distribute(model, optimizer)
epochs = int(os.environ["EPOCHS"])
usual = 0.1 if epochs >= 10_000 else 0.01


def pace():
    try:
        with open(os.environ["PACE_FILE"]) as file:
            return float(file.read())
    except (OSError, ValueError):
        return usual


for step, batch in enumerate(springtide.batches((x, 3 * x + 1), batch_size=16, epochs=epochs, seed=0)):
    with springtide.step():
        seconds = pace()
        time.sleep(seconds)
        loss = (model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        springtide.report(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if step % max(1, round(0.25 / max(seconds, 0.01))) == 0:
        print(f"step {step} of {springtide.world_size()} workers", flush=True)
springtide.report(slope=model.weight.item())
""")

NEVER_INIT = "import threading\nprint('reads a large file', flush=True)\nthreading.Event().wait()\n"


def script(name: str, code: str, pace: str = "") -> Object:
    """A ConfigMap that holds `train.py`, and how many seconds a step of TRAIN takes."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"train.py": textwrap.dedent(code)} | ({"pace": pace} if pace else {}),
    }


def job(name: str, image: str, workers: int = 1, epochs: int = 25, **spec: Any) -> Object:
    """A TrainingJob that runs `train.py` of the ConfigMap of its name; an epoch is four steps.

    Keywords: `command`, `environment` (more of the container), `minimum`, `maximum`, `standby`, `processes`
    (of each pod), `affinity`; all others are fields of the spec.
    """
    environment: dict[str, str] = {
        "EPOCHS": str(epochs),
        "OMP_NUM_THREADS": "1",
        "PACE_FILE": "/scripts/pace",
        **spec.pop("environment", {}),
    }
    container = {
        "name": "worker",
        "image": image,
        "command": spec.pop("command", ["python", "/scripts/train.py"]),
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "volumeMounts": [{"name": "scripts", "mountPath": "/scripts"}],
    }
    template: Object = {
        "spec": {"containers": [container], "volumes": [{"name": "scripts", "configMap": {"name": name}}]}
    }
    if affinity := spec.pop("affinity", None):
        template["spec"]["affinity"] = affinity
    sizes = {
        "replicas": workers,
        "minReplicas": spec.pop("minimum", 1),
        "maxReplicas": spec.pop("maximum", 4),
        "processesPerPod": spec.pop("processes", 1),
    }
    if standby := spec.pop("standby", 0):
        sizes["standby"] = standby
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {"strategy": {"type": "AllReduce"}, "workers": {**sizes, "template": template}, **spec},
    }


@dataclass(frozen=True)
class RunningJob:
    """A job in a namespace, seen through the API."""

    cluster: E2ECluster
    namespace: str
    name: str

    def read(self) -> Object:
        return self.cluster.api.job(self.namespace, self.name)

    def status(self) -> Object:
        status: Object = self.read().get("status") or {}
        return status

    def condition(self, kind: str) -> Object:
        """Return a condition; empty while it is not there."""
        return next((c for c in self.status().get("conditions") or [] if c["type"] == kind), {})

    def pods(self, role: str = "worker") -> list[Object]:
        """Return the pods of a role in order of their names."""
        labels = f"springtide.dev/job={self.name},springtide.dev/role={role}"
        return self.cluster.pods(self.namespace, labels)

    def scale(self, replicas: int) -> None:
        self.cluster.kubectl("scale", f"stj/{self.name}", "-n", self.namespace, f"--replicas={replicas}")

    def set_pace(self, seconds: float | str) -> None:
        """Set the pace of steps from now on: a job with a fault to come is slow until it has happened."""
        patch = json.dumps({"data": {"pace": str(seconds)}})
        self.cluster.kubectl(
            "patch", f"configmap/{self.name}", "-n", self.namespace, "--type=merge", "-p", patch
        )

    def patch(self, **spec: Any) -> None:
        """Merge fields into the job's spec, as `kubectl patch` does."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", f"stj/{self.name}", "-n", self.namespace, "--type=merge", "-p", patch)

    def all_pods(self) -> list[Object]:
        """Return the job's pods of all roles."""
        return self.cluster.pods(self.namespace, f"springtide.dev/job={self.name}")

    def seconds_until_gone(self, within: float) -> float:
        """Wait until no pod of the job is left; return how long it took. AssertionError names what is."""
        began = time.monotonic()
        while left := self.all_pods():
            took = time.monotonic() - began
            if took > within:
                names = ", ".join(pod["metadata"]["name"] for pod in left)
                raise AssertionError(f"after {took:.0f} s there is still {names}\n{self.describe()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def delete_pod(self, name: str, *flags: str) -> None:
        self.cluster.kubectl("delete", "pod", name, "-n", self.namespace, *flags)

    def log(self, pod: str) -> str:
        """Return what a pod has said."""
        return self.cluster.api.text(f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log")

    # ---- waits

    def until_trains(self, workers: int, seconds: float = 120.0) -> None:
        """Wait until a generation of this many workers trains."""

        def trains() -> bool:
            counts = self.status().get("workers") or {}
            return counts.get("active") == workers and counts.get("replicas") == workers

        self._until(seconds, f"{workers} workers to train", trains)

    def until_condition(self, kind: str, seconds: float = 120.0, reason: str = "") -> Object:
        """Wait until a condition is true (for this reason, if one is given); return it."""

        def true() -> Object | None:
            found = self.condition(kind)
            return found if found.get("status") == "True" and reason in ("", found["reason"]) else None

        return self._until(seconds, f"condition {kind} {reason}".strip(), true)

    def until_said(self, pod: str, pattern: str, seconds: float = 120.0) -> str:
        """Wait until a pod's log matches; return the pattern's first group."""

        def said() -> str:
            found = re.search(pattern, self.log(pod))
            return found[1] if found else ""

        return str(self._until(seconds, f"{pattern!r} in the log of {pod}", said))

    def until_goes_on(self, seconds: float = 120.0) -> None:
        """Wait until a worker's log shows more steps than now."""
        before = self.steps_said()
        self._until(seconds, f"more than {before} steps in the logs", lambda: self.steps_said() > before)

    def steps_said(self, *names: str) -> int:
        """Return the greatest step in the workers' logs (of those named); -1 where none says one."""
        newest = -1
        for name in names or [pod["metadata"]["name"] for pod in self.pods()]:
            try:
                log = self.log(name)
            except ApiRefusal:
                continue  # it has not started, or has just gone
            newest = max(
                [newest, *(int(line.split()[1]) for line in log.splitlines() if line.startswith("step "))]
            )
        return newest

    def _until(self, seconds: float, what: str, attempt: Any) -> Any:
        try:
            return self.cluster.until(seconds, f"{what} of job {self.name}", attempt)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe()}") from None

    def describe(self) -> str:
        """Return what a person would look at: the job, its pods, their logs."""
        parts = []
        for arguments in (
            ("describe", "stj", self.name),
            ("get", "pods", "-o", "wide"),
            ("logs", "-l", f"springtide.dev/job={self.name}", "--tail=25", "--prefix"),
        ):
            try:
                parts.append(self.cluster.kubectl(*arguments, "-n", self.namespace))
            except RefusedError as error:
                parts.append(str(error))
        return "\n".join(parts)


def left_of(e2e: E2ECluster, running: RunningJob) -> list[str]:
    """Return what still carries a job's label, as kind/name.

    Args:
        e2e: the cluster.
        running: the job.
    """
    return [
        f"{kind}/{item['metadata']['name']}"
        for kind in ("pods", "services", "secrets")
        for item in e2e.labelled(kind, running.namespace, f"springtide.dev/job={running.name}")
    ]
