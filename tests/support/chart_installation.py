"""The chart installed by helm on an embedded cluster, and what tests ask of it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chart_render import CHART, ROOT
from forked_start import forked
from prometheus_client.parser import text_string_to_metric_families
from required import require_tool

from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

NAMESPACE = "springtide-system"
OPERATORS = "app.kubernetes.io/component=operator"
ACCOUNT = "springtide-operator"

Object = dict[str, Any]
Result = TypeVar("Result")


class CommandError(Exception):
    """A command ended with an error; the text is what it said."""


@dataclass(frozen=True)
class Operator:
    """One operator pod."""

    name: str
    address: str
    pid: int

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        return scrape(self.address, 9402)

    def value(self, name: str) -> float:
        """A metric without labels, or the sum of one with labels."""
        return sum(value for _, value in self.metrics()[name])

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


@dataclass(frozen=True)
class Installation:
    """A cluster on which helm works."""

    cluster: Cluster

    def run(self, *command: str, stdin: str | None = None, timeout: float = 240.0) -> str:
        """Run a command and return its output. Raise CommandError."""
        done = subprocess.run(
            [require_tool(command[0]), *command[1:]],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=os.environ | {"KUBECONFIG": str(self.cluster.kubeconfig)},
        )
        if done.returncode != 0:
            raise CommandError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.run("kubectl", *arguments, stdin=stdin)

    def read(self, *arguments: str) -> Object:
        answer: Object = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return answer

    def requests(self) -> list[Object]:
        """How often whom asked for what."""
        answer: list[Object] = self.cluster.request("GET", "/debug/springtide/requests")["requests"]
        return answer

    def operators(self) -> list[Operator]:
        """Operator pods that run."""
        pods = self.read("pods", "-n", NAMESPACE, "-l", OPERATORS)["items"]
        return [
            Operator(pod["metadata"]["name"], pod["status"]["podIP"], process_of(pod))
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
        ]

    def acting(self, seconds: float = 60.0) -> Operator:
        """The one operator that acts; waits for it."""

        def one() -> Operator | None:
            found = [
                operator for operator in self.operators() if operator.value("springtide_operator_acting") == 1
            ]
            return found[0] if len(found) == 1 else None

        return until(seconds, "one acting operator", one)

    def step(self, job: str, namespace: str) -> float:
        """Newest committed step, as the job's coordinator knows it; 0 while there is no coordinator."""
        labels = f"springtide.dev/job={job},springtide.dev/role=coordinator"
        for pod in self.read("pods", "-n", namespace, "-l", labels)["items"]:
            if pod["status"].get("podIP"):
                return scrape(pod["status"]["podIP"], 9401)["springtide_coordinator_step"][0][1]
        return 0.0


def process_of(pod: Object) -> int:
    """Process id of an embedded pod's first container."""
    return int(pod["status"]["containerStatuses"][0]["containerID"].removeprefix("process://"))


def scrape(address: str, port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    """{series name: [(labels, value)]} of a /metrics page."""
    with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    result: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            result.setdefault(sample.name, []).append((sample.labels, sample.value))
    return result


def until(seconds: float, what: str, attempt: Callable[[], Result | None]) -> Result:
    """Ask until the answer is true. Raises AssertionError naming what was waited for, and the last error."""
    deadline = time.monotonic() + seconds
    while True:
        trouble = ""
        try:
            if result := attempt():
                return result
        except (OSError, KeyError, CommandError) as error:
            trouble = f" ({type(error).__name__}: {error})"
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:.0f} s for {what}{trouble}")
        time.sleep(0.1)


def earlier_chart(folder: Path) -> Path | None:
    """The chart as the previous commit has it, unpacked below `folder`; None without such a commit."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD~1", "charts/springtide"]
    done = subprocess.run(command, capture_output=True, timeout=30, check=False)
    if done.returncode != 0:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        # Python before 3.11.4 has no filters; this archive is our own.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder / "charts" / "springtide"


@contextmanager
def installed(folder: Path) -> Iterator[Installation]:
    """An embedded cluster with two operators, from the previous commit's chart where there is one."""
    chart = earlier_chart(folder) or CHART
    with forked():
        started = Cluster.start(folder / "cluster", Settings(nodes=2))
    with started as cluster:
        here = Installation(cluster)
        place = ["-n", NAMESPACE, "--create-namespace"]
        here.run("helm", "install", "springtide", str(chart), *place, "--wait", "--timeout", "180s")
        yield here
