"""Ways in which scripts use their optimizers: on servers each means the same as in one process, or is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_ranks import Rank, on_ranks, seeded

from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.errors import UsageError
from springtide.ps.forward_waits import ForwardWaits
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.frames import FrameError

SAMPLES, BATCH, EPOCHS = 24, 8, 3
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
Y = X[:, :2].sum(1, keepdim=True)


class Branches(torch.nn.Module):
    """A body, and heads of which a step takes one."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(5):
            self.body = torch.nn.Linear(4, 6)
            self.heads = torch.nn.ModuleList([torch.nn.Linear(6, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[head](torch.tanh(self.body(x)))
        return result


class Script:
    """edit: called after each step, with its number from 1. head: by the step's number."""

    def __init__(
        self,
        edit: Callable[[Script, int], object] = lambda script, number: None,
        head: Callable[[int], int] = lambda number: 0,
        parameters: Callable[[Branches], Any] = lambda model: model.parameters(),
        dtype: torch.dtype = torch.float32,
        make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.9, weight_decay=0.01
        ),
    ) -> None:
        self.model = Branches().to(dtype)
        self.optimizer = make(parameters(self.model))
        self._edit, self._head, self._dtype = edit, head, dtype

    def step(self, ids: torch.Tensor, number: int) -> None:
        outputs = self.model(X[ids].to(self._dtype), self._head(number))
        (outputs - Y[ids].to(self._dtype)).square().mean().backward()
        self.optimizer.step()
        self._edit(self, number)
        self.optimizer.zero_grad()

    def values(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()


def alone(**script: Any) -> torch.Tensor:
    made, cursor, number = Script(**script), Cursor(), 0
    plan = plan_loop(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0)
    while not plan.ended(cursor):
        number += 1
        made.step(plan.global_ids(cursor), number)
        cursor = plan.advance(cursor)
    return made.values()


def on_servers(size: int = 2, **script: Any) -> torch.Tensor:
    store = Store()

    def run(rank: Rank) -> torch.Tensor:
        made = Script(**script)
        rank.distribute(made.model, made.optimizer)
        rank.enter_servers(names(running), store)
        for batch in rank.batches(torch.arange(SAMPLES), batch_size=BATCH, epochs=EPOCHS, seed=0):
            number = rank.step_number
            with rank.step():
                made.step(batch.data, number)
        rank.runtime.settle(None)
        return made.values()

    with servers(2) as running:
        results = on_ranks(size, run, strategy="ParameterServer", token=TOKEN)
    assert all(torch.equal(values, results[0]) for values in results)
    first: torch.Tensor = results[0]
    return first


def give_numpy(script: Script, number: int) -> None:
    script.optimizer.param_groups[0]["lr"] = np.float32(0.1) / number


def freeze_for_a_while(script: Script, number: int) -> None:
    script.model.body.requires_grad_(not 2 <= number < 5)


def rest_momentum(script: Script, number: int) -> None:
    script.optimizer.param_groups[0]["momentum"] = 0 if number in (2, 3) else 0.8


@pytest.mark.parametrize(
    "script",
    [
        {"head": lambda number: min(number, 5) // 2},
        {"edit": give_numpy},
        {"edit": freeze_for_a_while},
        {"edit": rest_momentum},
    ],
    ids=["heads-begin-late", "numpy", "frozen", "momentum-rests"],
)
def test_the_numbers_are_those_of_one_process(script: dict[str, Any]) -> None:
    torch.testing.assert_close(on_servers(**script), alone(**script), rtol=0, atol=2e-5)


def test_parts_of_an_uncalled_model_wait_for_values_too() -> None:
    model = Branches()
    waited: list[Any] = []
    numbers = {id(item): number for number, item in enumerate(model.parameters())}
    ForwardWaits(model, numbers, lambda parameters: waited.append(parameters))
    model.body(X)
    assert waited == [None]
    model(X, 0)
    waited.clear()
    model.body(X)
    assert waited == [[0, 1]]


def test_parts_without_parameters_wait_for_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(X.shape[1], 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    waited: list[Any] = []
    numbers = {id(item): number for number, item in enumerate(model.parameters())}
    ForwardWaits(model, numbers, lambda parameters: waited.append(parameters))
    model(X)
    waited.clear()
    model(X)
    assert waited == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_trained(dtype: torch.dtype) -> None:
    """Each part of a batch is rounded by itself."""
    found, expected = on_servers(dtype=dtype), alone(dtype=dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


def add_group(script: Script, number: int) -> None:
    if number == 2:
        script.optimizer.add_param_group({"params": list(script.model.body.parameters())})


def swap_groups(script: Script, number: int) -> None:
    script.optimizer.param_groups.reverse()


def load_state(script: Script, number: int) -> None:
    if number == 2:
        script.optimizer.load_state_dict(script.optimizer.state_dict())


def give_text(script: Script, number: int) -> None:
    script.optimizer.param_groups[0]["weight_decay"] = "0.1"


def switch_on(name: str, value: Any) -> Any:
    def edit(script: Script, number: int) -> None:
        if number == 2:
            script.optimizer.param_groups[0][name] = value

    return edit


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            {"edit": add_group, "parameters": lambda model: model.heads.parameters()},
            "parameter groups of SGD were changed after distribute",
        ),
        (
            {
                "edit": swap_groups,
                "parameters": lambda model: [{"params": [item]} for item in model.body.parameters()],
            },
            "parameter groups of SGD were changed after distribute",
        ),
        ({"edit": load_state}, "load_state_dict.. of an optimizer after training began"),
        ({"edit": give_text}, "option weight_decay is '0.1'"),
        (
            {"edit": switch_on("amsgrad", True), "make": torch.optim.Adam},
            "option amsgrad of Adam was switched",
        ),
        (
            {"edit": switch_on("momentum", 0.9), "make": torch.optim.RMSprop},
            "option momentum of RMSprop was switched on after training began",
        ),
    ],
    ids=["group", "order", "state", "text", "amsgrad", "momentum"],
)
def test_what_servers_would_not_hear_of_is_refused(script: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        on_servers(size=1, **script)


def test_saving_the_optimizers_state_says_it_is_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def save(script: Script, number: int) -> None:
        assert not script.optimizer.state_dict()["state"]

    on_servers(size=1, edit=save)
    told = [record.message for record in caplog.records if "state_dict() of SGD" in record.message]
    assert told == [
        "state_dict() of SGD has its options only: its state lives on the parameter servers. spec.checkpoint "
        "saves both"
    ]


def test_a_state_is_loaded_before_the_first_step() -> None:
    """An optimizer's state may be loaded before the first step, before `distribute()` or after it."""
    store = Store()

    def run(rank: Rank) -> None:
        made = Script()
        rank.distribute(made.model, made.optimizer)
        made.optimizer.load_state_dict(made.optimizer.state_dict())
        rank.enter_servers(names(running), store)
        for batch in rank.batches(torch.arange(BATCH), batch_size=BATCH, epochs=1, seed=0):
            with rank.step():
                made.step(batch.data, 1)

    with servers(1) as running:
        on_ranks(1, run, strategy="ParameterServer", token=TOKEN)


@pytest.mark.parametrize("options", [{"momentum": 0, "nesterov": True}, {"momentum": 0.9, "lr": -0.1}])
def test_a_chunk_is_copied_whatever_a_script_has_set(options: dict[str, Any]) -> None:
    """torch refuses these when an optimizer is made, and takes them in a step."""
    chunk = Chunk(torch.ones(3), [(0, 0, 0, 3)], "sgd", [{"lr": 0.1, "momentum": 0.9, "nesterov": True}])
    chunk.apply(torch.ones(3), StepSpec(1.0, False, ({"lr": 0.1, "momentum": 0.9, "nesterov": True},)))
    chunk.apply(torch.ones(3), StepSpec(1.0, False, ({"lr": 0.1, "nesterov": True, **options},)))
    other = Chunk.load(*chunk.dump())
    for one in (chunk, other):
        one.apply(torch.ones(3), StepSpec(1.0, False, ({"lr": 0.1, "momentum": 0.9, "nesterov": True},)))
    assert torch.equal(chunk.values, other.values)


def test_unencodable_request_fails_and_connection_goes_on() -> None:
    with servers(1) as running:
        client = ServerClient(("127.0.0.1", running[0].port), TOKEN)
        try:
            with pytest.raises(FrameError, match=r"UPDATE says what cannot be sent: .*complex"):
                client.update("sgd", lr=1j).result(30)
            client.update("sgd", lr=0.1).result(30)
        finally:
            client.close()
