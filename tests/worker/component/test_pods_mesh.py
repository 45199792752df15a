"""`springtide.mesh()`: models that are divided in a pod, in jobs whose pods come and go."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_pods import Launchers, alive, launched, steps
from worker_cluster import Worker, WorkerCluster

from springtide.coordination import outcome

pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parents[2] / "support" / "mesh_script.py"
PACE = {"pace": 0.05}


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., WorkerCluster]]:
    clusters: list[WorkerCluster] = []

    def make(options: dict[str, Any], processes: int = 2, **environment: str) -> WorkerCluster:
        variables = {"SPRINGTIDE_PROCESSES": str(processes), **environment}
        cluster = WorkerCluster(
            Launchers(),
            tmp_path,
            options,
            script=SCRIPT,
            environment=variables,  # type: ignore[arg-type]
        )
        cluster.processes_per_pod = processes
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


def losses(path: Path) -> dict[int, float]:
    """The loss of each step, by a step log; of two attempts at a step the one that was committed last."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["step"]: entry["values"]["loss"] for entry in entries}


def results(worker: Worker, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((worker.folder / f"{worker.name}.{rank}.json").read_text())
    return found


def flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [number for key in sorted(tree) for number in flat(tree[key])]
    if isinstance(tree, list):
        return [number for item in tree for number in flat(item)]
    return [tree]


def until_steps(cluster: WorkerCluster, pod: Worker, count: int) -> None:
    cluster.until(lambda: steps(pod, 0) >= count, f"{count} steps of {pod.name}")


def check_like_alone(alone: Path, cluster: WorkerCluster, pods: list[Worker], processes: int = 2) -> None:
    """Losses, parameters and the optimizer's state are those of one process."""
    wanted = json.loads((alone / "alone.0.json").read_text())
    expected = losses(alone / "steps")
    seen: dict[int, float] = {}
    for pod in cluster.workers:
        for rank in range(processes):
            path = pod.folder / f"{pod.name}.steps.{rank}"
            seen |= losses(path) if path.exists() else {}
    assert sorted(seen) == sorted(expected)
    assert [seen[step] for step in sorted(seen)] == pytest.approx(
        [expected[step] for step in sorted(expected)], abs=1e-5
    )
    for pod in pods:
        end = pod.outcome()
        assert isinstance(end, outcome.Finished), cluster.logs()
        assert (end.data["repeated"], end.data["lost"]) == (0, 0)
        for rank in range(processes):
            assert flat(results(pod, rank)) == pytest.approx(flat(wanted), abs=1e-5)


@pytest.fixture
def train_alone(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Train in one process of its own, and return its folder."""

    def train(options: dict[str, Any]) -> Path:
        folder = tmp_path / "alone"
        folder.mkdir()
        launchers = Launchers()
        plain = {key: value for key, value in options.items() if key not in ("mesh", "pace")}
        variables = {"SPRINGTIDE_STEP_LOG": str(folder / "steps"), "SPRINGTIDE_PROCESSES": "1"}
        arguments = [str(SCRIPT), str(folder), json.dumps(plain | {"alone": True})]
        pid = launchers.fork(variables, arguments, folder / "log")
        assert launchers.wait(pid, 120.0) == 0, (folder / "log").read_text()
        return folder

    return train


def test_dead_process_ends_its_pod_and_no_other(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    options = {"epochs": 8, "pieces": 2, "clip_norm": 0.5, **PACE}
    alone = train_alone(options)
    cluster = make_cluster(options)
    first, second = cluster.start(2)
    until_steps(cluster, first, 5)
    before, doomed = launched(first), launched(second)
    os.kill(doomed[1], signal.SIGKILL)
    cluster.until(lambda: not second.running, "the end of the second pod")
    assert not any(alive(pid) for pid in doomed.values())
    end = second.outcome()
    assert isinstance(end, outcome.Failed)
    assert "process 1 was killed by signal 9" in end.message
    seen = steps(first, 0)
    cluster.until(lambda: steps(first, 0) > seen + 1, "steps of the survivor")
    third = cluster.add()
    cluster.until(lambda: steps(third, 1) > 1, "steps of the pod that joined")
    cluster.until_done()
    assert launched(first) == before
    check_like_alone(alone, cluster, [first, third])


def test_two_dimensions_are_saved_and_restored_by_another_mesh(
    make_cluster: Callable[..., WorkerCluster],
    train_alone: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
) -> None:
    """fully_shard over tensor parallelism in one pod of 2 x 2, then tensor parallelism alone in pods of 2."""
    options = {"epochs": 8, "clip_norm": 0.5, "optimizer": "sgd", **PACE}
    alone = train_alone(options)
    (tmp_path / "saved").mkdir()
    storage = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "saved"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2"}
    cluster = make_cluster(options | {"mesh": [["dp_shard", "tp"], [2, 2]]}, processes=4, **storage)
    (first,) = cluster.start(1)
    cluster.until(lambda: len(list((tmp_path / "saved").glob("*/step-*/manifest.json"))) > 1, "checkpoints")
    os.kill(launched(first)[2], signal.SIGKILL)
    cluster.until(lambda: not first.running, "the end of the pod")
    # The same job goes on in pods of another form.
    cluster.environment["SPRINGTIDE_PROCESSES"] = "2"
    cluster.processes_per_pod = 2
    second = cluster.add(mesh=["tp"])
    third = cluster.add(mesh=["tp"])
    cluster.until_done()
    assert any("restored" in pod.log() for pod in (second, third))
    check_like_alone(alone, cluster, [second, third])
