"""Jobs whose workers do not step together: real processes, ranges that count once, and a model as good as the
synchronous one's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from halt import Halt
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone
from worker_results import check_as_good, commits, reply

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7, "pace": 0.015, "clip_norm": 0.5}
PER_EPOCH = 8
STEPS = 56

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(consistency: str, servers: int = 2, replication: int = 1, **options: Any) -> WorkerCluster:
        environment = {"SPRINGTIDE_CONSISTENCY": consistency} | options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, servers, replication, environment=environment)

    return make


def check(cluster: WorkerCluster, members: list[Worker], reference: Reference, kind: str = "plain") -> None:
    check_as_good(cluster, members, reference, OPTIONS, kind)
    # A commit is a push of a range; some are done again by others. Ranges before a restart are in it as well.
    # Who is killed between the push and the note of it has no such line.
    unnoted = set(range(1, STEPS + 1)) - set(commits(cluster))
    assert len(unnoted) <= sum(worker.code == -9 for worker in cluster.workers)


def test_workers_share_the_ranges_out(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster, halt = make_cluster("Asynchronous"), Halt(tmp_path)
    first, second = cluster.start(2, faults={0: halt.at("committed:*")})
    cluster.until(lambda: halt.reached() and len(second.commits()) > 2, "ranges of both")
    halt.go()
    cluster.until_done()
    check(cluster, [first, second], reference)
    assert set(commits(cluster).values()) == {1}


def test_workers_are_killed_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    points = ["body", "backward", "gradients", "stepping", "stepped", "committed"]
    sixteen_bits = {"SPRINGTIDE_COMPRESSION": "BF16"}
    cluster = make_cluster("BoundedStaleness", pace=0.01, environment=sixteen_bits, scaler=True, infinite=77)
    # The bound keeps the steady one from getting to the end before all of them are gone.
    faults = {
        number: f"body:*:sleep={0.2 * number};{point}:*:kill" for number, point in enumerate(points, start=1)
    }
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done()
    assert [worker.code for worker in victims] == [-9] * len(points)
    check(cluster, [steady], reference)
    result = steady.result()
    assert result is not None
    # Whoever had it, and whoever took it over.
    assert result["audit"]["skipped"] == 2


@pytest.mark.slow
def test_two_optimizers_with_a_scaler_while_workers_are_killed(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """Two optimizers with a scaler lose and repeat no batch when workers are killed in the middle of a push.

    A push that was answered for some chunks is completed in the others by the worker that takes its batch
    over.
    """
    (tmp_path / "alone").mkdir()
    reference = train_alone(zygote, tmp_path / "alone", OPTIONS | {"two": True})
    points = ["gradients", "stepped", "stepping", "committed"]
    cluster = make_cluster("BoundedStaleness", pace=0.01, two=True, scaler=True, infinite=77)
    # The bound keeps the steady one from getting to the end before all of them are gone.
    faults = {number: f"{point}:*:kill" for number, point in enumerate(points, start=1)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done(seconds=90)
    assert [worker.code for worker in victims] == [-9] * len(points)
    check(cluster, [steady], reference)
    result = steady.result()
    assert result is not None
    assert result["audit"]["skipped"] == 2


@pytest.mark.slow
def test_servers_and_the_coordinator_are_killed(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster("Asynchronous", pace=0.04, model="norm")
    workers = cluster.start(2)
    cluster.until_step(6)
    cluster.kill_coordinator()
    before = len(workers[0].commits())
    cluster.until(lambda: len(workers[0].commits()) > before + 3, "steps without a coordinator")
    cluster.start_coordinator(same_pod=True)
    cluster.servers[0].kill()  # of which nobody has a copy, but for the workers' own pulls
    cluster.add_server(0)
    joiner = cluster.add()
    cluster.until(lambda: bool(joiner.commits()), "the joiner's first step")
    workers[1].terminate()
    cluster.until_done()
    assert isinstance(workers[1].outcome(), outcome.Left)
    check(cluster, [workers[0], joiner], reference, "norm")


@pytest.mark.slow
def test_all_workers_gone_epoch_end_checkpoint_brings_them_back(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1"}
    cluster = make_cluster("Asynchronous", pace=0.04, environment=place, scaler=True, infinite=77)
    first = cluster.start(2)
    cluster.until(lambda: bool([*(tmp_path / "volume").rglob("manifest.json")]), "a checkpoint")
    for worker in first:
        worker.kill()
    again = [cluster.add(), cluster.add()]
    cluster.until_done()
    check(cluster, again, reference)
    later = {commit["step"] for worker in again for commit in worker.commits()}
    assert len(later) < STEPS
    assert (STEPS - len(later)) % PER_EPOCH == 0
    assert later == set(range(STEPS - len(later) + 1, STEPS + 1))
    # Those before the checkpoint are in it.
    assert [result["audit"]["skipped"] for worker in again if (result := worker.result())] == [2, 2]


@pytest.mark.slow
def test_killed_server_with_copies_causes_no_repeated_work(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    # Copies get what was selected, too.
    top_k = {"SPRINGTIDE_COMPRESSION": "TopK", "SPRINGTIDE_TOP_K_RATIO": "0.4"}
    cluster = make_cluster("Asynchronous", replication=2, pace=0.04, environment=top_k)
    workers = cluster.start(2)
    for slot, step in ((0, 5), (1, 25)):
        cluster.until(lambda wanted=step: len(commits(cluster)) >= wanted, f"{step} steps")
        cluster.until_settled()
        victim = next(s for s in cluster.servers if s.slot == slot and s.running)
        victim.kill()
        cluster.add_server(slot)
        cluster.until(lambda gone=victim: not gone.running, "the server's death")
    cluster.until_done()
    check(cluster, workers, reference)
    assert set(commits(cluster).values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("replication", [1, 2])
def test_a_server_is_killed_between_offers_and_their_push(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path, replication: int
) -> None:
    """A server that is killed between early pushes and the push that names them costs no batch.

    The worker with batch 12 pushes all its gradients early, and then waits before the push until a server is
    gone.
    """
    gate, inside = tmp_path / "gate", tmp_path / "inside"
    gate.write_text("120")  # seconds at most
    cluster = make_cluster("Asynchronous", replication=replication, pace=0.01)
    waits = f"stepping:12:mark={inside};stepping:12:hold={gate}"
    workers = cluster.start(2, faults={0: waits, 1: waits})
    cluster.until(inside.exists, "somebody before the push of range 12", slowly=False)
    victim = cluster.servers[0]
    victim.kill()
    cluster.until(lambda: not victim.running, "the server's death", slowly=False)
    cluster.add_server(0)
    gate.unlink()
    cluster.until_done()
    check(cluster, workers, reference)
    if replication == 2:
        assert set(commits(cluster).values()) == {1}


def test_the_fastest_worker_is_never_too_far_ahead(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster = make_cluster("BoundedStaleness", pace=0.01, environment={"SPRINGTIDE_STALENESS": "3"})
    halt = Halt(tmp_path)
    # After that, too, the fast one would have the time for more.
    fast, slow = cluster.start(2, faults={1: f"{halt.at('backward:*')};backward:*:sleep=0.5"})
    cluster.until(lambda: halt.reached() and len(fast.commits()) > 2, "the fast one's wait for the slow one")
    halt.go()
    cluster.until_done()
    check(cluster, [fast, slow], reference)
    begun = sorted((commit["time"], worker.name) for worker in (fast, slow) for commit in worker.commits())
    steps = Counter[str]()
    ahead = []
    for _, name in begun:
        steps[name] += 1
        ahead.append(steps[fast.name] - steps[slow.name])
    assert max(ahead) == 3


@pytest.mark.slow
@pytest.mark.parametrize("hears", ["before it meets nobody", "after it met nobody"])
def test_worker_stops_while_another_waits_at_the_epoch_end(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path, hears: str
) -> None:
    """One of two hears that all shall stop, while it waits for a range; the other one, which hears of it
    later, finishes the epoch's last range, and finds the epoch over and nobody to meet.
    """
    first_waits, second_waits = tmp_path / "first", tmp_path / "second"
    last_range, in_last_range = tmp_path / "last-range", tmp_path / "in-last-range"
    unheard, asked = tmp_path / "unheard", tmp_path / "asked-for-a-range"
    unmet, at_the_end = tmp_path / "unmet", tmp_path / "at-the-end"
    for hold in (first_waits, second_waits, last_range, unheard, unmet):
        hold.write_text("120")
    cluster = make_cluster("Asynchronous", pace=0)
    faults = {
        0: f"committed:*:hold={first_waits};asked:*:hold={unheard};"
        f"body:{PER_EPOCH}:mark={in_last_range};body:{PER_EPOCH}:hold={last_range};"
        f"meeting:{PER_EPOCH + 1}:mark={at_the_end};meeting:{PER_EPOCH + 1}:hold={unmet}",
        1: f"committed:*:hold={second_waits};leasing:*:mark={asked}",
    }
    first, second = cluster.start(2, faults=faults)
    cluster.until(lambda: bool(first.commits() and second.commits()), "a range of each")
    first_waits.unlink()
    cluster.until(in_last_range.exists, "the first one in the epoch's last range")
    asked.unlink()
    second_waits.unlink()
    cluster.until(asked.exists, "the second one's wait for a range")
    second.leave_by = time.time() + 600  # late enough: nobody but the second one ends the first one's wait
    cluster.until(lambda: "(BOUNDARY: " in second.log(), "the second one's stop")
    last_range.unlink()
    cluster.until(at_the_end.exists, "the first one at the epoch's end")
    if hears == "after it met nobody":
        unmet.unlink()
        cluster.until(lambda: "why a peer has gone" in first.log(), "the first one to miss the second one")
    unheard.unlink()
    cluster.until(lambda: "asked to stop" in first.log(), "the first one to hear of it")
    unmet.unlink(missing_ok=True)
    cluster.until_done()
    assert isinstance(second.outcome(), outcome.Left)
    check(cluster, [first], reference)
    assert commits(cluster) == Counter(range(1, STEPS + 1))
    # That nobody was there is no failure of the one that left.
    assert "REDUCTION_FAILED" not in first.log(), cluster.logs()


def test_manifest_changes_bound_and_mode_of_a_running_job(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """A running job takes another staleness bound and another mode from its manifest.

    The worker with batch 20, and later the one with batch 40, waits in its body until it has heard of the
    change.
    """
    gates = {20: tmp_path / "first", 40: tmp_path / "second"}
    for gate in gates.values():
        gate.write_text("60")  # seconds at most

    def faults(name: str) -> str:
        marks = [f"body:{step}:mark={tmp_path / f'{name}-{step}'}" for step in gates]
        return ";".join([*marks, *(f"body:{step}:hold={gate}" for step, gate in gates.items())])

    cluster = make_cluster("Asynchronous", pace=0.01)
    workers = cluster.start(2, faults={0: faults("worker-0"), 1: faults("worker-1")})

    def held(step: int) -> list[Worker]:
        return [worker for worker in workers if (tmp_path / f"{worker.name}-{step}").exists()]

    pids = [worker.pid for worker in workers]
    edits = [pb.Consistency(mode="BoundedStaleness", staleness=2), pb.Consistency(mode="Asynchronous")]
    for (step, gate), wanted in zip(gates.items(), edits, strict=True):
        cluster.until(lambda step=step: step - 10 in commits(cluster), f"step {step - 10}", slowly=False)
        assert reply(cluster).consistency.mode == cluster.consistency.mode
        cluster.until(lambda step=step: held(step), f"somebody in range {step}", slowly=False)
        (waits,) = held(step)
        heard = waits.log().count("asked to stop")
        cluster.consistency = wanted
        cluster.until(lambda heard=heard: waits.log().count("asked to stop") > heard, "its boundary")  # noqa: B023
        gate.unlink()
        cluster.until(lambda wanted=wanted: reply(cluster).consistency == wanted, "the change")
    cluster.until_done()
    check(cluster, workers, reference)
    assert set(commits(cluster).values()) == {1}
    assert [worker.pid for worker in workers] == pids
    assert len(cluster.workers) == 2


def test_worker_and_coordinator_killed_while_edit_takes_effect(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """One has stopped and the other one is held in a range, until a new coordinator knows of both."""
    gate, inside = tmp_path / "gate", tmp_path / "inside"
    gate.write_text("120")  # seconds at most
    cluster = make_cluster("BoundedStaleness", pace=0.01, environment={"SPRINGTIDE_STALENESS": "2"})
    waits = f"body:9:mark={inside};body:9:hold={gate}"
    first, second = cluster.start(2, faults={0: waits, 1: waits})
    cluster.until(inside.exists, "somebody in range 9", slowly=False)
    wanted = pb.Consistency(mode="Asynchronous")
    cluster.consistency = wanted
    cluster.until(lambda: reply(cluster).reason == "Parking", "the other one's stop", slowly=False)
    cluster.kill_coordinator()
    cluster.start_coordinator(same_pod=True)
    cluster.until(
        lambda: reply(cluster).incarnation.restart == 1 and reply(cluster).reason == "Parking",
        "a new coordinator that knows who has stopped",
        slowly=False,
    )
    assert reply(cluster).consistency == pb.Consistency(mode="BoundedStaleness", staleness=2)
    second.kill()
    gate.unlink()
    cluster.until(lambda: reply(cluster).consistency == wanted, "the change", slowly=False)
    cluster.until_done()
    check(cluster, [first], reference)
