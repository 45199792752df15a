"""Which of the values on servers are in this process, as the script's parameters.

Everything here belongs to the script's thread. Values themselves land from connections' threads in
`HostMemory.values`; a value counts as here only when the script's thread has waited for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from springtide.errors import UsageError
from springtide.ps.host_memory import HostMemory
from springtide.ps.lazy_values import looking
from springtide.ps.sharding import PlannedChunk, Sharding


class LocalValues:
    """The parameters of one process whose values servers make. names: of the parameters."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        sharding: Sharding,
        memory: HostMemory,
    ) -> None:
        self.parameters = list(parameters)
        self._names, self._sharding, self._memory = list(names), sharding, memory
        self.held_keys = set(sharding.by_key)
        """Chunks whose newest values the parameters have."""
        self._versions: list[int] = []

    def of(self, chunk: PlannedChunk) -> torch.Tensor:
        """Return the host memory where the chunk's values are, and where new ones land."""
        return self._memory.values[chunk.bucket][chunk.start : chunk.stop]

    def lose(self) -> None:
        """Hold no values: this process has another state, or none."""
        self.held_keys = set()

    def outdate(self, keys: Iterable[str] | None) -> None:
        """Expect new values of these chunks (None: all); until now the script still reads the old ones."""
        self._memory.mark()
        if keys is None:
            self.held_keys = set()
        else:
            self.held_keys.difference_update(keys)

    def arrived(self, key: str) -> None:
        """Have the parameters hold a chunk's values, which have landed."""
        self._memory.bring_up(*self._sharding.by_key[key].span)
        self.held_keys.add(key)

    def take(self, parameters: Collection[int] | None, receive: Callable[[str], None]) -> None:
        """Have the newest values of these parameters (None: all).

        Args:
            parameters: Their numbers.
            receive: Waits for the values of a chunk.
        """
        if len(self.held_keys) == len(self._sharding.chunks):
            return
        for key in self._sharding.keys_of(parameters):
            if key not in self.held_keys:
                receive(key)
                self.arrived(key)

    # ---- changes by the script

    def note_versions(self) -> None:
        """Take what the parameters are now for unchanged: what comes from the servers is no change."""
        self._versions = [parameter._version for parameter in self.parameters]

    def count_step(self, indices: Iterable[int]) -> None:
        """Count as changed what servers step, so that a backward pass through earlier values fails."""
        for index in indices:
            parameter = self.parameters[index]
            torch.autograd.graph.increment_version(parameter)
            self._versions[index] = parameter._version

    def check_unchanged(self) -> None:
        """Raise UsageError when the script has changed a parameter since the last step."""
        with looking():
            versions = [parameter._version for parameter in self.parameters]
        if versions != self._versions:
            pairs = zip(self._names, versions, self._versions, strict=True)
            name = next(name for name, now, before in pairs if now != before)
            raise UsageError(
                f"parameter {name} was changed outside of optimizer.step(), but it lives on the parameter "
                "servers: change it before distribute(), or use strategy.type AllReduce"
            )
