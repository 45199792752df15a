"""Workers that stop, raise or are cut off at named points: those that a kill is tried at elsewhere, and the
ends of epochs, loops and jobs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cut_proxy import CutProxy
from halt import Halt
from worker_checks import check
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference

from springtide.coordination import outcome

EVALUATION = Path(__file__).parents[2] / "support" / "worker_evaluation_script.py"
OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 3}
STEPS = 24

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make_cluster(new_cluster: Callable[..., WorkerCluster]) -> Callable[..., WorkerCluster]:
    return lambda options=OPTIONS, **settings: new_cluster(options, **settings)


class Proxies:
    """One before each worker's coordinator."""

    def __init__(self) -> None:
        self._known: dict[str, CutProxy] = {}

    def between(self, name: str, address: str) -> str:
        host, _, port = address.rpartition(":")
        self._known[name] = CutProxy((host, int(port)))
        return self._known[name].address

    def cut(self, worker: Worker) -> None:
        self._known[worker.name].cut()

    def heal(self, worker: Worker) -> None:
        self._known[worker.name].heal()

    def close(self) -> None:
        for proxy in self._known.values():
            proxy.close()


@pytest.fixture
def proxies() -> Iterator[Proxies]:
    found = Proxies()
    yield found
    found.close()


def stopped(worker: Worker) -> bool:
    """Whether the process stands still by a SIGSTOP."""
    stat = Path(f"/proc/{worker.pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
def test_stopped_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    """Two stand still before the sums of a step, later two between the sums and the commit of another.

    They are woken when the others have gone on: some come back in time, some find the job's end.
    """
    cluster = make_cluster()
    points = ["backward:4", "gradients:4", "reduced:6", "stepped:6"]
    faults = {1 + number: f"{point}:stop" for number, point in enumerate(points)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until(lambda: all(stopped(victim) for victim in victims), "all that stand still")
    cluster.until_step(9, steady)
    for victim in victims:
        victim.wake()
    cluster.until_done()
    ends = [worker.outcome() for worker in cluster.workers]
    assert all(isinstance(end, outcome.Finished | outcome.Left) for end in ends), cluster.logs()
    check(cluster, reference, [steady, *(worker for worker in victims if worker in cluster.finished())])
    assert max(commit["generation"] for commit in steady.commits()) >= 3


@pytest.mark.slow
def test_an_exception_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = make_cluster()
    points = ["body", "backward", "gradients", "reduced", "stepping", "stepped"]
    faults = {1 + number: f"{point}:{3 + number}:raise" for number, point in enumerate(points)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    cluster.until_done()
    for victim, point in zip(victims, points, strict=True):
        end = victim.outcome()
        assert isinstance(end, outcome.Failed), f"{point}: {end}\n{cluster.logs()}"
        assert f"fault at {point}" in end.message
        assert victim.result() is None
    check(cluster, reference, [steady])


def test_cut_off_at_every_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], proxies: Proxies, reference: Reference, tmp_path: Path
) -> None:
    """The coordinator loses two before the sums of a step, later two between the sums and the commit of
    another; each still has its peers. The others go on, and these do when they are heard of again.
    """
    cluster, halt = make_cluster(), Halt(tmp_path)
    cluster.coordinator_of = proxies.between
    points = ["backward:4", "gradients:4", "reduced:6", "stepping:6"]
    faults = {1 + number: halt.at(point, number) for number, point in enumerate(points)}
    steady, *victims = cluster.start(1 + len(points), faults=faults)
    for pair in ((0, 1), (2, 3)):
        cluster.until(lambda pair=pair: all(map(halt.reached, pair)), f"{[points[n] for n in pair]}", 60.0)
        for number in pair:
            proxies.cut(victims[number])
    cluster.until_step(9, steady)
    halt.go()
    cluster.until(
        lambda: all("lost the coordinator" in victim.log() for victim in victims), "all four to notice", 60.0
    )
    for victim in victims:
        proxies.heal(victim)
    cluster.until_done()
    ends = [worker.outcome() for worker in cluster.workers]
    assert all(isinstance(end, outcome.Finished | outcome.Left) for end in ends), cluster.logs()
    check(cluster, reference, [steady, *(worker for worker in victims if worker in cluster.finished())])
    # A step past its sums is finished, whatever has become of the others.
    assert 6 in [commit["step"] for commit in victims[3].commits()]


def test_a_coordinator_that_stands_still_loses_nobody(
    make_cluster: Callable[..., WorkerCluster], proxies: Proxies, reference: Reference
) -> None:
    """A coordinator that stands still for longer than the heartbeat limit loses no member.

    The connections to it stay cut for twice the usual grace.
    """
    cluster = make_cluster(OPTIONS | {"pace": 0.1})
    cluster.coordinator_of = proxies.between
    workers = cluster.start(2)
    cluster.until_step(3)
    cluster.stop_coordinator()
    for worker in workers:
        cluster.until(lambda one=worker: "lost the coordinator" in one.log(), "the word that it is silent")
        proxies.cut(worker)
    cluster.wake_coordinator()
    cluster.until(lambda: "streams are broken" in cluster.logs(), "the end of the streams")
    time.sleep(1.0)
    for worker in workers:
        proxies.heal(worker)
    cluster.until_done()
    check(cluster, reference, workers)
    for worker in workers:
        assert {commit["generation"] for commit in worker.commits()} == {1}, cluster.logs()
        assert "is dropped" not in worker.log()


def test_failures_during_a_recovery(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """One dies in step 4; while the next generation forms, one dies and one fails; when step 4 is done
    again, one dies between its sums and its commit.
    """
    cluster, halt = make_cluster(), Halt(tmp_path)
    faults = {1: halt.at("body:4"), 2: "formed:4:kill", 3: "reduced:4:kill", 4: "formed:4:raise"}
    members = cluster.start(5, faults=faults)
    steady, first, *victims, failed = members
    cluster.until(halt.reached, "the step in which the first one dies", 60.0)
    for worker in members:
        cluster.until_step(3, worker)
    first.kill()
    cluster.until_done()
    assert [victim.code for victim in (first, *victims)] == [-9] * 3, cluster.logs()
    assert "the generation could not be formed: RuntimeError: fault at formed" in failed.log()
    check(cluster, reference, [steady, failed])


@pytest.mark.slow
def test_cut_off_in_a_transfer(
    make_cluster: Callable[..., WorkerCluster], proxies: Proxies, reference: Reference, tmp_path: Path
) -> None:
    """A member cut off from the coordinator while it receives the state is replaced by another one."""
    cluster, halt = make_cluster(minimum=3), Halt(tmp_path)
    cluster.coordinator_of = proxies.between
    first, second, third = cluster.start(3, faults={0: "committed:4:kill"})
    cluster.until(lambda: not first.running, "the first death")
    receiver = cluster.add(fault=halt.at("receiving:*"))
    cluster.until(halt.reached, "half of a transfer", 60.0)
    proxies.cut(receiver)
    another = cluster.add()
    cluster.until_done(second, third, another)
    halt.go()
    proxies.heal(receiver)
    cluster.until_done()
    check(cluster, reference, [second, third, another])
    assert receiver.commits() == []
    assert receiver.outcome() == outcome.Left("the job is finished", finished=True)


def test_in_a_transfer(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    """The one that sends the state stands still; the one that receives it fails once, and tries again."""
    cluster = make_cluster(minimum=3)
    # In the middle of a step, when both others have committed the one before.
    first, second, third = cluster.start(3, faults={0: "gradients:5:kill", 1: "sending:*:stop"})
    cluster.until(lambda: not first.running, "the first death")
    receiver = cluster.add(fault="receiving:*:raise")
    cluster.until(lambda: stopped(second), "a sender that stands still")
    another = cluster.add()
    cluster.until_done(third, receiver, another)
    second.kill()
    check(cluster, reference, [third, receiver, another])
    # Who parks first, this one or the peer that it left, decides under which reason it waited.
    assert "the generation could not be formed: RuntimeError: fault at receiving" in receiver.log()
    assert "of the state, " in receiver.log()


def test_when_asked_to_stop(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    """A joiner waits: one member raises where it hears of that, one stands still; the others go on."""
    cluster = make_cluster()
    first, second, third = cluster.start(3, faults={1: "asked:*:raise", 2: "asked:*:stop"})
    joiner = cluster.add()
    cluster.until_done(first, second, joiner, seconds=120.0)
    assert isinstance(second.outcome(), outcome.Failed)
    assert "fault at asked" in second.log()
    assert stopped(third)
    third.kill()
    check(cluster, reference, [first, joiner])


def test_at_the_end_of_the_loop(make_cluster: Callable[..., WorkerCluster], reference: Reference) -> None:
    """One stands still where the loop ends, one raises; woken, the first finds the job at its end."""
    cluster = make_cluster()
    faults = {0: f"ended:{STEPS}:stop", 1: f"ended:{STEPS}:raise"}
    first, second, third, fourth = cluster.start(4, faults=faults)
    cluster.until_done(second, third, fourth)
    assert isinstance(second.outcome(), outcome.Failed)
    check(cluster, reference, [third, fourth])
    first.wake()
    cluster.until_done()
    assert first.outcome() == outcome.Left("the job is finished", finished=True)
    assert first.code == 0


def test_cut_off_at_the_end_of_the_loop(
    make_cluster: Callable[..., WorkerCluster], proxies: Proxies, reference: Reference, tmp_path: Path
) -> None:
    """The others do not wait for the one that the coordinator cannot reach; it learns of the end later."""
    cluster, halt = make_cluster(), Halt(tmp_path)
    cluster.coordinator_of = proxies.between
    first, second = cluster.start(2, faults={1: halt.at(f"ended:{STEPS}")})
    cluster.until(halt.reached, "the second one at the loop's end")
    proxies.cut(second)
    halt.go()
    cluster.until_done(first)
    check(cluster, reference, [first])
    proxies.heal(second)
    cluster.until_done()
    assert isinstance(second.outcome(), outcome.Finished | outcome.Left), cluster.logs()
    assert second.code == 0
    assert second.commits()[-1]["step"] == STEPS


@pytest.mark.slow
def test_in_evaluations_at_the_ends_of_epochs(
    make_cluster: Callable[..., WorkerCluster], proxies: Proxies, tmp_path: Path
) -> None:
    """Each epoch of four steps ends with an evaluation: in them one stands still, one raises, and one is cut
    off from the coordinator; the means are over all samples all the same."""
    cluster = make_cluster(options={"epochs": 4, "pace": 0.02}, script=EVALUATION)
    cluster.coordinator_of = proxies.between
    # The others keep their first ranges until then: else they might take all before the victim comes.
    at_4, at_8 = Halt(tmp_path, "at-4"), Halt(tmp_path, "at-8")
    both = f"{at_4.at('evaluation:4')};{at_8.at('evaluation:8')}"
    faults = {
        0: both,
        1: f"evaluation:4:stop;{at_8.at('evaluation:8')}",
        2: f"{at_4.at('evaluation:4')};evaluation:8:raise",
        3: both,
    }
    first, second, third, fourth = cluster.start(4, faults=faults)
    cluster.until(lambda: stopped(second), "one that stands still")
    at_4.go()
    cluster.until_step(5, first)
    second.wake()
    cluster.until(lambda: not third.running, "one that raises")
    at_8.go()
    cluster.until_step(12, fourth)
    proxies.cut(fourth)
    cluster.until_step(13, first)
    proxies.heal(fourth)
    cluster.until_done()
    assert isinstance(third.outcome(), outcome.Failed)
    expected = first.result()
    assert expected is not None, cluster.logs()
    assert set(expected) == {"4", "8", "12", "16", "-1"}
    assert isinstance(first.outcome(), outcome.Finished)
    for worker in (first, second, fourth):
        # Who came back too late finds the job's end.
        assert isinstance(worker.outcome(), outcome.Finished | outcome.Left), cluster.logs()
        for step, values in (worker.result() or {}).items():
            assert values["number"] == pytest.approx(150.0), f"step {step}\n{cluster.logs()}"
            assert values == expected[step], step
