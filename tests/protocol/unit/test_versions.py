"""Two releases agree on a version that both speak, and on the capabilities that both have."""

from __future__ import annotations

import pytest

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import speaks_from_proto, speaks_to_proto
from springtide_protocol.limits import MAX_CAPABILITIES, MAX_CAPABILITY_CHARACTERS
from springtide_protocol.versions import (
    CAPABILITY_OF,
    OWN,
    PEERS,
    STANDBY,
    Agreement,
    IncompatibleError,
    Speaks,
    agree,
    agreed,
    as_coordinator,
    as_operator,
    as_server,
    as_worker,
    may_send,
)

COORDINATOR = "the coordinator (the operator, or spec.coordinator.image)"
WORKER = "springtide in the workers' image"


@pytest.mark.parametrize(
    ("worker", "coordinator", "version"),
    [((1, 2), (1, 2), 2), ((1, 1), (1, 2), 1), ((1, 2), (1, 1), 1), ((2, 3), (1, 2), 2), ((3, 9), (1, 5), 5)],
)
def test_overlapping_ranges_agree_on_the_newest(
    worker: tuple[int, int], coordinator: tuple[int, int], version: int
) -> None:
    found = agree(as_worker(Speaks(*worker)), as_coordinator(Speaks(*coordinator)))
    assert found == Agreement(version)


@pytest.mark.parametrize(
    ("worker", "coordinator", "upgrade"),
    [
        ((3, 4), (1, 2), COORDINATOR),
        ((1, 1), (2, 3), WORKER),
        ((0, 0), (1, 2), WORKER),
        ((0, 0), (0, 0), COORDINATOR),
        ((7, 2), (1, 2), COORDINATOR),
    ],
)
def test_disjoint_ranges_name_the_side_to_upgrade(
    worker: tuple[int, int], coordinator: tuple[int, int], upgrade: str
) -> None:
    found = agree(as_worker(Speaks(*worker)), as_coordinator(Speaks(*coordinator)))
    assert isinstance(found, str)
    assert found.endswith(f": upgrade {upgrade}")
    assert found.startswith(f"the worker speaks {Speaks(*worker)}, the coordinator {Speaks(*coordinator)}")


def test_order_of_the_two_does_not_matter() -> None:
    one, other = as_operator(Speaks(1, 1)), as_server(Speaks(2, 3))
    assert str(agree(one, other)).endswith(": upgrade the operator")
    assert str(agree(other, one)).endswith(": upgrade the operator")


def test_disagreement_is_raised_where_it_is_asked_for() -> None:
    with pytest.raises(IncompatibleError, match="upgrade the operator"):
        agreed(as_operator(Speaks(1, 1)), as_coordinator(Speaks(2, 3)))
    assert agreed(as_operator(OWN), as_coordinator(OWN)).version == OWN.newest


def test_capabilities_are_those_of_both() -> None:
    one = as_worker(Speaks(1, 2, frozenset({"a", "b"})))
    other = as_coordinator(Speaks(1, 2, frozenset({"b", "c"})))
    assert agree(one, other) == Agreement(2, frozenset({"b"}))


def test_message_of_a_new_kind_needs_its_capability() -> None:
    needs = {"tide": "tides"}
    assert may_send("hello", (), needs)
    assert may_send(None, (), needs)
    assert not may_send("tide", (), needs)
    assert may_send("tide", ("tides",), needs)


def test_own_release_has_all_capabilities_of_its_table() -> None:
    assert {*CAPABILITY_OF.values(), STANDBY, PEERS} == OWN.capabilities
    assert OWN.peers == PEERS
    assert Speaks(1, 2, frozenset({"heartbeat"})).peers == ""
    assert OWN.newest - OWN.oldest <= 1  # the release before this one is understood, older ones are not


def test_what_is_told_comes_back() -> None:
    speaks = Speaks(1, 2, frozenset({"a", "b"}))
    assert speaks_from_proto(speaks_to_proto(speaks), 1) == speaks


def test_peer_without_a_range_speaks_its_one_version() -> None:
    assert speaks_from_proto(pb.Speaks(), 1) == Speaks(1, 1)
    assert speaks_from_proto(pb.Speaks(capabilities=["a"]), 7) == Speaks(7, 7)


def test_capabilities_beyond_all_limits_are_left_out() -> None:
    told = pb.Speaks(oldest_version=1, newest_version=2, capabilities=["x" * (MAX_CAPABILITY_CHARACTERS + 1)])
    told.capabilities.extend(f"c{number}" for number in range(2 * MAX_CAPABILITIES))
    assert len(speaks_from_proto(told, 1).capabilities) == MAX_CAPABILITIES
