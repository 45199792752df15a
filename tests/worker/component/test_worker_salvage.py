"""A step that loses a member costs what the lost one had computed, and nothing of what the others have."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from halt import Halt
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 4, "pace": 0.03}
# The others have computed what they do before they hear of it.
FAULTS = {2: "body:6:sleep=1;gradients:6:kill", 3: "body:10:sleep=1;backward:10:kill"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    environment = {"SPRINGTIDE_SALVAGE": "Always"}
    return lambda options=OPTIONS, **settings: new_cluster(options, environment=environment | settings)


@pytest.fixture
def make_server_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    """Two servers, each of which has a copy of everything."""

    def make(options: dict[str, Any], **settings: str) -> WorkerCluster:
        environment = {"SPRINGTIDE_SALVAGE": "Always"} | settings
        return new_server_cluster(options, 2, 2, environment=environment)

    return make


def alone(zygote: Zygote, folder: Path, options: dict[str, Any]) -> Reference:
    """Return the undisturbed run in one process."""
    (folder / "alone").mkdir()
    return train_alone(zygote, folder / "alone", OPTIONS | options)


def computed_before(worker: Worker) -> dict[int, tuple[int, int]]:
    """Return by step how much of it all members, and this one, had computed when it was done again."""
    pattern = r"step (\d+): (\d+) of \d+ (?:samples|parts) are computed already, (\d+) of them here"
    return {int(step): (int(all_), int(own)) for step, all_, own in re.findall(pattern, worker.log())}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "shard"),
    [
        ({}, "None"),
        ({"scaler": True, "split": 3}, "None"),
        ({"split": 2, "clip_norm": 1e3}, "Optimizer"),
        ({"clip_norm": 1e3}, "Gradients"),
        ({"split": 3, "hidden": 80}, "Gradients"),
    ],
)
def test_survivors_keep_what_they_have_computed(
    make_cluster: Callable[..., WorkerCluster],
    zygote: Zygote,
    tmp_path: Path,
    options: dict[str, Any],
    shard: str,
) -> None:
    """One dies when all gradients are there, one in the middle of its backward: each loses its own alone."""
    reference = alone(zygote, tmp_path, options)
    cluster = make_cluster(OPTIONS | options, SPRINGTIDE_SHARD=shard)
    steady, other, *victims = cluster.start(4, faults=FAULTS)
    cluster.until(lambda: not any(victim.running for victim in victims), "both deaths")
    cluster.until_done()
    assert computed_before(steady)[6] == (24, 8)
    total, own = computed_before(steady)[10]
    assert total >= 2 * own > 0
    check(cluster, reference, [steady, other])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "group_size"), [({"scaler": True}, 1), ({"split": 3, "clip_norm": 1e3}, 1), ({"split": 2}, 2)]
)
def test_survivors_push_what_they_have_again(
    make_server_cluster: Callable[..., WorkerCluster],
    zygote: Zygote,
    tmp_path: Path,
    options: dict[str, Any],
    group_size: int,
) -> None:
    """Servers forget the dropped step, and workers do not: what they have goes with the new generation's."""
    reference = alone(zygote, tmp_path, options)
    cluster = make_server_cluster(OPTIONS | options, SPRINGTIDE_GROUP_SIZE=str(group_size))
    steady, other, *victims = cluster.start(4, faults=FAULTS)
    cluster.until(lambda: not any(victim.running for victim in victims), "both deaths")
    cluster.until_done()
    assert computed_before(steady)[6] == (24, 8)
    total, own = computed_before(steady)[10]
    assert total >= 2 * own > 0
    check(cluster, reference, [steady, other])


@pytest.mark.slow
def test_loss_of_a_server_loses_no_gradient(
    make_server_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """All workers have all of theirs when a server dies before they have pushed: nothing is dealt anew."""
    options = {"clip_norm": 1e3}
    reference = alone(zygote, tmp_path, options)
    cluster, halt = make_server_cluster(OPTIONS | options), Halt(tmp_path)
    workers = cluster.start(2, faults={number: halt.at("gradients:6", number) for number in range(2)})
    cluster.until(lambda: halt.reached(0) and halt.reached(1), "all gradients of step 6")
    cluster.servers[0].kill()
    cluster.until(lambda: not cluster.servers[0].running, "the server's death")
    cluster.add_server(0)
    halt.go()
    cluster.until_done()
    assert [computed_before(worker)[6] for worker in workers] == [(32, 16)] * 2
    check(cluster, reference, workers)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["None", "Gradients", "servers"])
def test_batch_statistics_of_kept_samples_stay(
    make_cluster: Callable[..., WorkerCluster],
    make_server_cluster: Callable[..., WorkerCluster],
    tmp_path: Path,
    zygote: Zygote,
    place: str,
) -> None:
    """The survivor of two goes on as one process does after the first of two micro-batches."""
    options = OPTIONS | {"samples": 32, "epochs": 1, "model": "norm", "same_start": True}
    expected = alone(zygote, tmp_path, options | {"split": 2})
    buffers = json.loads((tmp_path / "alone" / "alone.json").read_text())
    cluster = (
        make_server_cluster(options) if place == "servers" else make_cluster(options, SPRINGTIDE_SHARD=place)
    )
    steady, victim = cluster.start(2, faults={1: "body:1:sleep=1;gradients:1:kill"})
    cluster.until_done()
    assert victim.code == -9
    assert computed_before(steady)[1] == (16, 16)
    result = steady.result()
    assert result is not None, cluster.logs()
    assert (result["buffer_values"], result["buffers"]) == (buffers["buffer_values"], buffers["buffers"])
    assert result["values"] == pytest.approx(expected.values, abs=1e-6)
