"""`batches(..., train=False)` in a script without a job, and what it refuses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from worker_alone import Script, library

import springtide
from springtide.elastic.runtime import Runtime

X = torch.arange(10, dtype=torch.float32)


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with library() as runtime:
        yield runtime


def train(script: Script) -> Iterator[int]:
    """Run the training loop; yields between steps."""
    for number, batch in enumerate(script.batches()):
        with springtide.step():
            script.loss(batch).backward()
            script.finish()
        yield number


def test_means_by_samples_between_steps_and_after_the_loop(runtime: Runtime) -> None:
    script = Script()
    seen: list[list[float]] = []
    for _ in train(script):
        evaluation = springtide.batches(X, batch_size=4, train=False)
        for batch in evaluation:
            seen.append(batch.data.tolist())
            springtide.report(value=batch.data.mean(), constant=2)
        assert evaluation.values == {"value": 4.5, "constant": 2.0}
    assert seen[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(seen) == 9
    evaluation = springtide.batches(X[:3], batch_size=8, train=False)
    for batch in evaluation:
        springtide.report(value=batch.data.sum())
    assert evaluation.values == {"value": 3.0}
    assert runtime.state.values == {"value": 3.0, "constant": 2.0}
    assert runtime.position.cursor.step == 3


def test_refusals(runtime: Runtime) -> None:
    script = Script()
    with pytest.raises(springtide.UsageError, match="before the first training loop"):
        next(springtide.batches(X, batch_size=4, train=False))
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        springtide.batches(X, batch_size=0, train=False)
    with pytest.raises(ValueError, match="over the data once"):
        springtide.batches(X, batch_size=4, epochs=2, train=False)  # type: ignore[call-overload]
    steps = train(script)
    next(steps)
    evaluation = springtide.batches(X, batch_size=4, train=False)
    with pytest.raises(springtide.UsageError, match="known when its loop has ended"):
        print(evaluation.values)
    next(evaluation)
    with pytest.raises(springtide.UsageError, match=r"has not ended.*break"):
        next(springtide.batches(X, batch_size=4, train=False))
    with pytest.raises(springtide.UsageError, match=r"has not ended.*break"):
        next(steps)
    assert "train=False" in str(runtime.exit.finished())


def test_evaluation_inside_of_a_body(runtime: Runtime) -> None:
    script = Script()
    for _ in script.batches():
        with contextlib.ExitStack() as stack:
            stack.enter_context(pytest.raises(springtide.UsageError, match="inside of a step"))
            stack.enter_context(springtide.step())
            next(springtide.batches(X, batch_size=4, train=False))
        break


def test_evaluations_of_a_state_are_counted(runtime: Runtime) -> None:
    script = Script()
    for number in train(script):
        _, evaluations, errands = runtime.evaluations.begun
        done = 0
        for _ in range(2):
            for _ in springtide.batches(X, batch_size=4, train=False):
                pass
            for _ in runtime.evaluations.errand():
                done += 1
        assert done == 2
        assert runtime.evaluations.begun == (number + 1, evaluations + 2, errands + 2)
