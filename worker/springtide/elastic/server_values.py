"""Wait for values that parameter servers hold: the parameters of the last step, and rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import SpringtideError
from springtide.ps.backend import PsBackend
from springtide.train_step.trainer import Trainer

_Found = TypeVar("_Found")


class ServerValues:
    """Ask the servers from the script's thread.

    In a step, what leaves it is raised when the values do not come; between two steps the next generation is
    waited for.
    """

    def __init__(
        self, state: TrainingState, trainers: TrainerAccess, stand: Callable[[int], None] | None
    ) -> None:
        """Make it for one process.

        Args:
            state: of the process.
            trainers: where its trainer is found.
            stand: joins a running generation in the loop of that ordinal; None without a job.
        """
        self._state = state
        self._trainers = trainers
        self._stand = stand

    def settle(self, parameters: Collection[int] | None) -> None:
        """Wait until the values of these parameters (None: all) have come, where they come from elsewhere.

        Raise SpringtideError when they cannot come any more.
        """
        if (trainer := self._trainers.trainer) is not None and trainer.values_arrive:
            self._ask(trainer, lambda: trainer.take_values(parameters))

    def rows(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Read rows of a table, float32 [n, dim].

        Args:
            index: of the parameter that stands for the table.
            ids: of the rows.

        Raises:
            SpringtideError: they cannot come any more.
        """
        return self._read(lambda servers, stepped: servers.read_rows(index, ids, stepped))

    def all_rows(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a whole table: (ids, rows). Raise SpringtideError when they cannot come any more."""
        return self._read(lambda servers, stepped: servers.all_rows(index, stepped))

    def _read(self, read: Callable[[PsBackend, bool], _Found]) -> _Found:
        trainer = self._trainers.require("an embedding table")
        servers, found = trainer.servers, list[_Found]()
        assert servers is not None
        stepped = trainer.transaction.stepped
        self._ask(trainer, lambda: found.append(read(servers, stepped)))
        return found[-1]

    def _ask(self, trainer: Trainer, wait: Callable[[], object]) -> None:
        while (error := trainer.ask(wait)) is not None:
            if self._state.plan is None or self._stand is None:
                raise SpringtideError(f"the values of the last step are not all here: {error}")
            self._stand(self._state.opened_loops - 1)
