"""The last things that a worker's process does."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from springtide.comm.process_group import Group
from springtide.coordination import outcome
from springtide.elastic.exit import ExitParts, ProcessExit
from springtide.elastic.training_state import TrainingState
from springtide.settings import Settings


def test_exit_leaves_memory_to_the_system_at_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []
    message = tmp_path / "termination-log"

    def note(name: str) -> None:
        done.append(f"{name} with an outcome" if message.exists() else name)

    state = TrainingState(Group(None, 0, 1, 1.0))
    state.end_with(outcome.Left("SIGTERM"))
    ends = ProcessExit(
        ExitParts(
            settings=Settings(coordinator="127.0.0.1:1", termination_log=str(message)),
            state=state,
            evaluations=MagicMock(),
            session=None,
            flush=lambda seconds: note("flush"),
            close=lambda: note("close"),
        )
    )
    monkeypatch.setattr(gc, "freeze", lambda: note("freeze"))
    ends.run(os.getpid() + 1)  # as in a child that a data loader forked
    assert done == []
    assert not message.exists()
    ends.run(os.getpid())
    assert done == ["flush", "close with an outcome", "freeze with an outcome"]
