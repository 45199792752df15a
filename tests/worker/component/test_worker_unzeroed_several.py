"""Gradients of several optimizers that a script does not zero, whoever makes the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.errors import UsageError

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
STRATEGIES: dict[str, dict[str, Any]] = {
    "AllReduce": {},
    "exact": {"logical_workers": 4},
    "ParameterServer": {"strategy": "ParameterServer", "token": TOKEN},
}
DROPPED = 2
"""Number of the step that is done again."""


class Pair:
    """Two models, and what a body does with them."""

    def __init__(self) -> None:
        with seeded(5):
            self.models = [torch.nn.Linear(4, 3), torch.nn.Linear(3, 1)]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]

    def step(self, x: torch.Tensor, zero: Callable[[Pair, str], None]) -> None:
        zero(self, "begin")
        self.models[1](torch.tanh(self.models[0](x))).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        zero(self, "end")

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for m in self.models for p in m.parameters()]).clone()


def zeroes(when: str, which: slice = slice(None), **how: Any) -> Callable[[Pair, str], None]:
    """Return what zeroes the gradients of some of the optimizers at the begin or the end of a body."""

    def zero(pair: Pair, now: str) -> None:
        for optimizer in pair.optimizers[which] if now == when else ():
            optimizer.zero_grad(**how)

    return zero


def train(strategy: str, zero: Callable[[Pair, str], None]) -> torch.Tensor:
    tries = dict[int, int]()

    def script(rank: Rank) -> torch.Tensor:
        pair = Pair()
        rank.distribute(pair.models, pair.optimizers)
        if running:
            rank.enter_servers(names(running), Store())
        for batch in rank.batches(X, batch_size=8, epochs=2, seed=0):
            with rank.step():
                number = tries[rank.step_number] = tries.get(rank.step_number, 0) + 1
                if rank.step_number == DROPPED and number == 1:
                    rank.trainer.drop("the test says so")
                pair.step(batch.data, zero)
        rank.runtime.settle(None)
        # In exact mode the part that is computed when its step is dropped is kept.
        assert strategy == "exact" or (tries[1], tries[DROPPED]) == (1, 2)
        return pair.values()

    with servers(1 if strategy == "ParameterServer" else 0) as running:
        return on_ranks(1, script, **STRATEGIES[strategy])[0]


def alone(zero: Callable[[Pair, str], None]) -> torch.Tensor:
    pair, cursor = Pair(), Cursor()
    plan = plan_loop(X, batch_size=8, epochs=2, seed=0)
    while not plan.ended(cursor):
        pair.step(X[plan.global_ids(cursor)], zero)
        cursor = plan.advance(cursor)
    return pair.values()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("when", ["begin", "end"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_zeroed_early_or_late(strategy: str, when: str, set_to_none: bool) -> None:
    """The numbers are plain PyTorch's, through a step that is done again."""
    zero = zeroes(when, set_to_none=set_to_none)
    torch.testing.assert_close(train(strategy, zero), alone(zero), rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("zeroed", "left"), [(slice(0, 0), r"\w"), (slice(0, 1), "1"), (slice(1, 2), "0")])
def test_those_that_nobody_zeroes_are_refused(strategy: str, zeroed: slice, left: str) -> None:
    """The step that is done again is the second one, in which it is seen."""
    with pytest.raises(UsageError, match=rf"the gradient of {left}\.\w+ was not zeroed since the last step"):
        train(strategy, zeroes("end", zeroed))
