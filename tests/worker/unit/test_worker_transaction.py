"""The step's states: who may do what, and when a drop still counts."""

from __future__ import annotations

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
