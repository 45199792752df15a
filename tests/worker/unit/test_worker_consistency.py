"""A worker takes its bound from Start, and trains in no kind of consistency that it was not made for."""

from __future__ import annotations

import pytest

from springtide.comm.process_group import Group
from springtide.elastic.consistency import Consistencies, staleness_bound
from springtide.elastic.training_state import TrainingState
from springtide.errors import UsageError
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb


def made_for(consistency: str, strategy: str = "ParameterServer") -> Settings:
    return Settings(strategy=strategy, consistency=consistency, staleness=7)


@pytest.mark.parametrize(
    ("told", "made", "bound"),
    [
        (pb.Consistency(mode="BoundedStaleness", staleness=2), "BoundedStaleness", 2),
        (pb.Consistency(mode="BoundedStaleness", staleness=2), "Asynchronous", 2),
        (pb.Consistency(mode="BoundedStaleness"), "Asynchronous", 1),
        (pb.Consistency(mode="Asynchronous"), "BoundedStaleness", None),
        (pb.Consistency(mode="Synchronous"), "Synchronous", None),
        (pb.Consistency(mode="Synchronous"), "BoundedStaleness", None),
        (pb.Consistency(), "BoundedStaleness", 7),
        (pb.Consistency(), "Asynchronous", None),
    ],
)
def test_staleness_bound_comes_from_start_before_the_pod(
    told: pb.Consistency, made: str, bound: int | None
) -> None:
    assert staleness_bound(told, made_for(made)) == bound


def test_tables_alone_on_servers_have_no_staleness_bound() -> None:
    assert staleness_bound(pb.Consistency(mode="Synchronous"), made_for("Synchronous", "Hybrid")) is None


class Member:
    """Stands for the membership."""

    def __init__(self) -> None:
        self.bound: list[str] = []
        self.at_epochs_end: object = None

    def bind_to_steps(self, reason: str) -> None:
        self.bound.append(reason)

    def call_at_epochs_end(self, listener: object) -> None:
        self.at_epochs_end = listener


def kinds_of(made: str, ranges: object, problem: str = "") -> tuple[Consistencies, Member]:
    member = Member()
    kinds = Consistencies(made_for(made), TrainingState(Group(None, 0, 1, 1.0)), member)  # type: ignore[arg-type]
    kinds.use(ranges, problem)  # type: ignore[arg-type]
    return kinds, member


class Ranges:
    """Stands for the loop over ranges."""

    stops_at_the_end = False
    begun = 0

    def begin_anew(self) -> None:
        self.begun += 1

    def stop_at_the_end(self) -> None:
        self.stops_at_the_end = True

    def go_on_at_the_end(self) -> None:
        self.stops_at_the_end = False


def test_generation_trains_as_start_says_and_not_the_pod() -> None:
    ranges = Ranges()
    kinds, member = kinds_of("Asynchronous", ranges)
    assert kinds.async_loop is ranges
    assert member.at_epochs_end == ranges.stop_at_the_end
    assert kinds.enter(pb.Consistency()) is None
    assert kinds.enter(pb.Consistency(mode="BoundedStaleness", staleness=3)) is True
    assert (kinds.async_loop is ranges, ranges.begun) == (True, 0)
    ranges.stop_at_the_end()
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    assert (kinds.async_loop, ranges.begun, ranges.stops_at_the_end) == (None, 1, False)
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    assert ranges.begun == 1
    assert kinds.enter(pb.Consistency(mode="Asynchronous")) is True
    assert (kinds.async_loop is ranges, ranges.begun) == (True, 2)


@pytest.mark.parametrize(("env", "told"), [("Asynchronous", ""), ("Synchronous", "BoundedStaleness")])
def test_script_bound_to_steps_is_refused_without_them(env: str, told: str) -> None:
    kinds, member = kinds_of(env, None, "average would differ")
    assert (member.bound, kinds.async_loop) == (["average would differ"], None)
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    with pytest.raises(UsageError, match="average would differ"):
        kinds.enter(pb.Consistency(mode=told))


def test_undeclared_script_goes_on_as_before() -> None:
    member = Member()
    state = TrainingState(Group(None, 0, 1, 1.0))
    kinds = Consistencies(made_for("Asynchronous"), state, member)  # type: ignore[arg-type]
    assert (kinds.async_loop, kinds.enter(pb.Consistency(mode="Asynchronous"))) == (None, None)
    kinds.check_together("retry()")
    assert member.bound == []


def test_call_that_needs_common_steps_is_reported_once() -> None:
    kinds, member = kinds_of("Synchronous", Ranges())
    kinds.needs_steps("process_group()")
    kinds.needs_steps("retry()")
    assert member.bound == ["", "the script calls process_group() inside of a training loop"]
