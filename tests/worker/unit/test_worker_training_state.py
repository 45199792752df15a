"""The training state of a process: what its methods do, and that nothing else writes it."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from springtide.comm.process_group import Group
from springtide.coordination import outcome
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.loop import LoopPlan, plan_loop
from springtide.elastic.training_state import TrainingState
from springtide.train_step.state import Position

ALONE = Group(None, 0, 1, 1.0)


@pytest.fixture
def state() -> TrainingState:
    return TrainingState(ALONE)


@pytest.fixture
def plan() -> LoopPlan:
    return plan_loop(torch.arange(8), batch_size=4)


def test_commit_moves_the_position_and_counts_the_time(state: TrainingState) -> None:
    before = state.position
    state.commit(Cursor(0, 0, 4, 1), Ledger(), 2.5)
    state.commit(Cursor(0, 1, 0, 2), Ledger(), 1.5)
    assert (state.position.cursor.step, state.position.productive_seconds) == (2, 4.0)
    assert 2.0 <= time.time() - state.position.began_unix <= 30.0
    assert before == Position(Cursor(), Ledger()), "a reader of another thread keeps what it has read"


def test_advance_leaves_the_times(state: TrainingState) -> None:
    state.add_productive_time(2.0)
    began = state.position.began_unix
    state.advance(Cursor(0, 1, 0, 7), Ledger())
    assert (state.position.cursor.step, state.position.productive_seconds) == (7, 2.0)
    assert state.position.began_unix == began


@pytest.mark.parametrize(("stage", "expected"), [(0, 1), (1, 1), (3, 3)])
def test_skipping_to_a_loop_never_goes_back(state: TrainingState, stage: int, expected: int) -> None:
    state.adopt(Position(Cursor(stage=1, step=5), Ledger()))
    state.skip_to_loop(stage)
    assert (state.position.cursor.stage, state.position.cursor.step) == (expected, 5)


def test_loops_are_counted_and_the_last_can_be_reopened(state: TrainingState, plan: LoopPlan) -> None:
    assert (state.open_loop(plan), state.plan, state.opened_loops) == (0, plan, 1)
    state.close_loop(0)
    assert (state.plan, state.opened_loops, state.ended_loops) == (None, 1, 1)
    with contextlib.suppress(SystemExit), state.last_loop_reopened():
        assert state.plan is plan
        raise SystemExit(0)
    assert (state.plan, state.opened_loops, state.ended_loops) == (None, 1, 1)
    assert state.open_loop(plan) == 1


def test_warm_up_ends_in_the_own_group(state: TrainingState) -> None:
    imagined = Group(None, 2, 3, 0.0)
    with contextlib.suppress(KeyboardInterrupt), state.warm_up(imagined):
        assert (state.group, state.warming_up) == (imagined, True)
        raise KeyboardInterrupt
    assert (state.group, state.warming_up) == (ALONE, False)


def test_boundary_lasts_until_it_is_cleared(state: TrainingState) -> None:
    state.stop_at_boundary()
    other = Group(None, 1, 2, 1.0)
    state.use_group(other)
    state.count_generation()
    assert (state.boundary, state.group, state.generations) == (True, other, 1)
    state.clear_boundary()
    assert not state.boundary


def test_outcome_says_whether_the_failure_is_outside(state: TrainingState) -> None:
    assert (state.outcome, state.failed_outside) == (None, False)
    failed = outcome.Failed("OSError", "no space left")
    state.end_with(failed, failed_outside=True)
    assert (state.outcome, state.failed_outside) == (failed, True)


def test_newest_reported_value_counts(state: TrainingState) -> None:
    state.report({"loss": 2.0, "accuracy": 0.5})
    state.report({"loss": 1.0})
    assert state.values == {"loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    "name", [name for name, value in vars(TrainingState).items() if isinstance(value, property)]
)
def test_field_assigned_from_outside_is_refused(state: TrainingState, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(state, name, None)
