"""Loops that the job has ended and that give a joiner nothing: it says why, once, and what to do."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from springtide.comm.process_group import Group
from springtide.data.loop import LoopPlan, plan_loop
from springtide.elastic.past_loops import PastLoops
from springtide.elastic.training_state import TrainingState


def past_loops(tables: Any, pod: object) -> PastLoops:
    """Return those of a process whose trainer has tables, or is divided over a pod."""
    trainer = SimpleNamespace(tables=tables, pod=pod)
    trainers: Any = SimpleNamespace(require=lambda call: trainer)
    steps: Any = SimpleNamespace()
    return PastLoops(TrainingState(Group(None, 1, 2, 60.0)), trainers, steps)


@pytest.fixture
def plan() -> LoopPlan:
    return plan_loop(torch.zeros(8, 2), batch_size=4)


@pytest.mark.parametrize(
    ("tables", "pod", "why"),
    [
        ({0: object()}, None, "rows of embedding tables are elsewhere"),
        ({}, object(), "a pod with springtide.mesh() compute together"),
    ],
)
def test_empty_past_loop_is_told_of_once(
    tables: Any, pod: object, why: str, plan: LoopPlan, caplog: pytest.LogCaptureFixture
) -> None:
    past = past_loops(tables, pod)
    assert not past.is_possible
    with caplog.at_level(logging.WARNING):
        for stage in range(3):
            assert list(past.batches(plan, stage, None)) == []
    (record,) = caplog.records
    assert record.getMessage().startswith("batches(): the job has ended training loop 1, which gives")
    assert why in record.getMessage()


def test_adapters_that_run_the_loop_are_told_nothing(
    plan: LoopPlan, caplog: pytest.LogCaptureFixture
) -> None:
    past = past_loops({0: object()}, None)
    past.leave_empty()
    with caplog.at_level(logging.WARNING):
        assert list(past.batches(plan, 0, None)) == []
    assert caplog.records == []
