"""The thread that reports to the coordinator goes on whatever one report meets."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from springtide.coordination.progress import CommitLog
from springtide.coordination.session import Session, SessionSources
from springtide.settings import Settings


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


def test_reports_go_on_after_one_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    spans: Any = OddSpans()
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
    session = Session(Settings(coordinator="127.0.0.1:1", token="t"), sources, listener)
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
