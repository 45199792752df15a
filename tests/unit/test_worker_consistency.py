"""A worker takes its bound from Start, and trains in no kind of consistency that it was not made for."""

from __future__ import annotations

import pytest

from springtide.consistency import staleness_bound
from springtide.environment import Settings
from springtide_coordinator import coordinator_pb2 as pb


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
