"""`springtide launch --torchrun-env` in a job: members come and go, launchers stay, scripts begin again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_start import forked
from launch_pods import LAUNCH, ROOTS, Launchers, alive
from worker_cluster import Worker, WorkerCluster

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "launch_script.py"
FEATURES = SCRIPT.with_name("launch_features.py")

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("fork_server")]

Make = Callable[..., WorkerCluster]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[WorkerCluster] = []

    def cluster(
        *options: str, processes: str = "1", script: Path = SCRIPT, minimum: int = 1, **more: str
    ) -> WorkerCluster:
        launchers = Launchers("--torchrun-env", "--grace", "5", *options)
        environment = {"SPRINGTIDE_JOB_UID": "uid-of-job", "SPRINGTIDE_PROCESSES": processes}
        made.append(
            WorkerCluster(
                launchers,  # type: ignore[arg-type]
                tmp_path,
                more,
                script=script,
                environment=environment,
                minimum=minimum,
            )
        )
        return made[-1]

    yield cluster
    for one in made:
        one.close()


def runs(pod: Worker) -> list[dict[str, str]]:
    """Return the environment that each process of the pod's script found, oldest first."""
    path = pod.folder / f"{pod.name}.runs"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until_together(cluster: WorkerCluster, *pods: Worker) -> list[dict[str, str]]:
    """Wait until the scripts of exactly these pods run in one round; return what they found, by rank."""
    last: list[dict[str, str]] = []

    def together() -> bool:
        last[:] = [runs(pod)[-1] for pod in pods if runs(pod)]
        return (
            len(last) == len(pods)
            and len({run["TORCHELASTIC_RESTART_COUNT"] for run in last}) == 1
            and all(run["WORLD_SIZE"] == str(len(pods)) and alive(int(run["pid"])) for run in last)
        )

    cluster.until(together, f"the scripts of {[pod.name for pod in pods]} in one round", 120.0)
    return sorted(last, key=lambda run: int(run["RANK"]))


def test_a_kill_restarts_only_the_scripts_of_the_others(make: Make) -> None:
    cluster = make()
    first, second, third = cluster.start(3)
    before = until_together(cluster, first, second, third)
    assert [run["RANK"] for run in before] == ["0", "1", "2"]
    assert {run["MASTER_ADDR"] for run in before} == {first.address}
    assert {(run["LOCAL_RANK"], run["LOCAL_WORLD_SIZE"]) for run in before} == {("0", "1")}
    assert {run["TORCHELASTIC_RUN_ID"] for run in before} == {"uid-of-job"}
    assert cluster.reply is not None
    assert cluster.reply.opaque

    # A lost pod, and it had the store.
    first.kill()
    again = until_together(cluster, second, third)
    assert {run["MASTER_ADDR"] for run in again} == {second.address}
    assert {run["pid"] for run in again}.isdisjoint(run["pid"] for run in before)
    assert not any(alive(int(run["pid"])) for run in before)

    # A new pod.
    fourth = cluster.add()
    joined = until_together(cluster, second, third, fourth)
    assert [run["GROUP_RANK"] for run in joined] == ["0", "1", "2"]

    # A coordinator: nobody's script notices.
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.until(
        lambda: (
            cluster.reply is not None
            and cluster.reply.incarnation.number == 2
            and sum(member.connected for member in cluster.reply.members) == 3
        ),
        "the next coordinator to know all members",
    )
    assert until_together(cluster, second, third, fourth) == joined

    # A script alone is killed.
    os.kill(int(runs(third)[-1]["pid"]), signal.SIGKILL)
    cluster.until(lambda: len(runs(third)) > 3 or len(runs(second)) > 3, "another round")
    until_together(cluster, second, third, fourth)

    # A pod that is told to go.
    third.terminate()
    until_together(cluster, second, fourth)
    cluster.until_done(third)
    assert third.outcome() == outcome.Left("SIGTERM")
    assert second.running
    assert fourth.running

    (second.folder / "finish").touch()
    cluster.until_done()
    for pod in (second, fourth):
        end = pod.outcome()
        assert isinstance(end, outcome.Finished), cluster.logs()
        assert pod.code == 0
        # They run in what becomes a script, and abort it now and then.
        assert "fork() handlers" not in pod.log()
    assert cluster.reply.states_lost == 0


def test_failing_script_ends_its_own_pod_and_no_other(make: Make) -> None:
    cluster = make("--restarts", "1", fails="worker-1")
    first, second = cluster.start(2)
    cluster.until_done(second)
    end = second.outcome()
    assert isinstance(end, outcome.Failed), cluster.logs()
    assert end.message.startswith("process 0 exited with code 1: ValueError: it cannot go on")
    assert len(runs(second)) == 2
    assert first.running
    until_together(cluster, first)
    (first.folder / "finish").touch()
    cluster.until_done()
    assert isinstance(first.outcome(), outcome.Finished)


def test_several_processes_in_a_pod_are_ranks_of_their_own(make: Make) -> None:
    cluster = make(processes="2")
    cluster.processes_per_pod = 2
    first, second = cluster.start(2)
    cluster.until(lambda: len(runs(first)) + len(runs(second)) == 4, "four scripts")
    found = sorted(runs(first) + runs(second), key=lambda run: int(run["RANK"]))
    assert [run["RANK"] for run in found] == ["0", "1", "2", "3"]
    assert [run["LOCAL_RANK"] for run in found] == ["0", "1", "0", "1"]
    assert [run["GROUP_RANK"] for run in found] == ["0", "0", "1", "1"]
    (first.folder / "finish").touch()
    cluster.until_done()
    for pod in (first, second):
        assert isinstance(pod.outcome(), outcome.Finished), cluster.logs()


@pytest.mark.slow
def test_torch_distributed_works_before_and_after_a_change(make: Make) -> None:
    cluster = make("--restarts", "0", script=FEATURES, minimum=2)
    first, second = cluster.start(2)

    def held() -> dict[str, str]:
        """Return the results of the newest round so far, and the number of that round."""
        found = max(first.folder.glob("held.[0-9]*"), key=lambda path: int(path.suffix[1:]), default=None)
        return {} if found is None else json.loads(found.read_text()) | {"round": found.suffix[1:]}

    cluster.until(lambda: bool(held()), "all that was tried to hold", 240.0)
    before = held()
    # It has the store, and the other one is in the middle of a ring.
    first.kill()
    third = cluster.add()
    cluster.until(lambda: held()["round"] != before["round"], "all that was tried to hold again", 240.0)
    after = held()
    for found in (before, after):
        # TorchOpt itself is tried where it is installed.
        assert found.pop("torchopt_itself") in ("held", "skipped: No module named 'torchopt'")
        assert int(found.pop("round")) >= 0
        assert found == dict.fromkeys(
            (
                "primitives",
                "barriers",
                "data_parallel",
                "fully_sharded",
                "pipeline",
                "remote_calls",
                "partition_map_reduce",
            ),
            "held",
        )
    (first.folder / "finish").touch()
    cluster.until_done()
    for pod in (second, third):
        assert isinstance(pod.outcome(), outcome.Finished), cluster.logs()


@pytest.mark.slow
def test_the_example_trains_and_leaves_checkpoints(tmp_path: Path) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(ROOTS),
        "OMP_NUM_THREADS": "1",
        "DIGITS_EPOCHS": "2",
        "CHECKPOINT": str(tmp_path / "digits"),
    }
    command = [*LAUNCH, "--processes", "2", "--torchrun-env", "--restarts", "0", "--", sys.executable]
    example = Path(__file__).parents[3] / "examples" / "torchrun" / "train.py"
    with forked():
        done = subprocess.run(
            [*command, str(example)], env=environment, capture_output=True, text=True, timeout=150
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1] rank 1 of 2 begins after epoch 0" in done.stdout
    assert "[0] accuracy 0." in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.0.pt", "digits.1.pt"]
