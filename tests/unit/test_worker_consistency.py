"""A worker takes its bound from Start, and trains in no kind of consistency that it was not made for."""

from __future__ import annotations

import pytest

from springtide.consistency import Consistencies, staleness_bound
from springtide.environment import Settings
from springtide.errors import UsageError
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
def test_the_generations_word_counts_and_not_the_pods(
    told: pb.Consistency, made: str, bound: int | None
) -> None:
    assert staleness_bound(told, made_for(made)) == bound


def test_tables_alone_on_servers_are_of_common_steps() -> None:
    assert staleness_bound(pb.Consistency(mode="Synchronous"), made_for("Synchronous", "Hybrid")) is None


class Told:
    """What a runtime and its membership are, for this."""

    def __init__(self, env: str = "Synchronous") -> None:
        self.settings, self.leasing, self.membership = made_for(env), None, self
        self.bound: list[str] = []
        self.on_epochs_end: object = None

    def bind_to_steps(self, reason: str) -> None:
        self.bound.append(reason)


class Ranges:
    """Stands for the loop over ranges."""

    stops_at_the_end = False
    begun = 0

    def begin_anew(self) -> None:
        self.begun += 1

    def stop_at_the_end(self) -> None:
        self.stops_at_the_end = True


def test_a_generation_is_of_the_kind_that_it_is_told_to_be_whatever_the_pod_was_made_for() -> None:
    runtime, ranges = Told("Asynchronous"), Ranges()
    kinds = Consistencies(runtime, ranges, "")  # type: ignore[arg-type]
    assert runtime.leasing is ranges
    assert kinds.enter(pb.Consistency()) is None
    assert kinds.enter(pb.Consistency(mode="BoundedStaleness", staleness=3)) is True
    assert (runtime.leasing is ranges, ranges.begun) == (True, 0)
    ranges.stop_at_the_end()
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    assert (runtime.leasing, ranges.begun, ranges.stops_at_the_end) == (None, 1, False)
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    assert ranges.begun == 1
    assert kinds.enter(pb.Consistency(mode="Asynchronous")) is True
    assert (runtime.leasing is ranges, ranges.begun) == (True, 2)


@pytest.mark.parametrize(("env", "told"), [("Asynchronous", ""), ("Synchronous", "BoundedStaleness")])
def test_a_script_that_cannot_train_without_common_steps_says_so_and_is_not_made_to(
    env: str, told: str
) -> None:
    runtime = Told(env)
    kinds = Consistencies(runtime, None, "average would differ")  # type: ignore[arg-type]
    assert (runtime.bound, runtime.leasing) == (["average would differ"], None)
    assert kinds.enter(pb.Consistency(mode="Synchronous")) is False
    with pytest.raises(UsageError, match="average would differ"):
        kinds.enter(pb.Consistency(mode=told))


def test_a_call_that_needs_common_steps_is_told_once() -> None:
    runtime = Told()
    kinds = Consistencies(runtime, Ranges(), "")  # type: ignore[arg-type]
    kinds.needs_steps("process_group()")
    kinds.needs_steps("retry()")
    assert runtime.bound == ["", "the script calls process_group() inside of a training loop"]
