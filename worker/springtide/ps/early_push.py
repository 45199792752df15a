"""Gradients that leave during backward although nobody knows yet how they count.

A server sets them aside (`gradient_stash`), and the push at optimizer.step() names them instead of
bringing them. In another generation, and where a server has not kept one, the push brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from springtide.ps.row_gradients import Rows
from springtide_ps.params.sparse_gradient import SparseGradient, pack
from springtide_ps.server.step_protocol import Token
from springtide_ps.wire.client import Answer, ServerClient
from springtide_ps.wire.frames import DTYPE_NAMES

Outgoing = torch.Tensor | SparseGradient | Rows
"""Form in which a gradient travels: of a chunk (flat), of some of its elements, or of rows of a slice."""
Ask = Callable[[dict[str, Any], torch.Tensor], Future[Answer]]
"""(what, what travels): a request."""


class EarlyPush:
    """Gradients that one worker has sent in the running body before their pushes. me: its name."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._number = 0
        self._keys: set[str] = set()

    @property
    def keys(self) -> Collection[str]:
        """The chunks and slices whose gradients servers have."""
        return self._keys

    def begin(self) -> None:
        """Begin a body: what was sent in another one is of no use."""
        self._number += 1
        self._keys = set()

    def forget(self, keys: Collection[str] | None = None) -> None:
        """Note that servers do not have these (None: all) any more."""
        self._keys = set() if keys is None else self._keys - set(keys)

    def send(self, client: ServerClient, token: Token, key: str, gradient: Outgoing) -> None:
        """Send a chunk's gradient; it must not change before its push is answered.

        Args:
            client: Of the chunk's first server.
            token: The generation's.
            key: The chunk's.
            gradient: The form that travels.

        Raises:
            ConnectionError: The connection is broken.
        """
        form, tensor = travelling(gradient)
        client.push_early(token, self._me, key, self._number, form, tensor)
        self._keys.add(key)

    def send_speculatively(
        self, ask: Ask, key: str, gradient: Outgoing, count: Mapping[str, Any]
    ) -> Future[Answer]:
        """Send a gradient for an answer.

        Args:
            ask: Makes the request.
            key: The chunk's.
            gradient: The form that travels; it must not change before its push is answered.
            count: The way in which the push will count it.

        Returns:
            The answer to come.
        """
        form, tensor = travelling(gradient)
        answer = ask({"k": key, "me": self._me, "o": self._number, **form, **count}, tensor)
        self._keys.add(key)
        return answer

    def push(self, key: str, gradient: Outgoing) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return how a chunk's push has its gradient.

        Args:
            key: The chunk's.
            gradient: The form that travels.

        Returns:
            The push's words on it, in JSON's types, and the tensor that it brings: None where that was sent.
        """
        if key in self._keys:
            return {"o": self._number, "me": self._me}, None
        return travelling(gradient)


def travelling(gradient: Outgoing) -> tuple[dict[str, Any], torch.Tensor]:
    """Return (form, tensor) of a gradient on its way."""
    if isinstance(gradient, Rows):
        return {"d": gradient.dtype}, gradient.records()
    if isinstance(gradient, SparseGradient):
        return {"d": DTYPE_NAMES[gradient.values.dtype], "sel": True}, pack(gradient)
    return {"d": DTYPE_NAMES[gradient.dtype]}, gradient
