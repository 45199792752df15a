"""A forward pass waits layer by layer for the values that are on their way from the servers.

Other looks at a parameter wait by `springtide.ps.lazy_values`.

A module's own parameters are waited for when its forward begins. The first forward shows which modules have
one: the parameters of those that have none (a projection that its parent uses directly) are waited for by the
nearest module around them that has. Until that is known the whole model is waited for.

A hook in the middle of compiled code would cut it in pieces, a graph for each layer. There the wait is where
the code begins: at the model, or at the part of it that was compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo

from springtide.ps.lazy_values import Pending
from springtide.train_step.hooks import Hook

Wait = Callable[[Collection[int] | None], None]


class ForwardWaits:
    """Hooks on a model. numbers: of its parameters by id(). wait: by parameter numbers, None for all."""

    def __init__(self, model: torch.nn.Module, numbers: Mapping[int, int], wait: Wait) -> None:
        self._model, self._wait = model, wait
        self._own = {
            name: [numbers[id(item)] for item in module.parameters(recurse=False) if id(item) in numbers]
            for name, module in model.named_modules()
        }
        self._waits: dict[str, list[int]] | None = None
        self._called: set[str] = set()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(Hook(self._before(name, module)), prepend=True)
        model.register_forward_hook(Hook(lambda *_: self._after_first()))
        model.register_state_dict_pre_hook(Hook(lambda *_: wait(None)))  # type: ignore[no-untyped-call]

    def _before(self, name: str, own: torch.nn.Module) -> Callable[[torch.nn.Module, Any], None]:
        # Where compiled code begins elsewhere it waits as it looks; not at these (`ps.lazy_values`).
        looked_at = all(type(item) is torch.nn.Parameter for item in own.parameters(recurse=False))
        begins = not name or not looked_at

        def hook(module: torch.nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                self._enter(name)
            elif begins or own._compiled_call_impl is not None:
                self._enter_compiled(name)

        return hook

    def _enter(self, name: str) -> None:
        if self._waits is None:
            self._called.add(name)
            self._wait(None)  # a script may call parts of the model, and never the model itself
        elif numbers := self._waits[name]:
            self._wait(numbers)

    _enter_compiled = _disable_dynamo(_enter)

    def _after_first(self) -> None:
        if not torch.compiler.is_compiling() and self._waits is None:
            self._waits = assign_waits(self._own, self._called)


def assign_waits(own: Mapping[str, list[int]], called: Collection[str]) -> dict[str, list[int]]:
    """Return the parameters for which each module waits: its own, and those of modules in it that never run.
    PURE.

    Args:
        own: Numbers of parameters by module's name ("" is the model).
        called: Names of modules that run.
    """
    waits = {name: list(numbers) for name, numbers in own.items()}
    for name, numbers in own.items():
        if name in called or not numbers:
            continue
        around = name
        while around and around not in called:
            around = around.rpartition(".")[0]
        if around != name:
            waits[around] += numbers
    return waits


def wait_for_values(models: Sequence[torch.nn.Module], wait: Wait, pending: Pending) -> None:
    """Have each model's forward wait for what it needs, and every other look at a parameter too.

    Args:
        models: The script's.
        wait: Waits for values.
        pending: Of the models' parameters.
    """
    pending.wait = wait
    trained = [item for item in torch.nn.ModuleList(models).parameters() if item.requires_grad]
    numbers = {id(item): number for number, item in enumerate(trained)}
    for model in models:
        ForwardWaits(model, numbers, wait)
