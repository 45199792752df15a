"""Real processes, the real coordinator: whatever happens, the numbers are those of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_checks import TOLERANCE, check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7, "pace": 0.015}
STEPS = 56

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    def make(**settings: Any) -> WorkerCluster:
        options = OPTIONS | settings.pop("options", {})
        return new_cluster(options, **settings)

    return make


def test_killed_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """One worker after the other dies, each at another point, and the next one takes its place."""
    points = ["body", "backward", "gradients", "reduced", "stepping", "stepped", "committed"]
    cluster = make_cluster(options={"pace": 0.03})
    steady, victim = cluster.start(2, faults={1: f"{points[0]}:4:kill"})
    for point in points[1:]:
        cluster.until(lambda dying=victim: not dying.running, f"the death before {point}")
        victim = cluster.add(fault=f"{point}:*:kill")
    cluster.until_done()
    assert [worker.code for worker in cluster.workers] == [0] + [-9] * len(points)
    check(cluster, reference, [steady])


@pytest.mark.parametrize("kind", ["lists", "scaler"])
def test_killed_late_in_a_step_with(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, kind: str
) -> None:
    """Several optimizer steps, or a GradScaler: what the survivors' dropped bodies stepped is put back."""
    points = ["gradients", "reduced", "stepped"]
    cluster = make_cluster(options={"pace": 0.02, kind: True})
    steady, victim = cluster.start(2, faults={1: f"{points[0]}:4:kill"})
    for point in points[1:]:
        cluster.until(lambda dying=victim: not dying.running, f"the death before {point}")
        victim = cluster.add(fault=f"{point}:*:kill")
    cluster.until(lambda: not victim.running, "the last death")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [steady, joiner])


@pytest.mark.slow
def test_joiners_rehearse(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    """Joiners warm up before they are admitted; the members that begin a job do not."""
    cluster = make_cluster(options={"pace": 0.05, "scaler": True, "rehearsals": 2, "split": 2})
    first, _ = cluster.start(2, faults={1: "backward:5:kill"})
    cluster.until_step(6, first)
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [first, joiner])
    assert "rehearsed 2 times" in joiner.log()
    assert "others: 1" in joiner.log()
    # Before it asked to be admitted, and once: nobody waits for a garbage collection then.
    assert [worker.log().count("set aside from garbage collection") for worker in (first, joiner)] == [1, 1]
    assert joiner.log().index("set aside") < joiner.log().index("ready to train")
    assert "rehearsed" not in first.log()
    assert "is dropped" not in joiner.log()
    assert min(int(step) for step in (joiner.result() or {})["rates"]) > 5, "nothing of it stays"


def test_first_member_killed_and_replaced(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.04})
    first, second, third = cluster.start(3)
    cluster.until_step(8)
    first.kill()
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [second, third, joiner])
    # The joiner never trained what was committed before it came.
    assert joiner.commits()[0]["step"] > 8


def test_a_worker_that_hangs_is_named_cut_off_and_replaced(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """The first member, which tells of the commits, in its optimizer's step: all others are a step ahead."""
    cluster = make_cluster(options={"pace": 0.02})
    cluster.hang_seconds = 2.0
    first, second = cluster.start(2, faults={0: "stepping:8:sleep=600"})

    def told() -> bool:
        if cluster.reply is None or not cluster.reply.HasField("stall"):
            return False
        stall = cluster.reply.stall
        said = [(one.pod_name, one.activity.step, one.activity.doing) for one in stall.late]
        return said == [(first.name, 8, pb.DOING_STEPPING)] and stall.waiting == 1

    cluster.until(told, f"the word that {first.name} is late with step 8")
    cluster.hung.add(first.uid)
    cluster.until_step(12, second)
    assert first.running, "its process is still there, and disturbs nobody"
    cluster.until(lambda: cluster.reply is not None and not cluster.reply.HasField("stall"), "motion")
    first.kill()
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [second, joiner])


def test_joins_and_leaves(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    cluster = make_cluster(options={"pace": 0.04})
    first, second = cluster.start(2)
    cluster.until_step(5)
    third = cluster.add()
    cluster.until(lambda: bool(third.commits()), "the joiner's first commit")
    first.terminate()
    cluster.until_done()
    assert isinstance(first.outcome(), outcome.Left)
    assert first.code == 0
    assert first.result() is None
    check(cluster, reference, [second, third])
    # Nobody lost a step: join and leave happen between two commits.
    for worker in (second, third):
        assert "is dropped" not in worker.log()


def test_training_goes_on_without_coordinator_and_next_adopts(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.03})
    workers = cluster.start(2)
    cluster.until_step(5)
    cluster.kill_coordinator()
    cluster.until_step(12)
    cluster.start_coordinator()
    cluster.until_done()
    check(cluster, reference, workers)
    for worker in workers:
        assert {commit["generation"] for commit in worker.commits()} == {1}
    # The new coordinator was told of the commits of its predecessor's time.
    assert cluster.reply is not None
    assert cluster.reply.data.total_seen == reference.audit["totalSeen"]


def test_worker_dies_while_there_is_no_coordinator(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.02})
    first, second, third = cluster.start(3)
    cluster.until_step(5)
    cluster.kill_coordinator()
    second.kill()
    cluster.until(lambda: "REDUCTION_FAILED" in first.log(), "the survivor's complaint")
    cluster.start_coordinator()
    cluster.until_done()
    check(cluster, reference, [first, third])
    assert {tuple(commit["incarnation"]) for commit in first.commits()} == {(1, 0), (2, 0)}


@pytest.mark.slow
def test_stopped_worker_is_cut_off_and_joins_again(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.06})
    first, second, third = cluster.start(3, faults={1: "body:6:stop"})
    cluster.until_step(9)
    second.wake()
    cluster.until_done()
    check(cluster, reference, [first, second, third])
    assert len(second.commits()) < STEPS


def test_killed_while_the_state_is_sent(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster(options={"pace": 0.03})
    first, second = cluster.start(2)
    cluster.until_step(4)
    receiver = cluster.add(fault="transfer:1:kill")
    cluster.until(lambda: not receiver.running, "the receiver's end")
    cluster.until_step(min(len(second.commits()) + 2, STEPS))
    cluster.until_done()
    assert receiver.commits() == []
    check(cluster, reference, [first, second])


@pytest.mark.slow
def test_the_rest_of_the_state_comes_from_another_holder(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The sender dies in the middle. Three are needed, so nobody trains on before the last one is there."""
    options = {"hidden": 256, "epochs": 2, "pace": 0.02}
    reference = train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS | options)
    cluster = make_cluster(options=options, minimum=3)
    # In the middle of a step, when both others have committed the one before.
    first, second, third = cluster.start(3, faults={0: "gradients:5:kill", 1: "sending:*:kill"})
    cluster.until(lambda: not first.running, "the first death")
    joiner = cluster.add()
    cluster.until(lambda: not second.running, "the sender's death")
    another = cluster.add()
    cluster.until_done()
    assert (first.code, second.code) == (-9, -9)
    check(cluster, reference, [third, joiner, another])
    assert "of the state, " in joiner.log()
    assert "of the state, " not in another.log()


def test_nobody_trains_on_from_half_a_state(make_cluster: Callable[..., WorkerCluster]) -> None:
    """The only holder dies in the middle: the receiver is neither its heir nor a beginner, and says so."""
    cluster = make_cluster(options={"hidden": 256, "epochs": 2, "pace": 0.0}, minimum=2)
    other, holder = cluster.start(2, faults={0: "committed:4:kill", 1: "sending:*:kill"})
    cluster.until(lambda: not other.running, "the first death")
    receiver = cluster.add()
    cluster.until(lambda: not holder.running, "the holder's death")
    beginners = [cluster.add(), cluster.add()]
    cluster.until_done()
    assert receiver.commits() == []
    assert "received a part of a state which is lost" in receiver.log()
    assert isinstance(receiver.outcome(), outcome.Left), cluster.logs()
    results = [worker.result() for worker in beginners]
    assert [worker.commits()[0]["step"] for worker in beginners] == [1, 1]
    assert all(result is not None and result["audit"]["totalSeen"] == 460 for result in results)
    assert len({result["parameters"] for result in results if result is not None}) == 1


@pytest.mark.slow
def test_killed_at_the_end_of_the_loop(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster()
    first, second, third = cluster.start(3, faults={0: f"ended:{STEPS}:kill"})
    cluster.until_done()
    assert first.code == -9
    check(cluster, reference, [second, third])


@pytest.mark.slow
def test_adam_transferred_to_a_joiner_and_clipping(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"optimizer": "adam", "lr": 0.003, "clip_norm": 0.5, "pace": 0.03, "split": 2}
    reference = train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS | options)
    cluster = make_cluster(options=options)
    first, second = cluster.start(2)
    cluster.until_step(5)
    second.kill()
    third = cluster.add()
    cluster.until_done()
    check(cluster, reference, [first, third])
    # The joiner has taken its memory before it asked to be admitted; those that begin the job have not.
    assert third.log().index("is taken beforehand") < third.log().index("ready to train")
    assert "taken beforehand" not in first.log()


def test_buffers_equal_an_undisturbed_run(
    make_cluster: Callable[..., WorkerCluster], tmp_path: Path, zygote: Zygote
) -> None:
    """Batch statistics depend on the parts, so both runs have two workers in every step that counts, and
    deal the whole batch anew where a step is dropped.
    """
    options = {"model": "norm", "pace": 0.03}
    (tmp_path / "calm").mkdir()
    calm = WorkerCluster(zygote, tmp_path / "calm", OPTIONS | options, minimum=2)
    try:
        undisturbed = calm.start(2)[0]
        calm.until_done()
        expected = undisturbed.result()
        assert expected is not None, calm.logs()
    finally:
        calm.close()
    cluster = make_cluster(options=options, minimum=2, environment={"SPRINGTIDE_SALVAGE": "Never"})
    first, second = cluster.start(2, faults={1: "backward:9:kill"})
    cluster.until(lambda: not second.running, "the death of the second")
    third = cluster.add()
    cluster.until_done()
    for worker in (first, third):
        result = worker.result()
        assert result is not None, cluster.logs()
        assert result["parameters"] == expected["parameters"]
        assert result["buffers"] == expected["buffers"]
        assert result["audit"] == expected["audit"]


@pytest.mark.slow
def test_several_loops_and_a_joiner_in_the_second(
    make_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = {"loops": 3, "epochs": 2, "pace": 0.03}
    reference = train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS | options)
    cluster = make_cluster(options=options)
    first, second = cluster.start(2)
    cluster.until_step(20)
    second.kill()
    third = cluster.add()
    cluster.until_done()
    results = [worker.result() for worker in (first, third)]
    assert all(results), cluster.logs()
    for result in results:
        assert result is not None
        assert result["step"] == 48
        assert max(abs(a - b) for a, b in zip(result["values"], reference.values, strict=True)) <= TOLERANCE
        assert result["audit"] == reference.audit
    assert third.commits()[0]["step"] > 20
