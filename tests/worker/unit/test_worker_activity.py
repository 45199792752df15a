"""Reports of a worker about its activity over the last while."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from worker_alone import library

from springtide.comm.transfer_progress import Progress
from springtide.coordination.activity import Activity, main_thread_place
from springtide.coordination.waiting import ReductionWarnings, TransferReports
from springtide.elastic.current_activity import ActivitySources, current_activity
from springtide.train_step.timing import Timing
from springtide.train_step.transaction import Phase
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import GenerationName


def test_only_what_lasts_is_reported_and_twice() -> None:
    asked: list[int] = []
    watch = Activity(lambda: asked.append(1) or "train.py:7")  # type: ignore[func-returns-value]
    fetching = (6, int(pb.DOING_FETCHING))
    told = [watch.look((step, int(pb.DOING_COMPUTING)), step * 0.5) for step in range(20)]
    assert told == [None] * 20, "steps that go on tell nothing"
    times = [100 + tenth * 0.1 for tenth in range(200)]
    said = [found for at in times if (found := watch.look(fetching, at)) is not None]
    assert [round(found.seconds) for found in said] == [1, 10]
    assert [found.where for found in said] == ["", "train.py:7"]
    assert (said[0].step, said[0].doing) == (6, pb.DOING_FETCHING)
    assert asked == [1]


def test_new_coordinator_hears_what_lasts_again() -> None:
    watch = Activity(lambda: "here")
    now = (3, int(pb.DOING_REDUCING))
    watch.look(now, 0.0)
    assert watch.look(now, 20.0) is not None
    watch.again()
    again = watch.look(now, 20.1)
    assert again is not None
    assert (again.seconds, again.where) == (pytest.approx(20.1), "here")


def sources(phase: Phase = Phase.IDLE, **changes: Any) -> ActivitySources:
    timing = Timing()
    timing.fetching = changes.get("fetching", False)
    trainer = SimpleNamespace(
        waiting_since=changes.get("waiting_since"), transaction=SimpleNamespace(phase=phase)
    )
    whole = {
        "state": SimpleNamespace(
            plan=changes.get("plan", object()), position=SimpleNamespace(cursor=SimpleNamespace(step=41))
        ),
        "trainers": SimpleNamespace(trainer=changes.get("trainer", trainer)),
        "timing": timing,
        "evaluations": SimpleNamespace(running=changes.get("evaluates")),
        "state_transfer": SimpleNamespace(progress=changes.get("moves")),
        "session": SimpleNamespace(
            membership=SimpleNamespace(standing=changes.get("standing", pb.ACTIVE)),
            asking="asks" in changes,
        ),
    }
    return ActivitySources(**whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (sources(fetching=True), pb.DOING_FETCHING),
        (sources(Phase.OPEN, fetching=True), pb.DOING_FETCHING),
        (sources(Phase.OPEN), pb.DOING_COMPUTING),
        (sources(Phase.DROPPED), pb.DOING_COMPUTING),
        (sources(Phase.OPEN, waiting_since=1.0), pb.DOING_REDUCING),
        (sources(Phase.STEPPING), pb.DOING_STEPPING),
        (sources(Phase.STEPPED), pb.DOING_STEPPING),
        (sources(), pb.DOING_BETWEEN),
        (sources(evaluates=object()), pb.DOING_EVALUATING),
        (sources(evaluates=object(), asks=object()), pb.DOING_ASKING),
    ],
)
def test_every_place_of_a_step_has_an_activity(state: Any, expected: int) -> None:
    assert current_activity(state) == (42, expected)


@pytest.mark.parametrize(
    "state",
    [
        *(sources(plan=None), sources(trainer=None), sources(standing=pb.PARKED)),
        sources(moves=Progress("worker-0", sends=True)),
    ],
)
def test_activity_outside_of_a_generation_is_none(state: Any) -> None:
    assert current_activity(state) is None


def test_activity_without_a_job_is_none() -> None:
    with library() as runtime:
        assert runtime.current_activity() is None


def test_long_transfer_is_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The receiver tells the coordinator every second; both ends say it in their logs every five."""
    sent: list[pb.WorkerMessage] = []
    transfers = SimpleNamespace(progress=None)
    reports = TransferReports(transfers, lambda: GenerationName.of(2, 0, 7), sent.append)
    reports.look(99.0, connected=True)
    progress = Progress("worker-0", sends=False, total=400, done=100, began=100.0)
    transfers.progress = progress
    with caplog.at_level(logging.INFO, "springtide"):
        for tenth in range(125):
            reports.look(100.0 + tenth / 10, connected=True)
        progress.sends = True
        reports.look(200.0, connected=True)
    assert 10 <= len(sent) <= 12
    told = sent[0].transferring
    assert (told.holder, told.bytes_done, told.bytes_total) == ("worker-0", 100, 400)
    assert (told.generation.incarnation.number, told.generation.number) == (2, 7)
    assert 3 <= len(caplog.messages) <= 4
    assert "100 B of 400 B (25 %)" in caplog.messages[0]
    assert "sending the state to worker-0" in caplog.messages[-1]


def test_long_wait_for_gradients_names_the_others(caplog: pytest.LogCaptureFixture) -> None:
    since: list[float | None] = [None]
    warnings = ReductionWarnings(lambda: since[0], lambda: ["worker-1", "worker-2"])
    warnings.look(50.0)
    since[0] = 100.0
    for second in range(100, 125):
        warnings.look(float(second))
    assert [line for line in caplog.messages if "worker-1, worker-2" in line] == caplog.messages
    assert ["waited 10 s" in caplog.messages[0], "waited 20 s" in caplog.messages[1]] == [True, True]
    assert len(caplog.messages) == 2


def test_fetching_shows_while_it_lasts() -> None:
    timing = Timing()
    seen: list[bool] = []
    assert not timing.fetching
    timing.timed(lambda ids: seen.append(timing.fetching))(None)
    assert seen == [True]
    assert not timing.fetching

    def broken(ids: Any) -> None:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        timing.timed(broken)(None)
    assert not timing.fetching


def test_place_of_the_main_thread_is_a_line_of_a_file() -> None:
    assert ":" in main_thread_place()
