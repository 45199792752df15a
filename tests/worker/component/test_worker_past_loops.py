"""Real processes: a worker goes through the loops that the job has ended while the others train without it.

Each test holds the joiner in a body of such a loop until the others have committed steps meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from worker_cluster import Worker, WorkerCluster

from springtide.coordination import outcome
from springtide_protocol import coordinator_pb2 as pb

SCRIPT = Path(__file__).parents[2] / "support" / "worker_past_script.py"
LOOPS, STEPS = 8, 4  # loops of the script, and steps of each

pytestmark = pytest.mark.timeout(300)


def lines(cluster: WorkerCluster, worker: Worker, kind: str) -> list[dict[str, Any]]:
    """Return what a worker has written down: in bodies of ended loops (`past`), or behind loops."""
    path = cluster.folder / f"{worker.name}.{kind}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def in_body(cluster: WorkerCluster, worker: Worker, stage: int) -> None:
    """Wait until a worker is in the body of an ended loop."""
    cluster.until(
        lambda: any(line["stage"] == stage for line in lines(cluster, worker, "past")),
        f"{worker.name} in the body of loop {stage}",
        stop_at=1,
    )


def let_go(cluster: WorkerCluster, stage: int) -> None:
    """Let workers end their bodies of an ended loop."""
    (cluster.folder / f"gate-{stage}").touch()


def train_on(cluster: WorkerCluster, worker: Worker, steps: int = 1) -> None:
    """Wait until a member has committed more steps, in the generation that it is in."""
    last = worker.commits()[-1]
    cluster.until_step(last["step"] + steps, worker)
    assert worker.commits()[-1]["generation"] == last["generation"], cluster.logs()


def check_end(cluster: WorkerCluster, *workers: Worker) -> None:
    """Let all workers end, and check that they end with one state, of all steps and all samples."""
    cluster.until_done(*workers)
    results = [(cluster.folder / f"{worker.name}.result") for worker in workers]
    assert all(path.exists() for path in results), cluster.logs()
    found = [json.loads(path.read_text()) for path in results]
    assert all(other == found[0] for other in found), found
    _, rate, audit = found[0]
    assert rate == pytest.approx(0.01 * 0.9**LOOPS)
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (64 * LOOPS, 0, 0)
    for worker in workers:
        ended = worker.outcome()
        assert isinstance(ended, outcome.Finished), cluster.logs()
        assert ended.step == STEPS * LOOPS


def standing(cluster: WorkerCluster, worker: Worker) -> int:
    """Return where the coordinator says that a worker is; -1 while it does not know it."""
    members = [] if cluster.reply is None else cluster.reply.members
    return next((int(m.standing) for m in members if m.member.pod_name == worker.name), -1)


@pytest.mark.slow
def test_others_train_while_a_joiner_is_in_ended_loops(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster({"loops": LOOPS, "gates": True, "evaluates": True}, script=SCRIPT)
    first, second = cluster.start(2)
    cluster.until_step(2 * STEPS + 1)
    killed = cluster.add(hold=False)
    in_body(cluster, killed, 0)
    train_on(cluster, first, 2)
    let_go(cluster, 0)
    in_body(cluster, killed, 1)
    killed.kill()
    train_on(cluster, first, 2)
    cluster.until(lambda: not killed.running, "the death of the joiner")
    assert cluster.reply is not None
    assert cluster.reply.generation.number == 1, "nobody has noticed"
    third = cluster.add(hold=False)
    in_body(cluster, third, 1)
    train_on(cluster, first)
    for stage in range(1, LOOPS):
        let_go(cluster, stage)
    cluster.until(lambda: bool(third.commits()), "the joiner's first commit", stop_at=1)
    assert third.commits()[0]["generation"] == 2
    past = lines(cluster, third, "past")
    assert [line["stage"] for line in past] == list(range(len(past)))
    assert len(past) >= 3
    # The last rank, of a job of three; or in the place of another, while the coordinator wanted two.
    assert all(not line["is_member"] and line["ranks"] in ([2, 3], [1, 2]) for line in past[:3]), past
    behind = lines(cluster, third, "behind")
    assert all(line["loss"] > 0 and line["off"] > 0 for line in behind[:3]), behind
    assert [line["samples"] for line in behind[:3]] == [8] * 3, "one batch, where the others evaluate all"
    check_end(cluster, first, second, third)


@pytest.mark.slow
def test_coordinator_is_lost_while_a_joiner_is_in_ended_loops(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    cluster = new_cluster({"loops": LOOPS, "gates": True}, script=SCRIPT)
    first, second = cluster.start(2)
    cluster.until_step(2 * STEPS + 1)
    third = cluster.add(hold=False)
    in_body(cluster, third, 0)
    cluster.kill_coordinator()
    train_on(cluster, first)
    cluster.start_coordinator()
    for stage in range(LOOPS):
        let_go(cluster, stage)
    cluster.until(lambda: bool(third.commits()), "the joiner's first commit", stop_at=1)
    past = lines(cluster, third, "past")
    assert [line["stage"] for line in past] == list(range(len(past)))
    assert not any(line["is_member"] for line in past[:2]), past
    check_end(cluster, first, second, third)


def test_standby_goes_through_loops_as_they_end(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster({"loops": LOOPS}, script=SCRIPT)
    first, second = cluster.start(2)
    cluster.until_step(STEPS + 1)
    cluster.standby = 1
    third = cluster.add(hold=False)
    cluster.until(lambda: standing(cluster, third) == pb.PARKED, "the standby to wait", stop_at=1)
    before = len(lines(cluster, third, "past"))
    assert before >= 1
    cluster.until_step(STEPS * (before + 1) + 1, first)
    cluster.until(lambda: len(lines(cluster, third, "past")) > before, "the standby to move on", stop_at=1)
    assert standing(cluster, third) == pb.PARKED
    assert third.commits() == []
    generation = first.commits()[-1]["generation"]
    second.kill()
    cluster.until(lambda: bool(third.commits()), "the standby's first commit", stop_at=1)
    assert third.commits()[0]["generation"] == generation + 1, "no generation goes on without it"
    past = lines(cluster, third, "past")
    assert [line["stage"] for line in past] == list(range(len(past)))
    assert not any(line["is_member"] for line in past), "nobody has waited for one of these bodies"
    check_end(cluster, first, third)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["meets", "errands"])
def test_workers_meet_between_loops(new_cluster: Callable[..., WorkerCluster], what: str) -> None:
    cluster = new_cluster({"loops": LOOPS, "meets": True, what: True}, script=SCRIPT)
    first, second = cluster.start(2)
    cluster.until_step(2 * STEPS + 1)
    third = cluster.add(hold=False)
    cluster.until(lambda: bool(third.commits()), "the joiner's first commit", stop_at=1)
    past, behind = lines(cluster, third, "past"), lines(cluster, third, "behind")
    member = what == "errands"  # from the first one on, which a member alone can do
    assert [line["is_member"] for line in past[:2]] == [False, member]
    assert [line["total"] for line in behind[:2]] == [1, 1], "the others are in steps of another loop"
    check_end(cluster, first, second, third)
    assert {line["total"] for line in lines(cluster, first, "behind")} == {2, 3}
    assert lines(cluster, third, "behind")[-1]["total"] == 3


def test_standby_that_cannot_go_back_makes_room(new_cluster: Callable[..., WorkerCluster]) -> None:
    """All members are lost without a checkpoint: the job begins anew, and the standby has left its begin."""
    cluster = new_cluster({"loops": LOOPS}, script=SCRIPT)
    (first,) = cluster.start(1)
    cluster.until_step(STEPS + 1)
    cluster.standby = 1
    second = cluster.add(hold=False)
    cluster.until(lambda: standing(cluster, second) == pb.PARKED, "the standby to wait", stop_at=1)
    assert lines(cluster, second, "past")
    first.kill()
    cluster.until_done(second)
    left = second.outcome()
    assert isinstance(left, outcome.Left), cluster.logs()
    assert "gone through" in left.reason
    cluster.standby = 0
    third = cluster.add()
    check_end(cluster, third)
    assert third.commits()[0]["step"] == 1
