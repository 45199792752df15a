"""Float32 copies of 16-bit parameters, which the optimizer steps in their place.

A step of a bfloat16 parameter is usually smaller than half the distance to its next number, and would be
rounded away. So the optimizer gets the copy, its *master*, with the gradient in float32, and the parameter is
the master's rounding. The optimizer's own state is then in float32, too.

A master is an entry of the optimizer's state of its parameter: it is put back, transferred, cut into shards
and saved as that is.

A script may change a parameter between two steps. Its version tells that; where the parameter is not its
master's rounding any more, the master begins anew from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from springtide.errors import SpringtideError

MASTER: Final = "master_weight"
"""Name of the master in the optimizer's state of a parameter."""

LOW_PRECISION: Final = (torch.bfloat16, torch.float16)


def take_master(
    values: torch.Tensor, state: Mapping[str, Any], changed: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the master of a parameter, or of a piece of one, and the optimizer's state beside it.

    Without a master (before the first step, or after a restore from a job that had none) it is made of the
    values, and state of their type becomes float32.

    Args:
        values: Of the parameter, in 16 bits.
        state: The optimizer's, with the master if there is one.
        changed: The values may not be the master's rounding any more.
    """
    rest = {name: value for name, value in state.items() if name != MASTER}
    master = state.get(MASTER)
    if master is None:
        for name, value in rest.items():
            if isinstance(value, torch.Tensor) and value.dtype == values.dtype:
                rest[name] = value.float()
        return values.detach().float(), rest
    if changed:
        with torch.no_grad():
            own = values.detach()
            master.copy_(torch.where(master.to(own.dtype) == own, master, own.float()))
    return master, rest


def check_wanted(states: Iterable[Mapping[str, Any]], wanted: bool) -> None:
    """Raise SpringtideError when a job's state has masters that this script does not ask for.

    Args:
        states: The optimizers', by parameter.
        wanted: The script has asked for masters.
    """
    if not wanted and any(MASTER in state for state in states):
        raise SpringtideError(
            "the job's state has float32 masters of 16-bit parameters, and this script's distribute() does "
            "not ask for them: give it master_weights=True"
        )


class MasterWeights:
    """Have an optimizer step masters instead of 16-bit parameters. Used from the script's thread."""

    def __init__(self) -> None:
        """Know no parameter yet."""
        self._versions: dict[int, int] = {}
        """Version of each parameter, by its id(), when its master's rounding was written into it."""
        self._state: Any = None
        self._groups: list[tuple[dict[str, Any], list[torch.nn.Parameter]]] = []
        self._masters: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    @torch.no_grad()
    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer masters, with gradients in float32, for the step that follows.

        Args:
            optimizer: Its gradients are complete.
        """
        self._state = state = optimizer.state
        own: Any = defaultdict(dict)
        for group in optimizer.param_groups:
            stepped: list[torch.Tensor] = []
            for parameter in group["params"]:
                target = parameter
                if parameter.dtype in LOW_PRECISION and parameter.grad is not None:
                    changed = self._versions.get(id(parameter)) != parameter._version
                    target, rest = take_master(parameter, state.get(parameter, {}), changed)
                    target.grad = parameter.grad.float()
                    self._masters.append((parameter, target))
                    if rest:
                        own[target] = rest
                stepped.append(target)
            self._groups.append((group, group["params"]))
            group["params"] = stepped
        replaced = {id(parameter) for parameter, _ in self._masters}
        own.update({key: value for key, value in state.items() if id(key) not in replaced})
        optimizer.state = own

    @torch.no_grad()
    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back, rounded from the masters, after its step.

        Args:
            optimizer: The one of `begin`.
        """
        made, state = optimizer.state, self._state
        for parameter, master in self._masters:
            master.grad = None
            parameter.copy_(master)
            self._versions[id(parameter)] = parameter._version
            state[parameter] = {**made.pop(master, {}), MASTER: master}
        state.update(made)
        optimizer.state = state
        for group, parameters in self._groups:
            group["params"] = parameters
        self._state, self._groups, self._masters = None, [], []
