"""Sums of few bytes in one exchange: each member sends all others what it has, and adds up what comes.

The backend's all-reduce (gloo) passes segments around a ring: 2 (n - 1) hops, one after another, each of
which wakes threads at both ends. For few bytes that is all that it takes. On loopback with two cores 4 KiB
took 1.7 ms with two members, 2.4 with three and 6.2 with four; an exchange, which is one hop, took 0.15, 1.6
and 2.7. Two members send the same bytes either way; more of them send more by an exchange than around a ring.

All members add in the order of the ranks, one after another, so that all have the same bits, whatever their
processors are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist

from springtide.comm.work import Collective

MOST_MORE_BYTES: Final = 64 << 10
"""Bytes that a member may send beyond what it would send around a ring: about a millisecond of 1 Gbit/s."""
MOST_BYTES: Final = 6 << 20
"""Bytes that a member may receive: with larger sums the hops do not count, and a ring adds up while it sends.
"""

MOST_AT_ONCE: Final = 64 << 20
"""Bytes of sums that may be begun before the first one is waited for: what comes takes as much memory."""

_COMBINE: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
}
"""The function that makes one tensor of two members' tensors, by the backend's name of it."""
_SENT: Final = frozenset([torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8])
"""Types that the backend sends; others travel as bytes, since nothing is computed on the way."""


def is_exchanged(nbytes: int, size: int) -> bool:
    """Return whether members sum a tensor by an exchange; it depends on what all of them have alike. PURE.

    Args:
        nbytes: of the tensor.
        size: of the group, at least 2.
    """
    more = nbytes * (size - 1) * (size - 2) // size
    return 0 < nbytes * (size - 1) <= MOST_BYTES and more <= MOST_MORE_BYTES


class ExchangedSum:
    """A sum under way: what the members have is on its way to all of them.

    Until `wait` the tensor holds what this member has put in.
    """

    def __init__(
        self,
        start: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Collective],
        tensor: torch.Tensor,
        rank: int,
        size: int,
        operation: Any,
    ) -> None:
        """Begin it.

        Args:
            start: begins an exchange, given (received, sent, elements from each rank, elements for each
                rank).
            tensor: contiguous, on the CPU, not empty; replaced by the sum in `wait`.
            rank: of this member.
            size: of the group.
            operation: the backend's name of what becomes of two members' numbers.
        """
        # Its own version: autograd's count of changes belongs to those who write into the tensor themselves.
        own = tensor.data if tensor.dim() == 1 else tensor.data.view(-1)
        self._tensor, self._rank, self._combine = own, rank, _COMBINE[operation]
        others = size - 1
        received = torch.empty(others * own.numel(), dtype=own.dtype)
        self._received: torch.Tensor | None = received
        sent = own if others == 1 else own.repeat(others)
        if own.dtype not in _SENT:
            sent, received = sent.view(torch.uint8), received.view(torch.uint8)
        sizes = [sent.numel() // others] * size
        sizes[rank] = 0
        self._exchange = start(received, sent, sizes, sizes)

    def wait(self) -> bool:
        """Raise RuntimeError when the exchange fails, or is lost in a group that was shut. One thread's."""
        self._exchange.wait()
        if self._received is not None:
            self._add_up(self._received)
            self._received = None
        return True

    def _add_up(self, received: torch.Tensor) -> None:
        own, rank = self._tensor, self._rank
        if received.numel() == own.numel():  # of one other
            self._combine(*((received, own) if rank else (own, received)), out=own)
            return
        parts = list(torch.split(received, own.numel()))
        parts.insert(rank, own)
        total = self._combine(parts[0], parts[1])
        for part in parts[2:]:
            self._combine(total, part, out=total)
        own.copy_(total)

    def is_completed(self) -> bool:
        return self._exchange.is_completed()

    def exception(self) -> Any:
        return self._exchange.exception()
