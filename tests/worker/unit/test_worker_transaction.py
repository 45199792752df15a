"""The step's states: who may do what, and when a drop still counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from springtide.errors import Dropped, UsageError
from springtide.train_step.transaction import Phase, Transaction


def opened() -> Transaction:
    transaction = Transaction()
    transaction.begin()
    return transaction


def test_committed_step() -> None:
    transaction = opened()
    transaction.require_open("backward()")
    transaction.start_stepping()
    assert not transaction.drop("too late")
    transaction.finish_stepping()
    assert not transaction.drop("too late")
    transaction.check_alive()
    assert transaction.phase is Phase.STEPPED
    transaction.end()
    assert transaction.phase is Phase.IDLE


def test_dropped_step_raises_at_every_call_until_its_end() -> None:
    transaction = opened()
    assert transaction.drop("a member died")
    for call in (transaction.check_alive, transaction.start_stepping):
        with pytest.raises(Dropped, match="a member died"):
            call()
    for _ in range(2):
        with pytest.raises(Dropped):
            transaction.require_open("backward()")
    transaction.end()
    transaction.begin()
    transaction.require_open("backward()")


def test_drop_between_steps_drops_next_until_a_generation() -> None:
    transaction = Transaction()
    assert transaction.drop("the generation is over")
    transaction.begin()
    with pytest.raises(Dropped):
        transaction.require_open("backward()")
    transaction.end()
    transaction.allow()
    transaction.begin()
    transaction.require_open("backward()")


def test_dropped_is_no_exception_that_scripts_catch() -> None:
    assert not issubclass(Dropped, Exception)


def test_calls_in_the_wrong_place_say_what_to_do() -> None:
    transaction = Transaction()
    with pytest.raises(UsageError, match=r"optimizer.step\(\) outside of a step: .*with springtide.step\(\)"):
        transaction.require_open("optimizer.step()")
    transaction.begin()
    with pytest.raises(UsageError, match="inside another one"):
        transaction.begin()
    transaction.start_stepping()
    transaction.finish_stepping()
    with pytest.raises(UsageError, match=r"report\(\) after optimizer.step\(\)"):
        transaction.require_open("report()")


def test_broken_step_is_final() -> None:
    transaction = opened()
    transaction.break_off("left by ValueError")
    for call in (transaction.begin, lambda: transaction.require_open("backward()")):
        with pytest.raises(UsageError, match="left by ValueError"):
            call()
    assert not transaction.drop("anything")


def test_finishing_step_computes_on_and_never_commits() -> None:
    """The calls of a micro-batch go on, because its gradients are kept; all others leave it."""
    transaction = Transaction()
    transaction.begin(finishes=True)
    assert transaction.drop("a member died")
    assert transaction.phase is Phase.FINISHING
    assert transaction.drop("again"), "a report that says so is no lie"
    transaction.check_alive()
    transaction.require_open("backward()", finishing=True)
    with pytest.raises(Dropped, match="a member died"):
        transaction.require_open("optimizer.step()")
    assert transaction.phase is Phase.DROPPED
    with pytest.raises(Dropped):
        transaction.require_open("backward()", finishing=True)


@pytest.mark.parametrize("move", [Transaction.start_stepping, Transaction.set_aside, Transaction.vote])
def test_finishing_step_goes_no_other_way(move: Callable[[Transaction], None]) -> None:
    transaction = Transaction()
    transaction.begin(finishes=True)
    transaction.drop("a member died")
    with pytest.raises(Dropped, match="a member died"):
        move(transaction)
    assert transaction.phase is Phase.DROPPED


def test_only_what_is_finishing_is_finished() -> None:
    transaction = opened()
    transaction.finish()
    assert transaction.phase is Phase.OPEN
    transaction.start_stepping()
    transaction.finish()
    assert transaction.phase is Phase.STEPPING
