"""Real processes: a joiner has the state before it is a member, and nothing that happens meanwhile costs more
than time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference, train_alone

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 7,
    "pace": 0.03,
    "optimizer": "adam",
    "lr": 0.003,
    "hidden": 96,
}
ALWAYS = {"SPRINGTIDE_FOLLOW_MIB": "0"}
RECEIVING, REUSED = "while they train", re.compile(r"of the state, ([0-9.]+) KiB were here")
STATE_KIB = 3 * 4 * (12 * 96 + 96 + 96 * 96 + 96 + 96 * 3 + 3) / 1024

pytestmark = pytest.mark.timeout(300)


def reused(worker: Worker) -> float:
    """Return how much of the state was there bit for bit when the worker became a member, as a part of it."""
    found = REUSED.search(worker.log())
    return float(found[1]) / STATE_KIB if found else 0.0


def has_followed(worker: Worker) -> bool:
    return "of the state beside training" in worker.log()


def follower(cluster: WorkerCluster, fault: str = "") -> Worker:
    """Start a worker, and return when it begins to follow; until then the members stand still."""
    worker, deadline = cluster.add(fault, hold=False), time.monotonic() + 60.0
    while RECEIVING not in worker.log():
        assert time.monotonic() < deadline, f"it did not begin to follow\n{cluster.logs()}"
        time.sleep(0.01)
    return worker


@pytest.mark.slow
def test_joiner_has_the_state_before_it_is_a_member(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """An option of the optimizer changes in each step that it follows."""
    cluster = new_cluster(OPTIONS, environment=ALWAYS)
    members = cluster.start(3)
    cluster.until_step(4)
    members.append(cluster.add())
    cluster.until_done(*members)
    check(cluster, reference, members)
    assert has_followed(members[3]), members[3].log()
    assert reused(members[3]) > 0.95, members[3].log()
    for member in members[:3]:
        assert re.search(r"fed \S+ \d+ KiB", member.log()), member.log()


@pytest.mark.slow
def test_small_states_are_sent_to_members_only(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"epochs": 3})
    members = cluster.start(2)
    cluster.until_step(4)
    members.append(cluster.add())
    cluster.until_done(*members)
    assert RECEIVING not in members[2].log()


@pytest.mark.slow
def test_two_joiners_follow_at_once(new_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    cluster = new_cluster(OPTIONS, environment=ALWAYS)
    members = cluster.start(2)
    cluster.until_step(4)
    members += [cluster.add(), cluster.add()]
    cluster.until_done(*members)
    check(cluster, reference, members)
    assert all(has_followed(worker) for worker in members[2:])


@pytest.mark.slow
@pytest.mark.parametrize("who", ["a member", "the joiner", "a member in the middle"])
def test_killed_while_the_state_is_sent_beside_training(
    new_cluster: Callable[..., WorkerCluster], reference: Reference, who: str
) -> None:
    cluster = new_cluster(OPTIONS, environment=ALWAYS)
    faults = {0: "feeding:*:kill"} if who == "a member" else {}
    first, second = cluster.start(2, faults)
    cluster.until_step(4, second)
    joiner = cluster.add("following:*:kill" if who == "the joiner" else "")
    if who == "a member in the middle":
        cluster.until(lambda: RECEIVING in joiner.log(), "the joiner to follow")
        first.kill()
    if who == "the joiner":
        cluster.until(lambda: not joiner.running, "the joiner's end")
        joiner = cluster.add()
        cluster.until_done(first, second, joiner)
        check(cluster, reference, [first, second, joiner])
        return
    cluster.until(lambda: not first.running, "the member's end")
    cluster.until_done(second, joiner)
    check(cluster, reference, [second, joiner])


@pytest.mark.slow
def test_member_lost_in_a_step_while_another_follows(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """The step is done again with what survivors have computed, and the joiner takes its gradients once."""
    cluster = new_cluster(OPTIONS | {"split": 2}, environment=ALWAYS | {"SPRINGTIDE_SALVAGE": "Always"})
    first, second, third = cluster.start(3, {2: "gradients:9:kill"})
    cluster.until_step(4)
    joiner = follower(cluster, "following:*:sleep=2")
    cluster.until_done(first, second, joiner)
    assert not third.running
    assert has_followed(joiner)
    assert joiner.commits()[0]["step"] > 9, "the step was dropped before it was a member"
    check(cluster, reference, [first, second, joiner])


def test_joiner_that_nobody_is_left_for_begins_no_mixture(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    """A joiner whose initial state is gone leaves the beginning to another process."""
    cluster = new_cluster(OPTIONS | {"epochs": 3}, environment=ALWAYS)
    (first,) = cluster.start(1)
    cluster.until_step(4)
    joiner = cluster.add("following:1:sleep=1")
    cluster.until(lambda: RECEIVING in joiner.log(), "the joiner to follow")
    cluster.until(lambda: "fed " in first.log() or "receiving" in joiner.log(), "bytes on their way")
    first.kill()
    cluster.until(lambda: not joiner.running or "StateLost" in joiner.log(), "the joiner to know", 30.0)
    beginner = cluster.add()
    cluster.until_done(beginner)
    assert beginner.code == 0, cluster.logs()


@pytest.mark.slow
def test_joiner_in_a_loop_before_the_others_follows(
    new_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The state is written once more after the script's code before the loop that the job is in."""
    options = OPTIONS | {"loops": 2, "epochs": 3}
    reference = train_alone(zygote, tmp_path_factory.mktemp("alone"), options)
    cluster = new_cluster(options, environment=ALWAYS)
    members = cluster.start(2)
    cluster.until_step(28)
    members.append(cluster.add())
    cluster.until_done(*members)
    check(cluster, reference, members)
    assert reused(members[2]) > 0.95, members[2].log()


@pytest.fixture(scope="module")
def scaled(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The undisturbed run in which a step is skipped, since a sample overflows."""
    return train_alone(zygote, tmp_path_factory.mktemp("alone"), OPTIONS | {"scaler": 1, "infinite": 40})


@pytest.mark.slow
def test_skipped_steps_are_no_steps_of_the_joiner(
    new_cluster: Callable[..., WorkerCluster], scaled: Reference
) -> None:
    cluster = new_cluster(OPTIONS | {"scaler": 1, "infinite": 40}, environment=ALWAYS)
    members = cluster.start(2)
    cluster.until_step(2)
    members.append(follower(cluster))
    cluster.until_done(*members)
    check(cluster, scaled, members)
    assert has_followed(members[2])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "on servers"])
def test_values_elsewhere_come_as_before(
    new_cluster: Callable[..., WorkerCluster],
    new_server_cluster: Callable[..., WorkerCluster],
    reference: Reference,
    how: str,
) -> None:
    if how == "sharded":
        cluster = new_cluster(OPTIONS, environment=ALWAYS | {"SPRINGTIDE_SHARD": "Optimizer"})
    else:
        cluster = new_server_cluster(OPTIONS, 1, 1, environment=ALWAYS)
    members = cluster.start(2)
    cluster.until_step(4)
    members.append(cluster.add())
    cluster.until_done(*members)
    check(cluster, reference, members)
    assert RECEIVING not in members[2].log()
