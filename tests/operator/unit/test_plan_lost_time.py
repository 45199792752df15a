"""Lost time and the slow worker in status: sums outlive coordinators and operators."""

from __future__ import annotations

from typing import Any

from operator_world import World

from springtide_operator.coordinator_connection import MAX_SHARES, news, to_report
from springtide_operator.metrics import Metrics
from springtide_operator.plan.observation import ShareReport, SlowReport
from springtide_protocol import coordinator_pb2 as pb


def trained(**report: Any) -> World:
    world = World()
    world.settle()
    world.reports(**report)
    world.settle()
    return world


def write(world: World, **report: Any) -> dict[str, Any]:
    """One round, late enough for progress to be written; returns the status."""
    world.now += 20
    world.reports(**report)
    world.round()
    return world.status


def test_lost_time_adds_up_over_coordinators_and_operators() -> None:
    world = trained(lost_seconds={"failure": 2.5, "data": 1.0})
    assert world.status["lostSeconds"] == {"data": "1.000", "failure": "2.500"}
    assert write(world, lost_seconds={"failure": 4.0, "data": 1.5})["lostSeconds"]["failure"] == "4.000"
    world.die()  # the next operator has only status to go by
    assert write(world, lost_seconds={"failure": 4.0, "data": 1.5})["lostSeconds"]["failure"] == "4.000"
    # The coordinator's container restarts and counts from 0; then its pod is lost and the next one does.
    assert write(world, restart=1, lost_seconds={"failure": 0.5})["lostSeconds"]["failure"] == "4.500"
    assert write(world, restart=1, lost_seconds={"failure": 0.75})["lostSeconds"]["failure"] == "4.750"
    world.vanish(world.coordinators()[0])
    world.settle()
    assert world.status["coordinator"]["incarnation"] == 2
    assert write(world, lost_seconds={"failure": 1.0, "rescale": 3.0})["lostSeconds"] == {
        "data": "1.500",
        "failure": "5.750",
        "rescale": "3.000",
    }


def test_nothing_is_counted_twice_while_no_progress_is_written() -> None:
    world = trained(lost_seconds={"failure": 1.0})
    for seconds in (1.5, 2.0, 2.5):  # within the 15 s: not written, and so not counted
        world.now += 2
        world.reports(lost_seconds={"failure": seconds})
        world.round()
    assert write(world, lost_seconds={"failure": 3.0})["lostSeconds"] == {"failure": "3.000"}


def test_slow_worker_is_named_with_node_until_it_recovers() -> None:
    world = trained()
    pod = world.workers()[1]
    pod["spec"]["nodeName"] = "node-7"
    name = pod["metadata"]["name"]
    found = write(world, slow=SlowReport(name, 0.31234, 0.1))
    assert found["slowWorker"] == {
        "pod": name,
        "node": "node-7",
        "stepSeconds": "0.312",
        "medianSeconds": "0.1",
    }
    assert "slowWorker" not in write(world)


def test_parts_by_speed_are_shown_while_they_are_uneven() -> None:
    world = trained()
    shares = (ShareReport("w-2", 120, 0.02034), ShareReport("w-0", 240, 0.01))
    told = [
        {"name": "w-2", "samples": 120, "secondsPerSample": "0.02"},
        {"name": "w-0", "samples": 240, "secondsPerSample": "0.01"},
    ]
    assert write(world, shares=shares)["workers"]["balance"] == told
    writes = world.status
    world.now += 1  # it moves always: it is written with progress
    world.reports(shares=(ShareReport("w-2", 120, 0.0251),))
    world.round()
    assert world.status == writes
    assert "balance" not in write(world)["workers"]


def test_the_slowest_shares_are_read_from_the_coordinators_word() -> None:
    def entry(number: int, by_speed: bool = True) -> pb.MemberStatus:
        member = pb.Member(id=f"m{number}", pod_name=f"w-{number}", local_rank=number % 2)
        return pb.MemberStatus(
            member=member,
            standing=pb.ACTIVE,
            share_samples=number,
            sample_seconds=number / 100,
            by_speed=by_speed,
        )

    report = to_report(pb.SyncReply(members=[entry(number) for number in range(40)]), 5.0)
    assert len(report.shares) == MAX_SHARES == 32
    assert report.shares[0] == ShareReport("w-39/1", 39, 0.39)
    assert report.shares[-1].name == "w-8"
    assert not news(report, to_report(pb.SyncReply(members=[entry(n, True) for n in range(40)][:]), 6.0))
    assert to_report(pb.SyncReply(members=[entry(3, by_speed=False)]), 5.0).shares == ()


def test_the_coordinators_word_is_read() -> None:
    reply = pb.SyncReply(
        lost_seconds={"failure": 2.0}, slow=pb.Slow(pod_name="p", busy_seconds=3, median_seconds=1)
    )
    report = to_report(reply, 5.0)
    assert report.lost_seconds == {"failure": 2.0}
    assert report.slow == SlowReport("p", 3.0, 1.0)
    assert to_report(pb.SyncReply(), 5.0).slow is None
    assert not news(report, to_report(pb.SyncReply(), 6.0)), "it moves always, and wakes nobody"


def test_metrics_say_it_by_cause() -> None:
    status = {"lostSeconds": {"failure": "2.5"}, "data": {"totalSeen": 640}}
    metrics = Metrics(lambda: [("ns", "job", status)], lambda: True)
    labels = {"training_job": "job", "job_namespace": "ns"}
    read = metrics.registry.get_sample_value
    assert read("springtide_job_lost_seconds_total", {**labels, "cause": "failure"}) == 2.5
    assert read("springtide_job_samples_total", labels) == 640
