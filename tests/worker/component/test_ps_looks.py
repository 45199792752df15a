"""A script looks at parameters where no module's forward runs: values from servers are waited for."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ps_late import Late
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

SAMPLES, BATCH = 24, 4
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)


class Net(torch.nn.Module):
    """odd: in every second step a layer's weight is used without its forward."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.first, self.second = torch.nn.Linear(4, 6), torch.nn.Linear(6, 6)
            self.last = torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = F.linear(hidden, self.second.weight, self.second.bias) if odd else self.second(hidden)
        result: torch.Tensor = self.last(hidden)
        return result


Look = Callable[["Script"], torch.Tensor]


class Script:
    """look: at the model, by where no forward has run since the last step. where: before (a forward, in the
    next body), after (the step, in its body), between (bodies).
    """

    def __init__(self, look: Look, where: str) -> None:
        self.model, self._look, self._where = Net(), look, where
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        with torch.no_grad():
            self.average = [parameter.clone() for parameter in self.parameters]
        self.seen: list[torch.Tensor] = []

    def step(self, x: torch.Tensor, y: torch.Tensor, number: int) -> None:
        extra = torch.zeros(())
        if self._where == "before":
            extra = self._look(self)
            self.seen.append(extra.detach().clone())
        loss = (self.model(x, number % 2 == 1) - y).square().mean() + 0.1 * extra.mean()
        loss.backward()
        self.optimizer.step()
        if self._where == "after":
            self.seen.append(self._look(self).detach().clone())
        self.optimizer.zero_grad()

    def between(self) -> None:
        if self._where == "between":
            self.seen.append(self._look(self).detach().clone())


def penalty(script: Script) -> torch.Tensor:
    return torch.stack([parameter.pow(2).sum() for parameter in script.parameters]).sum()


def of_the_optimizer(script: Script) -> torch.Tensor:
    norms = torch._foreach_norm([item for group in script.optimizer.param_groups for item in group["params"]])
    return torch.stack(list(norms))


def average(script: Script) -> torch.Tensor:
    with torch.no_grad():
        for own, parameter in zip(script.average, script.model.parameters(), strict=True):
            own.lerp_(parameter, 0.3)
    return torch.cat([own.reshape(-1) for own in script.average])


def projection(script: Script) -> torch.Tensor:
    return F.linear(X[:2], script.model.first.weight)


def vector(script: Script) -> torch.Tensor:
    return parameters_to_vector(script.model.parameters())


def functional(script: Script) -> torch.Tensor:
    result: torch.Tensor = torch.func.functional_call(
        script.model, dict(script.model.named_parameters()), (X[:3], True)
    )
    return result


def data(script: Script) -> torch.Tensor:
    return torch.stack([parameter.data.sum() for parameter in script.parameters])


def copied(script: Script) -> torch.Tensor:
    other = copy.deepcopy(script.model)
    assert all(type(parameter) is torch.nn.Parameter for parameter in other.parameters())
    return parameters_to_vector(other.parameters())


def pickled(script: Script) -> torch.Tensor:
    result: torch.Tensor = pickle.loads(pickle.dumps(script.model.second.weight))
    return result


def numbers(script: Script) -> torch.Tensor:
    return torch.tensor(script.model.last.weight.tolist())


def alone(look: Look, where: str) -> Script:
    script, cursor, number = Script(look, where), Cursor(), 0
    plan = plan_loop((X, Y), batch_size=BATCH, epochs=1, seed=0)
    while not plan.ended(cursor):
        number += 1
        ids = plan.global_ids(cursor)
        script.step(X[ids], Y[ids], number)
        script.between()
        cursor = plan.advance(cursor)
    return script


def on_servers(look: Look, where: str, **how: Any) -> Script:
    store = Store()

    def run(rank: Rank) -> Script:
        script, number = Script(look, where), 0
        rank.distribute(script.model, script.optimizer)
        rank.enter_servers(names(running), store)
        exchange = rank.trainer.servers
        assert exchange is not None
        late = Late(exchange, running, SAMPLES // BATCH)
        with contextlib.ExitStack() as stack:
            stack.callback(late.let_go)
            for x, y in rank.batches((X, Y), batch_size=BATCH, epochs=1, seed=0):
                number += 1
                with rank.step():
                    script.step(x, y, number)
                script.between()
        rank.runtime.settle(None)
        assert all(type(parameter) is torch.nn.Parameter for parameter in script.parameters)
        return script

    with servers(2) as running:
        [script] = on_ranks(1, run, strategy="ParameterServer", token=TOKEN, **how)
    assert isinstance(script, Script)
    return script


LOOKS = [penalty, of_the_optimizer, average, projection, vector, functional, data, copied, pickled, numbers]
PLACES = ["before", "after", "between"]


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["Synchronous", "Asynchronous"])
@pytest.mark.parametrize(
    ("look", "where"),
    [(look, PLACES[number % 3]) for number, look in enumerate(LOOKS)]
    + [(penalty, "after"), (penalty, "between")],
)
def test_what_is_seen_is_what_the_last_step_has_made(look: Look, where: str, consistency: str) -> None:
    found, expected = on_servers(look, where, consistency=consistency), alone(look, where)
    assert len(found.seen) == len(expected.seen) > 0
    for ours, theirs in zip(found.seen, expected.seen, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        parameters_to_vector(found.parameters), parameters_to_vector(expected.parameters), rtol=0, atol=2e-5
    )
