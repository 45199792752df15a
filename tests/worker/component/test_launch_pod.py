"""`springtide launch --processes`: a pod of two processes in a job, and what a launcher does with signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from launch_pods import LAUNCH, ROOTS, Launchers, alive, launched, steps
from worker_cluster import WorkerCluster

from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {"samples": 160, "batch": 32, "epochs": 20, "pace": 0.02, "same_start": True}

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fork_server")]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[WorkerCluster]:
    cluster = WorkerCluster(Launchers("--backoff", "0.1"), tmp_path, OPTIONS)  # type: ignore[arg-type]
    yield cluster
    cluster.close()


def get(port: int, address: str, path: str) -> str:
    with urlopen(f"http://{address}:{port}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


@pytest.mark.slow
def test_killed_process_starts_again_while_the_other_trains_on(
    cluster: WorkerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_PROCESSES", "2")
    cluster.processes_per_pod = 2
    (pod,) = cluster.start(1)
    cluster.until(lambda: min(steps(pod, 0), steps(pod, 1)) >= 3, "steps of both processes")
    before = launched(pod)
    found = re.search(r"metrics and health on port (\d+)", pod.log())
    assert found is not None
    port = int(found[1])
    metrics = get(port, pod.address, "/metrics")
    for rank in ("0", "1"):
        counted = (
            rf'springtide_worker_steps_total{{job_namespace="",local_rank="{rank}",training_job="test"}} '
        )
        assert float(metrics.split(counted)[1].split()[0]) >= 3
    os.kill(before[1], signal.SIGKILL)
    cluster.until(lambda: launched(pod).get(1) != before[1], "the second process again")
    seen = steps(pod, 0)
    cluster.until(lambda: steps(pod, 0) > seen + 1 or not pod.running, "steps of the survivor")
    assert launched(pod)[0] == before[0]
    health = json.loads(get(port, pod.address, "/healthz"))
    assert [process["restarts"] for process in health["processes"]] == [0, 1]
    restarts = 'process_restarts_total{job_namespace="",local_rank="1",training_job="test"} 1.0'
    assert restarts in get(port, pod.address, "/metrics")
    cluster.until_done()
    end = pod.outcome()
    assert isinstance(end, outcome.Finished), cluster.logs()
    assert (pod.code, end.data["repeated"], end.data["lost"]) == (0, 0, 0)
    assert (end.step, end.data["totalSeen"]) == (100, 160 * 20)
    assert end.report["processRestarts"] == 1.0
    assert "[0] " in pod.log()


SCRIPT = """
import os, signal, sys, time
def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        with open(os.environ["SPRINGTIDE_TERMINATION_LOG"], "w") as file:
            file.write('{"outcome": "Left", "reason": "SIGTERM"}')
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
grandchild = os.fork()
if grandchild == 0:
    time.sleep(600)
print("ready", os.getpid(), grandchild, flush=True)
if "--fail" in sys.argv:
    if os.environ["LOCAL_RANK"] == "0":
        open(os.environ["READY"], "w").close()
    else:
        while not os.path.exists(os.environ["READY"]):  # the other one can hear of the end
            time.sleep(0.01)
        sys.exit("no more")
while True:
    time.sleep(600)
"""


COMMAND = (sys.executable, "-c", SCRIPT)


class Launched:
    """A launcher of two processes of SCRIPT, in an imagined pod."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        arguments: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        launcher: Sequence[str] = LAUNCH,
    ) -> None:
        self.log, self.end = folder / "log", folder / "end"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(ROOTS),
            "SPRINGTIDE_COORDINATOR": "127.0.0.1:1",
            "SPRINGTIDE_PROCESSES": "2",
            "SPRINGTIDE_TOKEN": "t",
            "SPRINGTIDE_POD_NAME": "p",
            "SPRINGTIDE_POD_UID": "u",
            "SPRINGTIDE_POD_IP": "127.0.0.1",
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_TERMINATION_LOG": str(self.end),
            "READY": str(folder / "ready"),
        }
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*launcher, "--processes", "2", *options, "--", *command, *arguments],
                env=environment,
                stdout=file,
                stderr=file,
            )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain for {what}\n{self.log.read_text()}"
            time.sleep(0.02)

    def pids(self) -> list[int]:
        """Return the ids of the processes and grandchildren that said they are ready."""
        ready = re.findall(r"ready (\d+) (\d+)", self.log.read_text())
        return [int(pid) for pair in ready for pid in pair]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def start(*options: str, **more: Sequence[str]) -> Launched:
        made.append(Launched(tmp_path, *options, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_signals_go_to_every_process_and_nothing_is_left_behind(launch: Callable[..., Launched]) -> None:
    pod = launch()
    pod.until(lambda: len(pod.pids()) == 4, "two processes and their children")
    pod.process.send_signal(signal.SIGUSR1)
    pod.until(lambda: pod.log.read_text().count("got SIGUSR1") == 2, "SIGUSR1 at both")
    pod.process.send_signal(signal.SIGTERM)
    assert pod.process.wait(180) == 0
    assert outcome.parse(pod.end.read_text()) == outcome.Left("SIGTERM")
    log = pod.log.read_text()
    assert sorted(re.findall(r"^\[(\d)\] got SIGTERM$", log, re.MULTILINE)) == ["0", "1"]
    pod.until(lambda: not any(alive(pid) for pid in pod.pids()), "the end of all processes")


def test_a_failure_that_comes_again_ends_the_pod_with_its_words(launch: Callable[..., Launched]) -> None:
    pod = launch("--restarts", "1", "--backoff", "0.05", arguments=("--fail",))
    assert pod.process.wait(180) == 1
    said = outcome.parse(pod.end.read_text())
    assert isinstance(said, outcome.Failed)
    assert said.message == (
        "process 1 exited with code 1: no more (after 1 restarts of processes in this pod)"
    )
    assert "[0] got SIGTERM" in pod.log.read_text()


STARVES = """
import os, signal, sys, time
if os.environ["LOCAL_RANK"] == "0":
    time.sleep(600)
with open(os.environ["EVENTS"], "w") as file:
    file.write("oom 1\\noom_kill 1\\n")
os.kill(os.getpid(), signal.SIGKILL)
"""
# The launcher, with another root for what it reads of control groups.
ELSEWHERE = """
import functools, os, pathlib, sys
from springtide.launch import cgroup
root = pathlib.Path(os.environ["ELSEWHERE"])
cgroup.out_of_memory_kills = functools.partial(cgroup.out_of_memory_kills, root)
from springtide.launch.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_process_that_the_kernel_kills_for_want_of_memory(
    launch: Callable[..., Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "sys/fs/cgroup/memory.events"
    events.parent.mkdir(parents=True)
    events.write_text("oom 0\noom_kill 0\n")
    monkeypatch.setenv("EVENTS", str(events))
    monkeypatch.setenv("ELSEWHERE", str(tmp_path))
    pod = launch(
        "--restarts", "0", launcher=[sys.executable, "-c", ELSEWHERE], command=[sys.executable, "-c", STARVES]
    )
    assert pod.process.wait(180) == 137
    said = outcome.parse(pod.end.read_text())
    assert isinstance(said, outcome.Failed)
    assert said.reason == "OOMKilled"
    assert said.message.startswith("process 1 was killed: out of memory: raise the container's memory limit")


def test_command_gone_at_a_restart_ends_no_others_at_once(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    command = tmp_path / "command"
    command.write_text(
        "#!/bin/sh\n"
        '[ "$LOCAL_RANK" = 1 ] && { sleep 0.2; rm "$0"; exit 4; }\n'
        "trap 'echo leaves; exit 0' TERM\n"
        "while :; do sleep 0.1; done\n"
    )
    command.chmod(0o755)
    pod = launch("--restarts", "1", "--backoff", "0.05", command=[str(command)])
    assert pod.process.wait(180) == 127
    said = outcome.parse(pod.end.read_text())
    assert isinstance(said, outcome.Failed)
    assert f"cannot start '{command}': No such file" in said.message
    assert "[0] leaves" in pod.log.read_text()


def test_killed_it_takes_its_processes_along(launch: Callable[..., Launched]) -> None:
    pod = launch()
    pod.until(lambda: len(pod.pids()) == 4, "two processes and their children")
    pod.process.kill()
    direct = pod.pids()[::2]
    pod.until(lambda: not any(alive(pid) for pid in direct), "the end of the processes")
    for pid in pod.pids()[1::2]:  # what they forked is no child of the launcher's
        os.kill(pid, signal.SIGKILL)
