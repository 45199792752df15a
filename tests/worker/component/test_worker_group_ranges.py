"""Jobs whose workers are in groups that do not wait for each other: ranges that count once, whoever dies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from halt import Halt
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference
from worker_results import check_as_good, commits
from worker_switches import FREE, TOGETHER, gate, to_and_fro

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 5, "pace": 0.005, "clip_norm": 0.5}
STEPS = 40
CLOSE = pb.Consistency(mode="BoundedStaleness", staleness=1)
TOP_K = {"SPRINGTIDE_COMPRESSION": "TopK", "SPRINGTIDE_TOP_K_RATIO": "0.4"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(first: pb.Consistency, replication: int = 1, **options: Any) -> WorkerCluster:
        environment = {
            "SPRINGTIDE_CONSISTENCY": first.mode,
            "SPRINGTIDE_STALENESS": str(first.staleness or 4),
            "SPRINGTIDE_GROUP_SIZE": "2",
        } | options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, 2, replication, environment=environment)

    return make


def steps(worker: Worker) -> list[int]:
    return [commit["step"] for commit in worker.commits()]


def since(size: int, worker: Worker) -> str:
    """Return the worker's log since it was in a generation of this size."""
    return worker.log().rpartition(f" of {size}, state")[2]


def knows(log: str) -> bool:
    """Return whether the log shows that all members stop now.

    The word comes from the coordinator, or from the member that speaks for its worker group.
    """
    return "asked to stop" in log or "waiting for the next generation" in log


def put(held: Path) -> None:
    """Have those who wait for this file to go find it whole."""
    new = held.with_suffix(".new")
    new.write_text("120")
    new.rename(held)


@pytest.mark.slow
def test_two_groups_share_the_ranges_out(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster, halt = make_cluster(FREE, model="norm", scaler=True, infinite=77), Halt(tmp_path)
    a, b, c, d = cluster.start(4, faults={1: halt.at("committed:*")})
    cluster.until(lambda: halt.reached() and len(c.commits()) > 2, "ranges of both groups")
    halt.go()
    cluster.until_done()
    check_as_good(cluster, [a, b, c, d], reference, OPTIONS, "norm")
    assert steps(a) == steps(b)
    assert steps(c) == steps(d)
    assert sorted(steps(a) + steps(c)) == list(range(1, STEPS + 1))
    # Two of one group see alike that a gradient is not finite, and it counts once.
    assert [result["audit"]["skipped"] for worker in (a, c) if (result := worker.result())] == [2, 2]


@pytest.mark.slow
def test_members_are_killed_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """Also those that speak for their group, and with what they had been told by another one."""
    points = ["leasing", "backward", "reduced", "stepped", "committed", "meeting"]
    cluster = make_cluster(CLOSE, scaler=True, infinite=77, environment={"SPRINGTIDE_COMPRESSION": "BF16"})
    # The bound keeps the others from getting to the end before all of them are gone.
    faults = {number: f"{point}:*:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * len(points), cluster.logs()
    check_as_good(cluster, [steady], reference, OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("replication", [1, 2])
def test_who_speaks_for_a_group_is_killed_between_its_pushes(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, replication: int
) -> None:
    """Some chunks have its range; another group takes it, and these count it no second time."""
    cluster = make_cluster(CLOSE, replication)
    a, b, c, d = cluster.start(4, faults={2: "pushing:*:kill"})
    cluster.until_done()
    assert [worker.code for worker in (a, b, c, d)] == [0, 0, -9, 0], cluster.logs()
    check_as_good(cluster, [a, b, d], reference, OPTIONS)
    # Its group's other member may have written that range down, and so have those that did it again.
    assert set(steps(a)) | set(steps(d)) == set(range(1, STEPS + 1))


@pytest.mark.slow
def test_no_group_is_further_ahead_than_the_bound(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """One worker stands in its first range, and so does its group."""
    cluster, halt = make_cluster(CLOSE), Halt(tmp_path)
    a, b, c, d = cluster.start(4, faults={3: halt.at("backward:*")})
    cluster.until(lambda: halt.reached() and bool(a.commits()), "the other group's step", slowly=False)
    halt.go()
    cluster.until_done()
    check_as_good(cluster, [a, b, c, d], reference, OPTIONS)
    made = sorted((commit["time"], worker.name) for worker in (a, c) for commit in worker.commits())
    count, ahead = Counter[str](), []
    for _, name in made:
        count[name] += 1
        ahead.append(count[a.name] - count[c.name])
    assert max(ahead) == 1
    assert min(ahead) >= -1


@pytest.mark.slow
def test_workers_come_and_go(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """Teams are made anew: the one that is alone gets a member, and who speaks for the first one leaves."""
    held = tmp_path / "held"
    standing = f"body:*:hold={held}"  # while that file is there
    cluster = make_cluster(CLOSE, model="norm", environment=TOP_K)
    a, b, c = cluster.start(3, faults=dict.fromkeys(range(3), standing))
    cluster.until(lambda: bool(commits(cluster)[4]), "some ranges")
    put(held)
    d = cluster.add(fault=standing)
    cluster.until(lambda: all(knows(since(3, w)) for w in (a, b, c)), "the word to three")
    held.unlink()
    cluster.until(lambda: bool(d.commits()), "the joiner's first range")
    put(held)
    a.terminate()
    cluster.until(lambda: all(knows(since(4, w)) for w in (a, b, c, d)), "the word to four")
    held.unlink()
    cluster.until_done()
    assert isinstance(a.outcome(), outcome.Left), cluster.logs()
    check_as_good(cluster, [b, c, d], reference, OPTIONS, "norm")
    assert set(commits(cluster)) == set(range(1, STEPS + 1))


@pytest.mark.slow
def test_other_groups_go_on_from_a_checkpoint_of_an_epochs_end(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """All of four are killed in the fourth epoch, and three go on."""
    (tmp_path / "volume").mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.05"}
    held = gate(tmp_path / "gate", 28)
    cluster = make_cluster(FREE, environment=place, model="norm", scaler=True, infinite=77)
    first = cluster.start(4, faults=dict.fromkeys(range(4), held))
    cluster.minimum, now = 3, time.monotonic()  # those who come later begin together
    cluster.until(lambda: cluster.asked_at > now, "the operator's next call")
    cluster.until(lambda: bool([*(tmp_path / "volume").rglob("manifest.json")]), "a checkpoint")
    for worker in first:
        worker.kill()
    again = [cluster.add() for _ in range(3)]
    cluster.until_done()
    assert [worker.code for worker in first] == [-9] * 4
    check_as_good(cluster, again, reference, OPTIONS, "norm")
    later = {step for worker in again for step in steps(worker)}
    assert len(later) < STEPS
    assert (STEPS - len(later)) % 8 == 0
    assert later == set(range(STEPS - len(later) + 1, STEPS + 1))
    # Those before the checkpoint are in it.
    assert [result["audit"]["skipped"] for worker in again if (result := worker.result())] == [2] * 3


@pytest.mark.slow
def test_common_steps_end_and_begin_again_at_a_killed_server(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster = make_cluster(TOGETHER, 2, scaler=True)
    workers = to_and_fro(cluster, tmp_path, 4, each=2, steps=STEPS)
    check_as_good(cluster, workers, reference, OPTIONS)
