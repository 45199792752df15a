"""A module of a user's own, which no worker has: functions that are sent, and one that is not."""

from __future__ import annotations

import dataclasses
import functools
import json as js
import os.path
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cli_fake_kube
import torch
import torch.nn.functional as F
from torch import nn

EPOCHS = 3
RATES = {"slow": [0.1, 0.2], "fast": (1, None)}
lock = threading.Lock()
model = nn.Linear(1, 1)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return call


@dataclasses.dataclass
class Settings:
    """Fields in a class body, of which one is made by a helper."""

    rate: float = RATES["slow"][0]
    names: list[str] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = tuple(range(EPOCHS))


def double(value: float) -> float:
    return 2 * value if value < 1 else halve(value)


def halve(value: float) -> float:
    return double(value / 8)


@logged
def train(path: str, steps: Sequence[int] = (1, EPOCHS)) -> None:
    """Use all of the above."""

    def inner(settings: Settings) -> list[float]:
        return [double(settings.rate + epoch) for epoch in steps]

    text = """keeps
    its indentation"""
    data = torch.utils.data.TensorDataset(torch.ones(2, 1))
    loss = F.mse_loss(nn.Linear(1, 1)(data.tensors[0]), torch.zeros(2, 1))
    with open(os.path.join(path), "w") as file:
        js.dump({"rates": inner(Settings()), "text": text, "finite": bool(loss.isfinite())}, file)


def with_lock() -> None:
    with lock:
        pass


def with_model() -> None:
    def step() -> Any:
        return model(torch.ones(1, 1))

    step()


def with_another_module() -> None:
    cli_fake_kube.job()


def with_nothing() -> None:
    undefined()  # type: ignore[name-defined]  # noqa: F821


async def asynchronous() -> None:
    pass


def generator() -> Iterator[int]:
    yield 1


class Trainer:
    def fit(self) -> None:
        pass


def nested(live: Any, plain: int) -> dict[str, Callable[..., Any]]:
    """Return functions that close over what is given, and one that closes over nothing."""
    letters = """a
b"""

    def alone(path: str) -> None:
        text = """c
d"""
        with open(path, "w") as file:
            file.write(text)

    def over_live() -> None:
        print(live)

    def over_plain(path: str) -> None:
        with open(path, "w") as file:
            file.write(f"{letters} {plain}")

    return {"alone": alone, "live": over_live, "plain": over_plain}
