"""Make the steps of an optimizer once more, from the gradients that a member has used."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Replay:
    """Step some parameters as a member's optimizer does, beside the script's own optimizer and its hooks.

    Each parameter has a stand-in with the same memory, so that neither the script's parameters get gradients,
    nor its optimizer state, before there is a whole. One thread uses it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make it for some of a script's parameters.

        Args:
            optimizer: of the script, which is left as it is.
            parameters: all trained ones.
        """
        self._parameters = parameters
        self._optimizer: Any = copy.copy(optimizer)  # without hooks, and without what wraps its `step`
        self._optimizer.state, self._optimizer.param_groups = defaultdict(dict), []
        self._step = inspect.unwrap(type(optimizer).step)
        self._stand_ins: dict[int, torch.nn.Parameter] = {}

    def keep(self, number: int, state: dict[str, Any]) -> None:
        """Take the state of a parameter whose values are in its memory now.

        Args:
            number: of the parameter.
            state: of the optimizer; it belongs to the replay.
        """
        stand_in = torch.nn.Parameter(self._parameters[number].detach(), requires_grad=False)
        self._stand_ins[number] = stand_in
        if state:
            self._optimizer.state[stand_in] = state

    def forget(self, number: int) -> None:
        """Keep nothing of a parameter any more."""
        stand_in = self._stand_ins.pop(number, None)
        if stand_in is not None:
            self._optimizer.state.pop(stand_in, None)

    def step(
        self,
        gradients: Mapping[int, torch.Tensor],
        group_of: Mapping[int, int],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Step these parameters.

        Args:
            gradients: by number of the parameter, of its form.
            group_of: by number of the parameter, its group.
            groups: options of each group.

        Raises:
            KeyError: one of them was not kept.
        """
        chosen: dict[int, list[torch.nn.Parameter]] = {}
        for number, gradient in gradients.items():
            stand_in = self._stand_ins[number]
            stand_in.grad = gradient
            chosen.setdefault(group_of[number], []).append(stand_in)
        self._optimizer.param_groups = [
            {**groups[group], "params": parameters} for group, parameters in chosen.items()
        ]
        try:
            with torch.no_grad():
                self._step(self._optimizer)
        finally:
            for number in gradients:
                self._stand_ins[number].grad = None
            self._optimizer.param_groups = []

    @property
    def states(self) -> dict[int, dict[str, Any]]:
        """Return the state of each parameter that was kept, by number."""
        return {
            number: dict(self._optimizer.state.get(stand_in, {}))
            for number, stand_in in self._stand_ins.items()
        }
