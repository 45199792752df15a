"""Values of parameters that do not come from elsewhere: what becomes of the step that waits for them."""

from __future__ import annotations

import pytest
import torch

from springtide.comm.buckets import Buckets
from springtide.comm.layout import Field, plan_layout
from springtide.errors import Dropped, SpringtideError
from springtide.train_step.buffers import Buffers
from springtide.train_step.reduction import Reduction
from springtide.train_step.transaction import Phase, Transaction


@pytest.fixture
def transaction() -> Transaction:
    return Transaction()


@pytest.fixture
def reduction(transaction: Transaction) -> Reduction:
    buckets = Buckets(plan_layout([Field("weight", (2,), torch.float32)], 1))
    return Reduction(buckets, Buffers(torch.nn.Identity(), None), None, transaction)


def fail() -> None:
    raise RuntimeError("the newest values of weight: the generation is over")


def test_step_that_is_finishing_is_dropped(transaction: Transaction, reduction: Reduction) -> None:
    """The error of a committed step without values would end a script that handles errors itself."""
    transaction.begin(finishes=True)
    transaction.drop("worker-2 is lost")
    assert transaction.phase is Phase.FINISHING
    with pytest.raises(Dropped, match="worker-2 is lost"):
        reduction.ask(fail)
    assert transaction.phase is Phase.DROPPED
    assert reduction.failure is None


def test_step_that_is_finishing_goes_on_with_values(transaction: Transaction, reduction: Reduction) -> None:
    transaction.begin(finishes=True)
    transaction.drop("worker-2 is lost")
    assert reduction.ask(lambda: None) is None
    assert transaction.phase is Phase.FINISHING


@pytest.mark.parametrize("finishes", [False, True])
def test_step_that_is_dropped_meanwhile_is_left(
    transaction: Transaction, reduction: Reduction, finishes: bool
) -> None:
    transaction.begin(finishes)

    def drop_and_fail() -> None:
        transaction.drop("worker-2 is lost")
        fail()

    with pytest.raises(Dropped, match="worker-2 is lost"):
        reduction.ask(drop_and_fail)
    assert transaction.phase is Phase.DROPPED


def test_committed_step_cannot_go_on_without_values(transaction: Transaction, reduction: Reduction) -> None:
    transaction.begin(finishes=True)
    transaction.start_stepping()
    with pytest.raises(SpringtideError, match="the values of a committed step cannot be had"):
        reduction.ask(fail)
    transaction.finish_stepping()
    with pytest.raises(SpringtideError, match="the values of a committed step cannot be had"):
        reduction.ask(fail)


def test_between_steps_the_reason_is_returned(transaction: Transaction, reduction: Reduction) -> None:
    assert reduction.ask(fail) == "the newest values of weight: the generation is over"
    assert reduction.failure is not None
