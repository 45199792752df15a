"""Several backward passes and steps in a body where workers do not step together.

A body works on a range of its own, so a step of one of its optimizers need not wait for the others: when the
script goes on to look at what it has made, the chunks and slices that it changes are pushed with the range,
and their newest values come back before the body goes on. The rest of them is pushed at the body's end. So
each of them still gets the range once, with one gradient: an optimizer makes one step in a body. A body that
is dropped in between leaves a range that some have, as a worker does that dies in the middle of a push: who
takes the range over completes it in the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from springtide import faults
from springtide.errors import UsageError
from springtide.ps.connections import ServerError
from springtide.ps.early_push import Offering, Outgoing
from springtide.servers.exchange import ServerExchange
from springtide_ps.chunk import Recipe


class RangeRounds(ServerExchange):
    """A part of `AsynchronousExchange`, which makes what is named here."""

    _offering: Offering
    _outgoing: dict[str, Outgoing]
    _gradients: dict[str, torch.Tensor]
    _recipe: Recipe
    _skipping: frozenset[int]
    _pending: set[str]
    _leased: int
    _ahead_of_end: set[str]
    _sums: tuple[float, tuple[int, ...]]

    def begin_step(self) -> None:
        self._ahead_of_end, self._sums = set(), (1.0, ())
        super().begin_step()

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """As in `ServerExchange`. Raise UsageError for a second step of the optimizer in the body."""
        indices = self.optimizers.parameters_of(optimizer)
        if self.optimizers.steps_again(optimizer):
            raise UsageError(
                f"a second step of the same optimizer ({type(optimizer).__name__}) in one body takes "
                "strategy.parameterServer.consistency Synchronous, or strategy.type AllReduce"
            )
        self._sums = scale, tuple(unused)
        factor = self.optimizers.stage(optimizer, clip_norm, scale, inverse, resting)
        for index in indices:
            # As if the step had been made here: a backward pass through what was computed before fails.
            parameter = self._parameters[index]
            torch.autograd.graph.increment_version(parameter)
            self._versions[index] = parameter._version
        return factor

    def begin_round(self) -> None:
        """Another backward pass of the body begins: what is staged takes the gradients of the last one.

        Raise ServerError.
        """
        self._push_staged()
        self.wire.begin_round(())
        self._pushed = 0
        self._offering.begin()

    def _see_within(self, parameters: Collection[int] | None) -> None:
        """Somebody wants to see values, in a body perhaps that has changed them. Raise ServerError."""
        self._push_staged()

    def _push_staged(self) -> None:
        """Push what the staged steps change, and wait for its values."""
        if not self.optimizers.staged:
            return
        keys = self._keys_of_steps(self.optimizers.staged)
        scale, unused = self._sums
        # What was pushed before is answered.
        self._recipe, self._skipping = self.optimizers.recipe(scale, unused, False), frozenset()
        self._ahead_of_end |= set(keys)
        self._pending |= set(keys)
        self._clean -= set(keys)
        self._memory.mark()
        self._send(keys)
        faults.reach("seen", self._leased + 1)
        for key in keys:
            self._receive(key, False)
            if key in self._chunks:
                self._memory.bring_up(*self._chunks[key].span)
                self._clean.add(key)
            self._outgoing.pop(key, None)
            self._gradients.pop(key, None)
        if left := [key for key in keys if key in self._pending]:
            raise ServerError(f"the range is not in {left[0]}")

    def _keys_of_steps(self, optimizers: Collection[int]) -> list[str]:
        """The chunks and slices that steps of these optimizers change."""
        return [key for key in self._keys_in_order() if self._owner_of(key) in optimizers]

    def _rest_of(self, recipe: Recipe, skip: bool) -> Recipe:
        """How what was not pushed before the body's end is pushed. recipe: of what is staged then, if any."""
        if not self._ahead_of_end or not skip:
            return recipe
        every = frozenset(range(len(self._parameters)))
        return Recipe(recipe.scale, False, recipe.groups, recipe.unused | every)

    def _keys_in_order(self) -> Iterable[str]:
        raise NotImplementedError

    def _owner_of(self, key: str) -> int:
        """Number of the optimizer that trains it."""
        raise NotImplementedError

    def _send(self, keys: Iterable[str]) -> None:
        raise NotImplementedError
