"""A generation's end that drops its step late does not drop those of the next generation."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from springtide.comm.process_group import Group
from springtide.coordination.park_reply import Leave
from springtide.elastic.balancer import Balancer
from springtide.elastic.recovery import Recovery, RecoveryParts
from springtide.elastic.training_state import TrainingState
from springtide.settings import Settings
from springtide.train_step.transaction import Phase, Transaction


class Left(Exception):
    """The coordinator has let the process go."""


def depart(answer: Leave) -> None:
    raise Left


def test_late_drop_leaves_the_next_generation_alone() -> None:
    transaction = Transaction()
    trainers: Any = MagicMock()
    trainers.require.return_value.transaction = transaction
    trainers.require.return_value.servers = None
    membership: Any = MagicMock(over="worker-1 is lost")

    def await_start(*_: object) -> Leave:
        transaction.drop("worker-1 is lost")  # the stream's thread goes on where it was stopped
        return Leave("the job needs fewer")

    membership.await_start.side_effect = await_start
    recovery = Recovery(
        RecoveryParts(
            settings=Settings(),
            state=TrainingState(Group(None, 0, 1, 1.0)),
            trainers=trainers,
            accounting=MagicMock(),
            saver=MagicMock(),
            consistencies=MagicMock(async_loop=None),
            retry_blocks=MagicMock(),
            state_transfer=MagicMock(),
            membership=membership,
            memory=MagicMock(),
            balancer=Balancer(by_speed=True, logical_workers=0),
            salvage=MagicMock(),
            following=MagicMock(),
            spans=MagicMock(),
            check_term=lambda: None,
            depart=depart,
        )
    )
    with pytest.raises(Left):
        recovery.stand(0)
    membership.park.assert_called_once()
    assert membership.park.call_args.args[1] == "worker-1 is lost"
    transaction.begin()
    assert transaction.phase is Phase.OPEN
