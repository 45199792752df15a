"""Exact mode in real processes: whatever their number and whatever happens to them, the bits are equal."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import train_alone

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "worker_exact_script.py"
LOGICAL_WORKERS = 7
ENVIRONMENT = {"SPRINGTIDE_LOGICAL_WORKERS": str(LOGICAL_WORKERS)}
# 103 = 3 x 32 + 7: the last batch of an epoch has three parts, of 3, 2 and 2 samples, so that with five
# workers two have none; the others have seven, of 4 and 5.
OPTIONS: dict[str, Any] = {"samples": 103, "batch": 32, "epochs": 5}
STEPS = 20

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(MKL_CBWR="AVX2,STRICT")
    yield zygote
    zygote.close()


@pytest.fixture
def make_cluster(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., WorkerCluster]]:
    clusters: list[WorkerCluster] = []

    def make(environment: dict[str, str] | None = None, minimum: int = 1, **options: Any) -> WorkerCluster:
        folder = tmp_path / f"job-{len(clusters)}"
        folder.mkdir()
        environment = ENVIRONMENT | (environment or {})
        cluster = WorkerCluster(
            zygote, folder, OPTIONS | options, script=SCRIPT, environment=environment, minimum=minimum
        )
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


Alone = Callable[..., dict[str, Any]]


def plans(worker: Worker) -> list[list[int]]:
    """Return the samples of all ranks, each time that the worker's own number changed."""
    return [
        list(map(int, found.split(", "))) for found in re.findall(r"parts by rank: ([\d, ]+)\)", worker.log())
    ]


def own_shares(worker: Worker) -> list[int]:
    """Return the worker's own samples of 32, each time that they changed."""
    return list(map(int, re.findall(r"this worker has (\d+) of 32 samples now", worker.log())))


def losses_in(folder: Path) -> dict[tuple[str, str], str]:
    """Return the bits of each part's loss, by step and samples, of all processes that have written theirs
    there; fail where one of them got others than another, or than itself when it did the step again.
    """
    found: dict[tuple[str, str], set[str]] = {}
    for path in folder.glob("*.losses"):
        for line in path.read_text().splitlines():
            step, samples, bits = line.split()
            found.setdefault((step, samples), set()).add(bits)
    assert {len(bits) for bits in found.values()} == {1}
    return {key: next(iter(bits)) for key, bits in found.items()}


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Result of the undisturbed run in one process."""
    known: dict[str, dict[str, Any]] = {}

    def run(**options: Any) -> dict[str, Any]:
        key = json.dumps(options)
        if key not in known:
            folder = tmp_path_factory.mktemp("alone")
            log = folder / "alone.log"
            pid = zygote.fork(ENVIRONMENT, [str(SCRIPT), str(folder), json.dumps(OPTIONS | options)], log)
            deadline = time.monotonic() + 60
            while zygote.code(pid) is None:
                assert time.monotonic() < deadline, "the run in one process did not end in 60 s"
                time.sleep(0.01)
            assert zygote.code(pid) == 0, log.read_text()
            known[key] = json.loads((folder / "alone.json").read_text()) | {"losses": losses_in(folder)}
        return known[key]

    return run


def check(
    cluster: WorkerCluster, expected: dict[str, Any], members: list[Worker], but: Collection[str] = ()
) -> None:
    losses = losses_in(cluster.folder)
    for worker in members:
        assert isinstance(worker.outcome(), outcome.Finished), f"{worker.outcome()}\n{cluster.logs()}"
        found = (worker.result() or {}) | {"losses": losses}
        for name in expected.keys() - set(but):
            assert found.get(name) == expected[name], f"{name} of {worker.name}\n{cluster.logs()}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5])
def test_equal_bits_at_any_size(make_cluster: Callable[..., WorkerCluster], alone: Alone, size: int) -> None:
    expected = alone()
    assert expected["step"] == STEPS
    assert expected["audit"]["totalSeen"] == 5 * 103
    assert (expected["audit"]["repeated"], expected["audit"]["lost"]) == (0, 0)
    cluster = make_cluster()
    cluster.start(size)
    cluster.until_done()
    check(cluster, expected, cluster.workers)


def test_equal_bits_over_kills_and_joins(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    """Sizes 3, 2, 3, 4, 3, 2, with deaths in the middle of a part and between reductions and commit."""
    cluster = make_cluster(pace=0.01)
    first, second, third = cluster.start(3, faults={1: "backward:3:kill"})
    cluster.until(lambda: not second.running, "the first death")
    fourth = cluster.add(fault="reduced:*:kill")
    cluster.until(lambda: not fourth.running, "the second death")
    fifth = cluster.add()
    sixth = cluster.add(fault="stepped:*:kill")
    cluster.until(lambda: not sixth.running, "the third death")
    first.terminate()
    cluster.until_done()
    assert isinstance(first.outcome(), outcome.Left)
    check(cluster, alone(), [third, fifth])
    assert fifth.commits()[0]["step"] > 3


@pytest.mark.slow
def test_equal_bits_when_a_joiner_follows(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    cluster = make_cluster({"SPRINGTIDE_FOLLOW_MIB": "0"})
    cluster.start(2)
    cluster.until_step(4)
    joiner = cluster.add()
    cluster.until_done()
    assert re.search(r"of the state, \S+ \S+ were here", joiner.log()), joiner.log()
    check(cluster, alone(), cluster.workers)


@pytest.mark.slow
def test_equal_bits_with_parts_by_speed(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    """The slow one of three has one of the seven parts, and one of two fewer than the other; the bits are
    those of one process. How the two that are alike share the rest is up to the machine.
    """
    cluster = make_cluster(epochs=8, part_seconds={"0": 0.02, "1": 0.02, "2": 0.1})
    cluster.environment["SPRINGTIDE_BALANCE"] = "Speed"
    first, second, slow = cluster.start(3)
    cluster.until_step(16)
    second.kill()
    cluster.until_done()
    check(cluster, alone(epochs=8), [first, slow])
    of_three = [plan for plan in plans(slow) if len(plan) == 3]
    assert any(min(plan) == 4 and plan.count(4) == 1 for plan in of_three)
    assert "this worker has 4 of 32 samples now" in slow.log()
    quick_part, slow_part = (own_shares(worker)[-1] for worker in (first, slow))
    assert quick_part > slow_part
    assert quick_part + slow_part == 32


@pytest.mark.slow
def test_equal_bits_with_a_scaler(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    """Steps are skipped and the scale moves, with one worker as with three, two and three."""
    expected = alone(scaler=True)
    assert expected["audit"]["skipped"] >= 2
    assert expected["step"] == STEPS
    assert expected["finite"]
    cluster = make_cluster(scaler=True)
    first, second, third = cluster.start(3, faults={1: "backward:3:kill", 2: "committed:14:sleep=1"})
    cluster.until(lambda: not second.running, "the death")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, expected, [first, third])
    assert isinstance(joiner.outcome(), outcome.Finished | outcome.Left)
    if joiner in cluster.finished():
        check(cluster, expected, [joiner])


@pytest.mark.slow
def test_equal_bits_from_a_checkpoint_at_another_size(
    make_cluster: Callable[..., WorkerCluster], alone: Alone, tmp_path: Path
) -> None:
    """The exponents of the sums are part of what is saved."""
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.05"}
    cluster = make_cluster(place, minimum=2)
    first, second = cluster.start(2, faults={0: "saved:*:kill"})
    cluster.until(lambda: not first.running, "the death after a checkpoint")
    second.kill()
    after = [cluster.add() for _ in range(3)]
    cluster.until_done()
    # Each step is there once, though not begun at the first.
    assert min(worker.commits()[0]["step"] for worker in after) > 1
    check(cluster, alone(), after)


def test_values_that_are_not_finite_travel(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    """A NaN of one sample is in the parameters of all workers, with the same bits."""
    options = {"not_finite": "nan", "epochs": 1}
    expected = alone(**options)
    assert not expected["finite"]
    cluster = make_cluster(**options)
    cluster.start(2)
    cluster.until_done()
    check(cluster, expected, cluster.workers)


def test_micro_batches_and_half_precision(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    options = {"split": 2, "bfloat16": True, "autocast": False, "epochs": 2}
    expected = alone(**options)
    assert expected["finite"]
    assert expected["parameters"] != alone()["parameters"]
    cluster = make_cluster(**options)
    cluster.start(2)
    cluster.until_done()
    check(cluster, expected, cluster.workers)


SHARDED = ("optimizer",)
"""A worker has a part of the optimizer's state there, and not in the optimizer."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
@pytest.mark.parametrize("size", [1, 3])
def test_shards_have_the_bits_of_a_job_without(
    make_cluster: Callable[..., WorkerCluster], alone: Alone, size: int, shard: str
) -> None:
    """Clipped by a norm that the last batch of each epoch, of another weight than the others, has too."""
    cluster = make_cluster({"SPRINGTIDE_SHARD": shard})
    cluster.start(size)
    cluster.until_done()
    check(cluster, alone(), cluster.workers, SHARDED)
    assert "of optimizer state" in cluster.logs()


@pytest.mark.slow
def test_equal_bits_in_shards_over_kills_and_joins(
    make_cluster: Callable[..., WorkerCluster], alone: Alone
) -> None:
    """Sizes 3, 2, 3, 2, with deaths before the sums are at two members, and after that."""
    options = {"pace": 0.01, "scaler": True}
    cluster = make_cluster({"SPRINGTIDE_SHARD": "Optimizer"}, **options)
    first, second, third = cluster.start(3, faults={1: "pushed:3:kill"})
    cluster.until(lambda: not second.running, "the first death")
    fourth = cluster.add(fault="reduced:*:kill")
    cluster.until(lambda: not fourth.running, "the second death")
    fifth = cluster.add()
    cluster.until(lambda: bool(fifth.commits()), "steps of another one")
    first.terminate()
    cluster.until_done()
    expected = alone(**options)
    assert expected["audit"]["skipped"] >= 1
    check(cluster, expected, [third, fifth], SHARDED)


POINTS = ("body", "backward", "gradients", "reduced", "stepping", "stepped", "committed")
"""The points of a step."""
KILLS = {
    "None": (*POINTS, *POINTS[:3]),
    "Optimizer": (*POINTS, "pushed", "prepared", "gathering"),
    "Gradients": ("gathering", "prepared", "pushed", *reversed(POINTS)),
}
"""Ten points at which a worker dies, by `shard`."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["None", "Optimizer", "Gradients"])
def test_equal_bits_through_ten_kills(
    make_cluster: Callable[..., WorkerCluster], alone: Alone, shard: str
) -> None:
    """One of three dies at each point of a step in turn, and another comes: with shards and without, each
    loss of each step and all parameters have the bits of one process.
    """
    options = {"epochs": 14}
    cluster = make_cluster({"SPRINGTIDE_SHARD": shard}, pace=0.003, **options)
    points = KILLS[shard]
    first, second, _ = cluster.start(3, faults={2: f"{points[0]}:3:kill"})
    for point, following in zip(points, (*points[1:], ""), strict=True):
        cluster.until(lambda: not cluster.workers[-1].running, f"the death at {point}")
        step = first.commits()[-1]["step"] + 4  # not the first one of the process that comes
        cluster.add(f"{following}:{step}:kill" if following else "")
    cluster.until_done()
    assert sum(worker.code == -9 for worker in cluster.workers) == 10
    check(cluster, alone(**options), [first, second, cluster.workers[-1]], SHARDED if shard != "None" else ())


@pytest.mark.slow
def test_parts_that_are_over_stay(make_cluster: Callable[..., WorkerCluster], alone: Alone) -> None:
    """One dies when all its gradients are there, one in the middle of its first part."""
    # The others have computed what they do before they hear of it.
    faults = {2: "body:6:sleep=1;gradients:6:kill", 3: "body:10:sleep=1;backward:10:kill"}
    cluster = make_cluster({"SPRINGTIDE_SALVAGE": "Always"}, pace=0.03)
    steady, other, *victims = cluster.start(4, faults=faults)
    cluster.until(lambda: not any(victim.running for victim in victims), "both deaths")
    cluster.until_done()
    pattern = r"step (\d+): (\d+) of 7 parts are computed already, (\d+) of them here"
    found = re.findall(pattern, steady.log()) + re.findall(pattern, other.log())
    assert sum(int(own) for _, _, own in found) >= 2, cluster.logs()
    check(cluster, alone(), [steady, other])


def test_bits_of_data_in_shards_are_equal_after_a_death(zygote: Zygote, tmp_path: Path) -> None:
    lengths = [30, 7, 0, 25, 18]
    options = {
        "samples": sum(lengths),
        "shards": lengths,
        "batch": 16,
        "epochs": 1,
        "pace": 0.03,
        "noise": 0.1,
    }
    (tmp_path / "alone").mkdir()
    reference = train_alone(zygote, tmp_path / "alone", options, ENVIRONMENT)
    cluster = WorkerCluster(zygote, tmp_path, options, environment=ENVIRONMENT)
    try:
        steady, victim = cluster.start(2, faults={1: "backward:4:kill"})
        cluster.until_done()
        assert victim.code == -9
        result = steady.result()
        assert result is not None
        assert result["parameters"] == reference.digest
        assert result["audit"] == reference.audit
        assert result["audit"]["totalSeen"] == sum(lengths)
    finally:
        cluster.close()
