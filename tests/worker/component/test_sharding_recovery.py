"""Real processes with the optimizer's state in shards: whoever dies, and when, the numbers stay."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gpu_capabilities import needs_cuda
from prometheus_client.parser import text_string_to_metric_families
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_processes import FORMED
from worker_reference import Reference, train_alone

from springtide.checkpoint import names, restore
from springtide.checkpoint.storage import Storage
from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 7,
    "pace": 0.02,
    "optimizer": "adam",
    "lr": 0.003,
    "hidden": 96,
}
# 32 steps, where whoever is lost is so by a step in the first half of them.
SHORT = {"epochs": 4}
ENVIRONMENT = {"SPRINGTIDE_SHARD": "Optimizer"}
ALL_AGAIN = "all shards are at two workers again"
"""A line of a worker's log."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(**settings: Any) -> WorkerCluster:
        options = OPTIONS | settings.pop("options", {})
        environment = ENVIRONMENT | settings.pop("environment", {})
        return new_cluster(options, environment=environment, **settings)

    return make


@pytest.fixture(scope="module")
def reference_of(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Return the undisturbed run in one process with some other options."""
    known: dict[str, Reference] = {}

    def run(**options: Any) -> Reference:
        key = str(options)
        if key not in known:
            known[key] = train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS | options)
        return known[key]

    return run


METRICS_PORT = 9400
WHOLE = 2 * 4 * (13 * 96 + 97 * 96 + 97 * 3)
"""Bytes of Adam's two moments of all parameters."""


def check_metrics(workers: list[Worker]) -> None:
    """Find two copies of the optimizer's state in what workers say of theirs, and one wait for each step."""
    held = []
    for worker in workers:
        with urllib.request.urlopen(f"http://{worker.address}:{METRICS_PORT}/metrics", timeout=10) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        own = {sample.name: sample.value for family in families for sample in family.samples}
        held.append(own["springtide_worker_optimizer_bytes"])
        assert own["springtide_worker_values_seconds_count"] == own["springtide_worker_steps_total"] >= 5
        assert own["springtide_worker_values_seconds_sum"] > 0
    # Besides the moments, each piece has its own count of steps.
    assert 2 * WHOLE < sum(held) < 2.1 * WHOLE
    assert max(held) < 0.75 * WHOLE


@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_undisturbed_equals_one_process(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], shard: str
) -> None:
    environment = {"SPRINGTIDE_SHARD": shard, "SPRINGTIDE_METRICS_PORT": str(METRICS_PORT)}
    cluster = make_cluster(options={"pace": 0.0, **SHORT}, environment=environment)
    workers = cluster.start(3)
    cluster.until_step(5)
    check_metrics(workers)
    cluster.until_done()
    check(cluster, reference_of(**SHORT), workers)
    assert all("of optimizer state" in worker.log() for worker in workers)


POINTS = (
    "body",
    "backward",
    "gradients",
    "pushed",
    "prepared",
    "reduced",
    "stepping",
    "stepped",
    "committed",
)
"""The points of a step in their order."""
MANY_CHUNKS = {"SPRINGTIDE_SHARDS_UNDER_WAY_MIB": "0.004"}
"""Memory for what is on its way, so little that a large layer leaves in several exchanges."""


KINDS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "None": ({}, tuple(point for point in POINTS if point not in ("pushed", "prepared"))),
    "Optimizer": ({}, (*POINTS, "gathering")),
    "Gradients": (MANY_CHUNKS, (*POINTS, "gathering")),
}
"""More of the environment, and the points that a step has, by `shard`."""
KILLS = 10


def through_ten_kills(cluster: WorkerCluster, points: Sequence[str]) -> list[Worker]:
    """Train with three workers, of which one dies at each point in turn and another comes.

    Args:
        cluster: Not begun.
        points: Begun anew when all had their turn.

    Returns:
        Those that are there at the end.
    """
    turns = list(itertools.islice(itertools.cycle(points), KILLS))
    first, second, _ = cluster.start(3, faults={2: f"{turns[0]}:3:kill"})
    for point, following in zip(turns, (*turns[1:], ""), strict=True):
        cluster.until(lambda: not cluster.workers[-1].running, f"the death at {point}")
        assert cluster.workers[-1].code == -9
        step = first.commits()[-1]["step"] + 4  # not the first one of the process that comes
        cluster.add(f"{following}:{step}:kill" if following else "")
    cluster.until_done()
    assert sum(worker.code == -9 for worker in cluster.workers) == KILLS
    return [first, second, cluster.workers[-1]]


def curve_of(workers: list[Worker]) -> dict[int, float]:
    """Return the loss of each step; whoever has committed it says the same."""
    said: dict[int, set[float]] = {}
    for commit in itertools.chain.from_iterable(worker.commits() for worker in workers):
        said.setdefault(commit["step"], set()).add(commit["values"]["loss"])
    assert {len(losses) for losses in said.values()} == {1}
    return {step: next(iter(losses)) for step, losses in said.items()}


@pytest.fixture(scope="module")
def curve_through_ten_kills(
    zygote: Zygote, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[int, float]]:
    """Return the losses of a job with this `shard` that ten kills disturb; one job of each."""
    known: dict[str, dict[int, float]] = {}

    def run(shard: str) -> dict[int, float]:
        if shard not in known:
            more, points = KINDS[shard]
            environment = {"SPRINGTIDE_SHARD": shard, **more}
            folder = tmp_path_factory.mktemp(f"kills-{shard}")
            cluster = WorkerCluster(zygote, folder, OPTIONS, environment=environment)
            try:
                check(cluster, reference, through_ten_kills(cluster, points), 1e-6)
                known[shard] = curve_of(cluster.workers)
            finally:
                cluster.close()
        return known[shard]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_losses_through_ten_kills(
    curve_through_ten_kills: Callable[[str], dict[int, float]], reference: Reference, shard: str
) -> None:
    """One of three dies at each point of a step in turn: nothing is read, nobody goes back, and all losses
    are those of a job without shards that has ten kills, too, and those of one process.
    """
    sharded, whole = curve_through_ten_kills(shard), curve_through_ten_kills("None")
    assert sharded.keys() == whole.keys() == reference.losses.keys()
    for step, loss in whole.items():
        assert sharded[step] == pytest.approx(loss, rel=0, abs=1e-5), f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["gathering", "filling", "formed", "transfer"])
def test_killed_between_steps_and_generations(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], point: str
) -> None:
    """One dies when values are waited for, another one when the shards of the first are filled."""
    cluster = make_cluster(options=SHORT)
    first, second, third, victim = cluster.start(
        4, faults={3: f"{point}:*:kill" if point == "gathering" else ""}
    )
    if point == "gathering":
        cluster.until(lambda: not victim.running, "the death")
    else:
        cluster.until_step(5)
        joiner = cluster.add(fault=f"{point}:*:kill")
        cluster.until(lambda: not joiner.running, f"the death at {point}")
    last = cluster.add()
    cluster.until_done()
    check(cluster, reference_of(**SHORT), [first, second, third, last])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_second_copies_are_made_while_training_goes_on(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, shard: str
) -> None:
    """One of four dies, and another one when all shards are at two workers again: nothing is read."""
    cluster = make_cluster(
        options={"pace": 0.03},
        environment={"SPRINGTIDE_SHARD": shard, "SPRINGTIDE_SHARDS_AT_ONCE_MIB": "0"},
    )
    first, second, third, victim = cluster.start(4)
    cluster.until_step(4)
    victim.kill()
    cluster.until(
        lambda: all(ALL_AGAIN in worker.log() for worker in (first, second, third)), "second copies"
    )
    assert "get their second copy while training goes on" in first.log()
    third.kill()
    cluster.until(lambda: first.log().count(ALL_AGAIN) > 1, "second copies of what the other had")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [first, second, joiner])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "shard"),
    [
        ("stepped:6", "Optimizer"),
        ("gathering:7", "Gradients"),
        ("filling:7", "Optimizer"),
        ("reduced:7", "Gradients"),
    ],
)
def test_killed_while_second_copies_are_made(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], point: str, shard: str
) -> None:
    """One of four dies, and the one that shares no shard with it before all others have a second copy."""
    cluster = make_cluster(
        options=SHORT,
        environment={"SPRINGTIDE_SHARD": shard, "SPRINGTIDE_SHARDS_AT_ONCE_MIB": "0", **MANY_CHUNKS},
    )
    first, second, third, victim = cluster.start(4, faults={1: f"{point}:kill", 3: "committed:5:kill"})
    cluster.until(lambda: not victim.running and not second.running, "both deaths")
    cluster.until_done()
    assert (victim.code, second.code) == (-9, -9)
    check(cluster, reference_of(**SHORT), [first, third])
    for worker in (first, third):
        _, _, lost, again, *more = worker.log().split(FORMED)
        assert not more, "a generation of its own"
        assert "get their second copy while training goes on" in lost
        assert ALL_AGAIN not in lost
        assert ALL_AGAIN in again
        assert "are lost" not in again
    steps = [commit["step"] for commit in first.commits()]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 3])
def test_script_that_repeats_backward_loses_one_step_at_most(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], split: int
) -> None:
    """Gradients leave in a process's first backward already; who joins knows from the others to wait."""
    cluster = make_cluster(
        options={"backwards": 2, "split": split, **SHORT},
        environment={"SPRINGTIDE_SHARD": "Gradients"},
    )
    first, second, victim = cluster.start(3)
    cluster.until_step(6)
    victim.kill()
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference_of(**SHORT), [first, second, joiner])
    assert "another backward() of the same samples" in cluster.logs()
    assert "another backward() of the same samples" not in joiner.log()


AVERAGE = {"average": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "shard"),
    [("gathering:6", "Optimizer"), ("gathering:9", "Gradients"), ("stepped:6", "Gradients")],
)
def test_average_of_weights_survives_a_kill(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], point: str, shard: str
) -> None:
    """One dies as it waits for the values that its average reads, while others wait for values of its own."""
    cluster = make_cluster(options=AVERAGE | SHORT, environment={"SPRINGTIDE_SHARD": shard})
    first, second, victim = cluster.start(3, faults={2: f"{point}:kill"})
    cluster.until(lambda: not victim.running, f"the death at {point}")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference_of(**AVERAGE, **SHORT), [first, second, joiner])


@pytest.mark.slow
def test_grows_from_one_and_shrinks_to_three(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"epochs": 7, "pace": 0.04})
    (first,) = cluster.start(1)
    cluster.until_step(3)
    joined = [cluster.add() for _ in range(7)]
    cluster.until(lambda: all(worker.commits() for worker in joined), "all of them to train")
    for worker in [first, *joined[3:]]:
        worker.terminate()
    cluster.until_done()
    check(cluster, reference, joined[:3])
    assert not any("restored" in worker.log() for worker in joined)
    assert "leave" in joined[0].log()


def test_two_lost_at_once_that_share_no_shard(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference]
) -> None:
    cluster = make_cluster(options=SHORT)
    workers = cluster.start(4)
    cluster.until_step(6)
    for worker in (workers[0], workers[2]):
        worker.kill()
    cluster.until_done()
    check(cluster, reference_of(**SHORT), [workers[1], workers[3]])


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_one_lost_while_another_leaves_loses_nothing(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference], shard: str
) -> None:
    """Keep a leaver, which alone has what the lost one held, too, until it has handed that over."""
    cluster = make_cluster(options=SHORT, environment={"SPRINGTIDE_SHARD": shard})
    first, leaver, victim = cluster.start(3)
    cluster.until_step(5)
    leaver.terminate()
    victim.kill()
    cluster.until_done()
    assert isinstance(leaver.outcome(), outcome.Left)
    check(cluster, reference_of(**SHORT), [first])


@pytest.mark.slow
def test_coordinator_killed_then_a_worker(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference]
) -> None:
    cluster = make_cluster(options=SHORT)
    workers = cluster.start(3)
    cluster.until_step(6)
    cluster.kill_coordinator()
    workers[0].kill()
    cluster.start_coordinator()
    cluster.until_done()
    check(cluster, reference_of(**SHORT), workers[1:])


def test_one_killed_after_the_other_until_one_holds_all(
    make_cluster: Callable[..., WorkerCluster], reference_of: Callable[..., Reference]
) -> None:
    cluster = make_cluster(options=SHORT)
    workers = cluster.start(4)
    for number, worker in enumerate(workers[:3]):
        cluster.until_step(5 + 4 * number, workers[3])
        worker.kill()
    cluster.until_done()
    check(cluster, reference_of(**SHORT), workers[3:])


def saving(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "volume").mkdir()
    return {
        "SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"),
        "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1",
    }


def saved_steps(tmp_path: Path) -> list[int]:
    storage = Storage(str(tmp_path / "volume"), "default-test-alone")
    return [state.step for name in restore.candidates(storage) if (state := names.parse(name))]


@pytest.mark.slow
def test_owner_and_buddy_lost_goes_back_in_the_same_processes(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster = make_cluster(environment=saving(tmp_path))
    workers = cluster.start(4)
    cluster.until(lambda: saved_steps(tmp_path)[:1] >= [6], "a checkpoint")
    for worker in workers[:2]:
        worker.kill()
    cluster.until_done()
    check(cluster, reference, workers[2:])
    assert all("restored" in worker.log() for worker in workers[2:])
    assert "both that held them are lost" in cluster.logs()
    assert cluster.reply is not None
    assert cluster.reply.states_lost == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("Optimizer", "None"), ("None", "Optimizer"), ("Optimizer", "Optimizer")]
)
def test_checkpoint_is_restored_at_another_size(
    make_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    """A job without shards restores that of one in shards, and the other way."""
    cluster = make_cluster(environment=saving(tmp_path) | {"SPRINGTIDE_SHARD": first})
    workers = cluster.start(3)
    cluster.until(lambda: saved_steps(tmp_path)[:1] >= [8], "a checkpoint")
    for worker in workers:
        worker.kill()
    cluster.until_done()
    # A job's sharding never changes; another job begins from the checkpoint of this one.
    cluster.kill_coordinator()
    cluster.environment["SPRINGTIDE_SHARD"] = second
    cluster.start_coordinator()
    newest = saved_steps(tmp_path)[0]
    others = [cluster.add() for _ in range(2)]
    cluster.until_done()
    check(cluster, reference, others)
    assert min(worker.commits()[0]["step"] for worker in others) == newest + 1
    # Whoever is slow to come gets shards from the other one, which has read the checkpoint alone.
    assert any("shards are kept" in worker.log() for worker in others) == (first == second)


MASTERS = {"masters": True, "lr": 0.001}
BFLOAT16 = 0.02
"""Gradients are computed in bfloat16, by each worker from its part of the samples."""


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["Optimizer", "Gradients"])
def test_masters_of_16_bit_parameters_survive_a_kill(
    make_cluster: Callable[..., WorkerCluster],
    reference_of: Callable[..., Reference],
    shard: str,
) -> None:
    """One dies between a step's vote and its result; another comes, and gets masters with its shards."""
    cluster = make_cluster(options=MASTERS | SHORT, environment={"SPRINGTIDE_SHARD": shard})
    first, second, victim = cluster.start(3, faults={2: "reduced:6:kill"})
    cluster.until(lambda: not victim.running, "the death")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference_of(**MASTERS, **SHORT), [first, second, joiner], BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("Optimizer", "None"), ("None", "Gradients")])
def test_masters_are_restored_with_shards_and_without(
    make_cluster: Callable[..., WorkerCluster],
    reference_of: Callable[..., Reference],
    tmp_path: Path,
    first: str,
    second: str,
) -> None:
    cluster = make_cluster(options=MASTERS, environment=saving(tmp_path) | {"SPRINGTIDE_SHARD": first})
    workers = cluster.start(3)
    cluster.until(lambda: saved_steps(tmp_path)[:1] >= [8], "a checkpoint")
    for worker in workers:
        worker.kill()
    cluster.until_done()
    cluster.kill_coordinator()
    cluster.environment["SPRINGTIDE_SHARD"] = second
    cluster.start_coordinator()
    newest = saved_steps(tmp_path)[0]
    others = [cluster.add() for _ in range(2)]
    cluster.until_done()
    check(cluster, reference_of(**MASTERS), others, BFLOAT16)
    assert min(worker.commits()[0]["step"] for worker in others) == newest + 1


@pytest.mark.slow
def test_member_joins_after_a_restore_finds_all_shards(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """A generation that begins from a checkpoint has a name that does not say the step."""
    cluster = make_cluster(environment=saving(tmp_path))
    workers = cluster.start(2)
    cluster.until(lambda: saved_steps(tmp_path)[:1] >= [8], "a checkpoint")
    for worker in workers:
        worker.kill()
    cluster.until_done()
    first = cluster.add()
    cluster.until(lambda: len(first.commits()) > 2, "steps after the restore")
    second = cluster.add()
    cluster.until_done()
    check(cluster, reference, [first, second])
    assert "are lost" not in cluster.logs()


@pytest.mark.slow
def test_worker_without_samples_holds_no_evaluation_up(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    """One worker evaluates all samples there are, with parameters that others step."""
    script = Path(__file__).parents[2] / "support" / "worker_evaluation_script.py"
    options = {"epochs": 2, "held_out": 8, "deeper": 120}
    environment = ENVIRONMENT | {"SPRINGTIDE_BUCKET_MIB": "0.001"}
    cluster = new_cluster(options, script=script, environment=environment)
    workers = cluster.start(3)
    cluster.until_done()
    assert all(worker.code == 0 for worker in workers), cluster.logs()
    assert len({str(worker.result()) for worker in workers}) == 1


@needs_cuda("shards")
def test_on_one_device_through_the_host(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """Two processes on one device, whose exchanges gloo takes through the host; one is lost, one joins."""
    device = {"options": {"device": "cuda"}, "environment": {"SPRINGTIDE_BACKEND": "Gloo"}}
    lose_one_and_add_one(make_cluster(**device), reference)


@needs_cuda("shards", devices=2)
def test_between_devices(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    """Exchanges of NCCL; the one that joins has the device of the one that is lost."""
    lose_one_and_add_one(make_cluster(options={"device": "cuda by slot"}), reference)


def lose_one_and_add_one(cluster: WorkerCluster, reference: Reference) -> None:
    first, victim = cluster.start(2)
    cluster.until_step(6, first)
    victim.kill()
    cluster.until(lambda: not victim.running, "the death")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [first, joiner])
