"""Kinds of messages that only a later release knows are ignored, and logged once."""

from __future__ import annotations

import logging

import pytest
from later_messages import later

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.unknown_kinds import UnknownKinds, unknown_kind


@pytest.mark.parametrize("kind", [pb.WorkerMessage, pb.CoordinatorMessage, pb.ServerMessage, pb.ServerOrder])
def test_kind_of_a_later_release_is_found_by_its_number(kind: type[pb.WorkerMessage]) -> None:
    assert unknown_kind(kind.FromString(later(99))) == 99
    assert unknown_kind(kind()) == 0


def test_known_kind_with_an_unknown_field_is_known() -> None:
    told = pb.WorkerMessage(leaving=pb.Leaving(reason="SIGTERM")).SerializeToString()
    assert unknown_kind(pb.WorkerMessage.FromString(told + later(99))) == 0


def test_each_unknown_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownKinds()
    with caplog.at_level(logging.WARNING):
        for number in (98, 99, 98, 99):
            assert unknown.ignores(pb.WorkerMessage.FromString(later(number)), "w0")
        assert not unknown.ignores(pb.WorkerMessage(), "w0")
    assert ["kind 98" in text for text in caplog.messages] == [True, False]
    assert ["kind 99" in text for text in caplog.messages] == [False, True]
    assert caplog.messages[0].startswith("w0, of a later release")


def test_flood_of_unknown_kinds_does_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownKinds()
    with caplog.at_level(logging.WARNING):
        for number in range(100, 1000):
            assert unknown.ignores(pb.WorkerMessage.FromString(later(number)), "w0")
    assert len(caplog.messages) == 64
