"""Replicas that drift apart: found, named, and sent the state again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_cluster import Worker, WorkerCluster

from springtide.checkpoint import restore
from springtide.checkpoint.storage import Storage
from springtide.coordination import outcome
from springtide.train_step.replica_digest import INTERVAL

OPTIONS: dict[str, Any] = {"samples": 64, "batch": 16, "epochs": 20, "lr": 0.01}
STEPS = 80
SHORT = OPTIONS | {"epochs": 2}
SHORT_STEPS = 8


def ended(cluster: WorkerCluster) -> list[Worker]:
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()
    return cluster.workers


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_one_of_three_is_sent_the_state(odd: int, new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"spoilt": [[20, odd]]})
    cluster.start(3)
    workers = ended(cluster)
    results = [worker.result() for worker in workers]
    assert len({result["parameters"] for result in results}) == 1
    assert all(result["step"] == STEPS and not result["audit"]["lost"] for result in results)
    for worker in workers:
        said = [line for line in worker.log().splitlines() if "are not those of the other workers" in line]
        assert len(said) == 1
        assert f"step {2 * INTERVAL}: the parameters of worker-{odd} are not" in said[0]
        assert "it is sent the state again" in said[0]


def test_with_two_the_first_one_counts(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"spoilt": [[20, 1]]})
    cluster.start(2)
    first, second = ended(cluster)
    assert first.result()["parameters"] == second.result()["parameters"]
    assert "the parameters of worker-1 are not those" in first.log()


@pytest.mark.slow
def test_one_that_drifts_on_is_left_alone_in_the_end(new_cluster: Callable[..., WorkerCluster]) -> None:
    """A worker that drifts again and again is at last sent the state no more.

    A machine that computes otherwise is not helped by stopping all others for it.
    """
    cluster = new_cluster(OPTIONS | {"spoilt": [[step, 1] for step in range(1, 76)], "epochs": 25})
    cluster.start(2)
    first, _ = ended(cluster)
    assert first.log().count("it is sent the state again") == 3
    assert "it is not sent the state any more: its machine computes otherwise" in first.log()


def differences(worker: Worker) -> list[str]:
    return [line for line in worker.log().splitlines() if "are not those of the other workers" in line]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "odd"), [("spoilt", 0), ("spoilt_buffers", 2)])
def test_a_short_job_ends_with_equal_replicas(
    fault: str, odd: int, new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    """The last checkpoint, and what workers hold at the end, are those of most.

    No vote of so short a job compares anything.
    """
    volume = tmp_path / "volume"
    volume.mkdir()
    options = SHORT | {"model": "norm", fault: [[SHORT_STEPS, odd]]}
    cluster = new_cluster(options, environment={"SPRINGTIDE_CHECKPOINT_URI": str(volume)})
    cluster.start(3)
    workers = ended(cluster)
    results = [worker.result() for worker in workers]
    assert len({result["parameters"] + result["buffers"] for result in results}) == 1
    assert all(result["step"] == SHORT_STEPS for result in results)
    for worker in workers:
        (said,) = differences(worker)
        assert f"step {SHORT_STEPS}: the parameters of worker-{odd} are not those" in said
        assert "it is sent the state again" in said
    found, skipped = restore.newest(Storage(str(volume), "default-test-alone"))
    assert found is not None
    assert not skipped
    assert found.manifest.state.step == SHORT_STEPS
    assert len(found.manifest.parts["workers"].files) == 2  # the odd one writes none of it
    saved = torch.cat([tensor.reshape(-1) for tensor in found.tree["parameters"].values()]).tolist()
    assert saved == results[0]["values"]


def test_a_checkpoint_compares_all_between_votes(
    new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    environment = {"SPRINGTIDE_CHECKPOINT_URI": str(volume), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.01"}
    cluster = new_cluster(OPTIONS | {"epochs": 3, "pace": 0.05, "spoilt": [[5, 1]]}, environment=environment)
    cluster.start(2)
    first, second = ended(cluster)
    assert first.result()["parameters"] == second.result()["parameters"]
    (said,) = differences(first)
    assert 5 <= int(said.partition("step ")[2].partition(":")[0]) < 12
