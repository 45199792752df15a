"""How a session begins, and that its reports go on whatever one of them meets."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from springtide.coordination.progress import CommitLog
from springtide.coordination.session import Session, SessionSources
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.versions import OWN


class OddSpans:
    """Fail as `tuple()` of a generator does in a thread while another one calls gc.get_objects()."""

    def __init__(self) -> None:
        self.looks = 0
        self.third = threading.Event()

    def look(self) -> None:
        self.looks += 1
        if self.looks >= 3:
            self.third.set()
        raise SystemError("Objects/tupleobject.c:927: bad argument to internal function")


class SlowCoordinator(pb_grpc.CoordinatorServicer):
    """Welcome a process a while after it has connected."""

    def __init__(self) -> None:
        self.welcomed = False

    def Session(self, messages: Iterator[pb.WorkerMessage], context: Any) -> Iterator[pb.CoordinatorMessage]:
        next(messages)
        time.sleep(0.3)
        self.welcomed = True
        welcome = pb.Welcome(incarnation=pb.Incarnation(number=1), speaks=speaks_to_proto(OWN))
        yield pb.CoordinatorMessage(welcome=welcome)
        for _ in messages:
            pass


def make_session(coordinator: str, spans: Any) -> Session:
    sources = SessionSources(
        state=MagicMock(),
        trainers=MagicMock(waiting_since=lambda: None),
        commits=CommitLog(),
        timing=MagicMock(take=lambda: None),
        state_transfer=MagicMock(),
        spans=spans,
    )
    listener = SimpleNamespace(
        on_over=lambda reason: None,
        on_boundary=lambda: None,
        on_feed=lambda order: None,
        current_activity=lambda: None,
        write_outcome=lambda: None,
    )
    return Session(Settings(coordinator=coordinator, token="t"), sources, listener)


def test_scripts_go_on_when_their_process_has_connected() -> None:
    """gRPC reads the environment while it connects, and a script may add to it after `init()`."""
    coordinator = SlowCoordinator()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    session = make_session(f"127.0.0.1:{port}", MagicMock())
    try:
        session.start()
        assert coordinator.welcomed
        assert session.missing_seconds() == 0
    finally:
        session.close(None)
        server.stop(None).wait(10)


def test_scripts_go_on_without_a_coordinator() -> None:
    session = make_session("127.0.0.1:1", MagicMock())
    try:
        session.start()
        assert session.missing_seconds() > 0
    finally:
        session.close(None)


def test_reports_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    spans = OddSpans()
    session = make_session("127.0.0.1:1", spans)
    session.start()
    try:
        assert spans.third.wait(30)  # its heartbeats would have ended with the first one
        session.note_term(time.monotonic())
        deadline = time.monotonic() + 30
        while not session.membership.leaving and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.membership.leaving == "SIGTERM"  # though every report fails
    finally:
        session.close(None)
    told = [record for record in caplog.records if "a report to the coordinator failed" in record.message]
    assert len(told) == 1
    assert told[0].exc_info is not None
