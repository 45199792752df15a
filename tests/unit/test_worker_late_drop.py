"""A generation's end that drops its step late does not drop those of the next generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from springtide.recovery import Recovery
from springtide.transaction import Phase, Transaction
from springtide_protocol import coordinator_pb2 as pb


def test_a_step_is_dropped_for_its_own_generation_only() -> None:
    transaction = Transaction()
    runtime: Any = MagicMock()
    runtime.ready.return_value.transaction = transaction
    runtime.position = SimpleNamespace(cursor=SimpleNamespace(step=4))
    membership: Any = MagicMock()

    def await_start(_: object) -> object:
        transaction.drop("worker-1 is lost")  # the stream's thread goes on where it was stopped
        return object()

    membership.await_start.side_effect = await_start
    recovery = Recovery(runtime, membership)
    recovery._form = lambda answer, stage: None  # type: ignore[assignment,method-assign]
    recovery._enter_generation(0, pb.DROPPED, "worker-1 is lost", [])
    transaction.begin()
    assert transaction.phase is Phase.OPEN
