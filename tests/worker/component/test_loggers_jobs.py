"""Real worker processes and real trackers: what these show after kills, a join and a way back."""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loggers_read
import pytest
from worker_cluster import WorkerCluster, Zygote

from springtide.checkpoint import names, restore
from springtide.checkpoint.storage import Storage
from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 8,
    "pace": 0.03,
    "optimizer": "adam",
    "lr": 0.01,
}
STEPS = 64
RUN = "default-test-alone"

pytestmark = pytest.mark.timeout(120)


def missing(*modules: str) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


@pytest.fixture
def make_cluster(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., WorkerCluster]]:
    clusters: list[WorkerCluster] = []

    def make(trackers: list[str], **environment: str) -> WorkerCluster:
        options = OPTIONS | {"trackers": {name: str(tmp_path / name) for name in trackers}}
        environment = {
            "SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2",
            "SPRINGTIDE_CHECKPOINT_KEEP": "100",
            **environment,
        }
        (tmp_path / "volume").mkdir()
        clusters.append(WorkerCluster(zygote, tmp_path, options, environment=environment))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def through_everything(cluster: WorkerCluster, volume: Path, newest: Callable[[], int]) -> int:
    """Kill the writer and the coordinator, let one join, let the next writer leave, and kill all.

    Return the step of the checkpoint that others go on from.

    newest: the newest step that the trackers have.
    """
    storage = Storage(str(volume), RUN)

    def saved() -> list[int]:
        found = [names.parse(name) for name in restore.candidates(storage)]
        return sorted(state.step for state in found if state is not None)

    def delivered(step: int) -> None:
        """Wait, while the job stands still, for trackers: those who know the steps are about to die."""
        deadline = time.monotonic() + 60
        while newest() < step:
            assert time.monotonic() < deadline, cluster.logs()
            time.sleep(0.05)

    workers = cluster.start(3)
    cluster.until_step(6, workers[0])
    workers[0].kill()
    cluster.until_step(10, workers[1])
    cluster.kill_coordinator()
    cluster.until_step(12, workers[1])
    cluster.start_coordinator()
    joiner = cluster.add()
    cluster.until(lambda: bool(joiner.commits()), "the joiner's first step")
    workers[1].terminate()  # the writer, which leaves in order
    cluster.until_done(workers[1])
    begun = joiner.commits()[-1]["step"]
    cluster.until(lambda: any(step >= begun for step in saved()), "a checkpoint")
    chosen = next(step for step in saved() if step >= begun)
    cluster.until_step(chosen + 4, workers[2])
    delivered(chosen + 4)
    for worker in cluster.workers:
        worker.kill()
    cluster.until(lambda: not any(worker.running for worker in cluster.workers), "the end of all")
    for name in restore.candidates(storage):
        state = names.parse(name)
        if state is not None and state.step > chosen:
            shutil.rmtree(volume / RUN / name)
    cluster.add()
    cluster.add()
    cluster.until_done()
    assert len(cluster.finished()) == 2, cluster.logs()
    return chosen


def last(points: list[tuple[int, float]]) -> int:
    return max((step for step, _ in points), default=0)


def reported(cluster: WorkerCluster) -> tuple[dict[int, float], set[int]]:
    """Return the loss by step that the job has in the end, and the first step of each generation."""
    newest: dict[int, tuple[list[int], float]] = {}
    for worker in cluster.workers:
        for commit in worker.commits():
            name = [*commit["incarnation"], commit["generation"]]
            if commit["step"] not in newest or newest[commit["step"]][0] < name:
                newest[commit["step"]] = (name, commit["values"]["loss"])
    first: dict[str, int] = {}
    for step, (name, _) in sorted(newest.items()):
        first.setdefault(str(name), step)
    return {step: value for step, (_, value) in sorted(newest.items())}, set(first.values())


@pytest.mark.slow
def test_tensorboard_has_each_committed_step_once(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    if missing("tensorboard"):
        pytest.skip("tensorboard is not installed: pip install 'springtide[tensorboard]'")
    cluster = make_cluster(["tensorboard"])
    folder = tmp_path / "tensorboard"

    def newest() -> int:
        return last(loggers_read.tensorboard(folder, RUN)[0].get("loss", []))

    checkpoint = through_everything(cluster, tmp_path / "volume", newest)
    losses, changes = reported(cluster)
    points, texts = loggers_read.tensorboard(folder, RUN)
    assert [step for step, _ in points["loss"]] == list(range(1, STEPS + 1))
    assert dict(points["loss"]) == pytest.approx(losses, rel=1e-6)
    # The first step of each generation that made one, with its workers, and why.
    sizes = dict(points["springtide/workers"])
    assert set(sizes) == changes
    assert sizes[1] == 3
    assert sizes[checkpoint + 1] in (1, 2)
    assert points["final"] == [(STEPS, 1.0)]
    assert f"springtide/generation@{checkpoint + 1}" in texts
    assert "| lr | 0.01 |" in texts["springtide/config@0"]
    # Those steps were there before, and were taken back.
    assert "goes back from step" in "".join(worker.log() for worker in cluster.workers)
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.finished())


def test_mlflow_and_wandb_have_each_committed_step_once(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent := missing("mlflow", "wandb"):
        pytest.skip(f"not installed: {', '.join(absent)} (pip install 'springtide[mlflow,wandb]')")
    environment = {
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_SILENT": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cluster = make_cluster(["mlflow", "wandb"], **environment)
    uri = f"file://{tmp_path / 'mlflow'}"

    def newest() -> int:
        # W&B keeps the row of the last step until the next one.
        rows = loggers_read.wandb(tmp_path / "wandb", RUN).get("loss", [])
        points = loggers_read.mlflow(uri, RUN)[0].get("loss", []) if rows else []
        return min(last(points), last(rows) + 1)

    checkpoint = through_everything(cluster, tmp_path / "volume", newest)
    losses, _ = reported(cluster)
    points, run = loggers_read.mlflow(uri, RUN)
    assert points["loss"] == list(losses.items())
    assert points["final"] == [(STEPS, 1.0)]
    assert run.info.status == "FINISHED"
    assert run.data.params["lr"] == "0.01"
    assert run.data.params["springtide/batch_size"] == "32"
    rows = loggers_read.wandb(tmp_path / "wandb", RUN)
    assert [step for step, _ in rows["loss"]] == list(range(1, STEPS + 1))
    # Offline nothing can be taken back: steps that were made anew keep the values that they had.
    made_anew = range(checkpoint + 1, checkpoint + 8)
    assert {step: value for step, value in rows["loss"] if step not in made_anew} == {
        step: value for step, value in losses.items() if step not in made_anew
    }
