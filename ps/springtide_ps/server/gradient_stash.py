"""Gradients of one connection that came before it was known how they count. PURE.

A worker that does not step together with others sends a chunk's gradient while its backward pass still runs
(an early push), and at optimizer.step() a push that names it: the batch, and how it is applied. Until then
the gradient is nothing but memory that is set aside: a worker that dies, or leaves the body, has changed
nothing. A push whose gradient is not found is asked for whole, so a gradient may be forgotten at any time.

A server passes an early push on to the chunk's copies in the same way, over a connection that all workers
share; so gradients go by their owner as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.server.step_protocol import Token


@dataclass(frozen=True, slots=True)
class StashedGradient:
    """A gradient that is set aside until a push names it.

    Attributes:
        number: chosen by the owner, of the body that it belongs to.
        form: what a push says about its tensor.
        payload: uint8, memory of its own.
        speculative: its number among those whose values were sent before the push; 0: it is none of them.
        passed: by address of a copy, the answer to it there (a Future).
    """

    number: int
    form: Mapping[str, Any]
    payload: torch.Tensor
    speculative: int = 0
    passed: dict[str, Any] = field(default_factory=dict)

    def at(self, addresses: Collection[str]) -> set[str]:
        """Return which of these copies have it for certain."""
        return {
            address
            for address, answer in self.passed.items()
            if address in addresses and answer.done() and answer.exception() is None
        }


class GradientStash:
    """Hold at most one gradient of each owner and chunk: the newest, of the newest generation.

    Only the thread that reads the connection's requests calls the methods.

    Attributes:
        nbytes: memory of all that is set aside.
    """

    def __init__(self) -> None:
        self._token: Token = (0, 0, 0)
        self._held: dict[tuple[str, str], StashedGradient] = {}
        self.nbytes = 0

    @property
    def stashed(self) -> dict[tuple[str, str], StashedGradient]:
        """Return what is set aside, by owner and chunk; any thread may look."""
        return dict(self._held)

    def put(self, token: Token, owner: str, key: str, gradient: StashedGradient) -> None:
        """Set a gradient aside in place of an earlier one, and forget those of older generations.

        Args:
            token: the generation's.
            owner: the member that pushed it; "" on a connection of its own.
            key: the chunk's.
            gradient: to be set aside.
        """
        if token != self._token:
            self.forget()
            self._token = token
        self._pop(owner, key)
        self._held[owner, key] = gradient
        self.nbytes += gradient.payload.nbytes

    def take(self, token: Token, owner: str, key: str, number: int) -> StashedGradient | None:
        """Take a gradient out; an earlier one of the chunk is forgotten.

        Args:
            token: the generation's.
            owner: the member that pushed it; "" on a connection of its own.
            key: the chunk's.
            number: of the gradient.

        Returns:
            None: it is not here.
        """
        if token != self._token:
            return None
        gradient = self._pop(owner, key)
        return gradient if gradient is not None and gradient.number == number else None

    def forget(self) -> None:
        """Forget all, since the connection or the generation ends."""
        self._held, self.nbytes = {}, 0

    def _pop(self, owner: str, key: str) -> StashedGradient | None:
        gradient = self._held.pop((owner, key), None)
        if gradient is not None:
            self.nbytes -= gradient.payload.nbytes
        return gradient
