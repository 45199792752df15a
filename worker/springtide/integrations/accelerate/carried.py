"""Carry where a script stands among its training loops, as a part of the job's committed state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from springtide.elastic.evaluation import Evaluations


class Progress:
    """Count the training loops that the job's workers have begun.

    A worker that joins runs the script from its beginning, through loops that the job is past; by this count
    it knows whether the others are between the same two loops.

    Attributes:
        opened: loops that some worker has begun.
        is_left: the script has left the running loop by `break`.
        saves: states that were saved under a number.
    """

    def __init__(self, evaluations: Evaluations) -> None:
        """Make it for one process.

        Args:
            evaluations: of the process, which counts those of each state.
        """
        self._evaluations = evaluations
        self.opened = 0
        self.is_left = False
        self.saves = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "opened": self.opened,
            "is_left": self.is_left,
            "saves": self.saves,
            "evaluations": list(self._evaluations.begun),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counts of another worker, of a checkpoint, or those from before a dropped step.

        Args:
            state: of `state_dict`.
        """
        self.opened, self.is_left, self.saves = state["opened"], state["is_left"], state["saves"]
        step, evaluations, errands = state["evaluations"]
        self._evaluations.count_from((step, evaluations, errands))


class Unmoved:
    """Keep the states of the script's objects while it runs code that belongs to loops of the past."""

    def __init__(self, tracked: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Take them.

        Args:
            tracked: objects with state_dict and load_state_dict.
            optimizers: whose options schedulers move.
        """
        self._tracked, self._optimizers = tracked, optimizers
        self._states = {name: copy.deepcopy(item.state_dict()) for name, item in tracked.items()}
        self._options = [
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in item.param_groups
            ]
            for item in optimizers
        ]

    def put_back(self) -> None:
        """Undo what was done to them since."""
        for name, item in self._tracked.items():
            item.load_state_dict(copy.deepcopy(self._states[name]))
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
