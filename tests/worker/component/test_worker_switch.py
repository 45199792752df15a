"""Running jobs that go over between common steps and ranges: real workers and servers, the same processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_cluster import WorkerCluster
from worker_reference import Reference
from worker_results import check_as_good, commits, reply
from worker_switches import ENDS, FREE, TOGETHER, gate, to_and_fro

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 5, "pace": 0.01, "clip_norm": 0.5}
STEPS = 40
TOP_K = {"SPRINGTIDE_TOP_K_RATIO": "0.4"}
BOUNDED = pb.Consistency(mode="BoundedStaleness", staleness=2)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_server_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(first: pb.Consistency, replication: int = 1, **options: Any) -> WorkerCluster:
        named = {"SPRINGTIDE_CONSISTENCY": first.mode, "SPRINGTIDE_STALENESS": str(first.staleness or 4)}
        environment = named | options.pop("environment", {})
        return new_server_cluster(OPTIONS | options, 2, replication, environment=environment)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("replication", "wanted"), [(1, FREE), (2, BOUNDED)])
def test_common_steps_end_in_the_middle_of_an_epoch(
    make_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    tmp_path: Path,
    replication: int,
    wanted: pb.Consistency,
) -> None:
    cluster = make_cluster(TOGETHER, replication, model="norm")
    held = gate(tmp_path / "gate", 12)
    workers = cluster.start(2, faults={0: held, 1: held})
    cluster.until_step(11)
    assert reply(cluster).consistency == TOGETHER
    cluster.consistency = wanted
    cluster.until(lambda: "asked to stop" in workers[0].log(), "the boundary")
    (tmp_path / "gate").unlink()
    cluster.until(lambda: reply(cluster).consistency == wanted, "the change")
    cluster.until_done()
    check_as_good(cluster, workers, reference, OPTIONS, "norm")
    # Each step was made by both up to the boundary, and each range once after it.
    assert commits(cluster) == Counter({step: 2 if step <= 12 else 1 for step in range(1, STEPS + 1)})
    assert len(cluster.workers) == 2


@pytest.mark.slow
def test_worker_and_coordinator_killed_as_common_steps_end(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """The others have committed the step whose end is the boundary, and one is killed there, when a new
    coordinator knows of all that have stopped.
    """
    at_body, committed = tmp_path / "body", tmp_path / "committed"
    held = gate(at_body, 12)
    committed.write_text("120")
    cluster = make_cluster(TOGETHER, 2, environment={"SPRINGTIDE_COMPRESSION": "TopK"} | TOP_K)
    late = f"{held};committed:13:mark={tmp_path / 'inside'};committed:13:hold={committed}"
    first, second, third = cluster.start(3, faults={0: held, 1: held, 2: late})
    cluster.until_step(11)
    cluster.consistency = BOUNDED
    cluster.until(lambda: "asked to stop" in first.log(), "the boundary")
    at_body.unlink()
    # With TopK the step after is the last one.
    cluster.until((tmp_path / "inside").exists, "the last common step")
    cluster.until(lambda: reply(cluster).reason == "Parking", "the others' stop")
    cluster.kill_coordinator()
    cluster.start_coordinator(same_pod=True)
    cluster.until(
        lambda: reply(cluster).incarnation.restart == 1 and reply(cluster).reason == "Parking",
        "a new coordinator that knows who has stopped",
    )
    assert reply(cluster).consistency == TOGETHER
    third.kill()
    cluster.until(lambda: reply(cluster).consistency == BOUNDED, "the change")
    cluster.until_done()
    check_as_good(cluster, [first, second], reference, OPTIONS)
    assert all(commits(cluster)[step] == 1 for step in range(14, STEPS + 1))


@pytest.mark.slow
def test_script_needing_common_steps_keeps_them_with_new_pods(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    """A script with an average of the weights keeps its common steps, and pods made later follow the job.

    The manifest asks for another consistency when such a pod is made.
    """
    held = gate(tmp_path / "gate", 12)
    cluster = make_cluster(TOGETHER, average=True)
    first, second = cluster.start(2, faults={0: held, 1: held})
    cluster.until_step(11)
    cluster.consistency = FREE
    cluster.until(lambda: bool(reply(cluster).consistency_refused), "the refusal")
    said = reply(cluster).consistency_refused
    assert "average is a AveragedModel, which would differ from worker to worker" in said
    cluster.environment["SPRINGTIDE_CONSISTENCY"] = "Asynchronous"
    second.kill()
    (tmp_path / "gate").unlink()
    third = cluster.add()
    cluster.until_done()
    for worker in (first, third):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
    results = [first.result(), third.result()]
    assert len({result["parameters"] for result in results if result}) == 1
    assert reply(cluster).consistency == TOGETHER


@pytest.mark.slow
@pytest.mark.parametrize(("replication", "first"), [(1, FREE), (2, BOUNDED)])
def test_common_steps_begin_at_the_end_of_an_epoch(
    make_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    tmp_path: Path,
    replication: int,
    first: pb.Consistency,
) -> None:
    cluster = make_cluster(first, replication, model="norm", scaler=True, infinite=77)
    held = gate(tmp_path / "gate", 12)
    workers = cluster.start(2, faults={0: held, 1: held})
    cluster.until(lambda: commits(cluster)[11] == 1, "the range before", slowly=False)
    cluster.consistency = TOGETHER
    cluster.until(lambda: all(ENDS in worker.log() for worker in workers), "the word")
    cluster.until(lambda: bool(reply(cluster).consistency_pending), "that it is told")
    assert reply(cluster).consistency == first
    (tmp_path / "gate").unlink()
    cluster.until(lambda: reply(cluster).consistency == TOGETHER, "the change")
    cluster.until_done()
    check_as_good(cluster, workers, reference, OPTIONS, "norm")
    assert commits(cluster) == Counter({step: 1 if step <= 16 else 2 for step in range(1, STEPS + 1)})
    assert [result["audit"]["skipped"] for worker in workers if (result := worker.result())] == [2, 2]
    assert reply(cluster).consistency_pending == ""


def test_the_numbers_after_it_are_those_of_common_steps(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """One worker's ranges are the steps of a single process, and so is what two make of them together."""
    cluster = make_cluster(FREE)
    held = f"{gate(tmp_path / 'gate', 12)};{gate(tmp_path / 'later', 20)}"
    [first] = cluster.start(1, faults={0: held})
    cluster.until_step(11)
    cluster.consistency = TOGETHER
    cluster.until(lambda: ENDS in first.log(), "the word")
    (tmp_path / "gate").unlink()
    cluster.until(lambda: "training goes on with consistency Synchronous" in first.log(), "the change")
    second = cluster.add()
    (tmp_path / "later").unlink()
    cluster.until_done()
    check_as_good(cluster, [first, second], reference, OPTIONS)
    for worker in (first, second):
        result = worker.result()
        assert result is not None
        torch.testing.assert_close(
            torch.tensor(result["values"]), torch.tensor(reference.values), rtol=1e-4, atol=1e-5
        )
        assert result["rates"].items() <= reference.rates.items()


@pytest.mark.slow
def test_worker_and_coordinator_killed_before_common_steps(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """One dies where all meet: the others find that the epoch is over and meet again, there or at the end of
    the next one, if they are past it when they are asked again.
    """
    held, again = gate(tmp_path / "gate", 12), gate(tmp_path / "again", 20)
    cluster = make_cluster(BOUNDED, 2)
    faults = {0: f"{held};{again}", 1: f"{held};{again}", 2: f"{held};meeting:17:kill"}
    first, second, third = cluster.start(3, faults=faults)
    cluster.until(lambda: commits(cluster)[11] == 1, "the range before", slowly=False)
    cluster.consistency = TOGETHER
    cluster.until(lambda: ENDS in first.log(), "the word")
    cluster.kill_coordinator()
    cluster.start_coordinator(same_pod=True)
    cluster.until(
        lambda: reply(cluster).incarnation.restart == 1 and bool(reply(cluster).consistency_pending),
        "a new coordinator that wants the same",
    )
    (tmp_path / "gate").unlink()
    cluster.until(lambda: third.code == -9, "the death at the meeting")
    cluster.until(
        lambda: ENDS in first.log().rpartition("rank 0 of 2")[2] or reply(cluster).consistency == TOGETHER,
        "the word to those who are left",
    )
    (tmp_path / "again").unlink()
    cluster.until(lambda: reply(cluster).consistency == TOGETHER, "the change")
    cluster.until_done()
    check_as_good(cluster, [first, second], reference, OPTIONS)
    found = commits(cluster)
    assert all(found[step] == 2 for step in range(25, STEPS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["formed", "transfer"])
def test_the_first_worker_is_killed_while_common_steps_begin(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path, point: str
) -> None:
    """The first worker is killed while common steps begin, before or when the servers count steps.

    The others take the schedule and state that the next one of them holds.
    """
    held = gate(tmp_path / "gate", 12)
    cluster = make_cluster(FREE, 2, scaler=True, model="norm")
    faults = {0: f"{held};{point}:17:kill", 1: held, 2: held}
    first, second, third = cluster.start(3, faults=faults)
    cluster.until(lambda: commits(cluster)[11] == 1, "the range before", slowly=False)
    cluster.consistency = TOGETHER
    cluster.until(lambda: ENDS in second.log(), "the word")
    (tmp_path / "gate").unlink()
    cluster.until_done()
    assert first.code == -9
    check_as_good(cluster, [second, third], reference, OPTIONS, "norm")
    assert commits(cluster) == Counter({step: 1 if step <= 16 else 2 for step in range(1, STEPS + 1)})
    assert reply(cluster).consistency == TOGETHER


@pytest.mark.slow
def test_to_and_fro_while_a_server_is_killed(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    cluster = make_cluster(TOGETHER, 2, scaler=True, environment={"SPRINGTIDE_COMPRESSION": "BF16"})
    workers = to_and_fro(cluster, tmp_path, 2, each=1, steps=STEPS)
    check_as_good(cluster, workers, reference, OPTIONS)
