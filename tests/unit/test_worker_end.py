"""What a worker's process does last."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest

from springtide import ending, outcome


def test_memory_is_left_to_the_system_when_all_else_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def note(name: str) -> None:
        done.append(name)

    runtime = SimpleNamespace(
        outcome=outcome.Left("SIGTERM"),
        checkpoints=SimpleNamespace(flush=lambda seconds: note("flush")),
        write_outcome=lambda: note("write_outcome"),
        close=lambda: note("close"),
    )
    monkeypatch.setattr(gc, "freeze", lambda: note("freeze"))
    ending._at_exit(runtime, os.getpid() + 1)  # as in a child that a data loader forked
    assert done == []
    ending._at_exit(runtime, os.getpid())
    assert done == ["flush", "write_outcome", "close", "freeze"]
