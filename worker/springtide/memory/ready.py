"""Memory whose pages a joiner takes while the others train, instead of while they wait for it.

The system gives a process new memory page by page when it is first written, and that takes longer than to
receive the same bytes. A joiner knows before what it will write: the optimizer's state that it has to
receive.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.memory.optimizer_state import COPIES
from springtide.pods.tensors import local_shard

_MORE_BYTES = 1024
"""Bytes that each block has beyond its form's, when a heap is warmed.

torch aligns its blocks to 64 bytes. glibc looks for one of some 100 bytes more for that, and frees what
it does not need in crumbs, which lie between free blocks and keep them apart: so a block that was freed is
too small for one of the same size.
"""


def missing_state(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return for each tensor of state that is not there yet the parameter that it will look like.

    There are none for an optimizer that is not known, and none that lie on a device, where memory comes at
    once.

    Args:
        optimizers: Of the script.
    """
    found = []
    for optimizer in optimizers:
        copies = COPIES.get(type(optimizer))
        if copies is None:
            continue
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                own = local_shard(parameter)
                if (
                    parameter.requires_grad
                    and own.device.type == "cpu"
                    and not optimizer.state.get(parameter)
                ):
                    found += [own.detach()] * copies(group)
    return found


def warm_heap(forms: Sequence[torch.Tensor]) -> None:
    """Take memory like all of these at once, and give it back.

    The heap keeps it (`memory.allocator`), so that the gradients of a first backward pass, and what the
    optimizer makes of them, find their pages there.

    Args:
        forms: whose size counts; those on a device take nothing.
    """
    made = [
        torch.empty(form.nbytes + _MORE_BYTES, dtype=torch.uint8)
        for form in forms
        if form.device.type == "cpu"
    ]
    for tensor in made:
        tensor.zero_()


class ReadyMemory:
    """Tensors that nobody uses yet, all of whose pages are there."""

    def __init__(self) -> None:
        self._free: dict[tuple[object, ...], list[torch.Tensor]] = {}

    def make(self, forms: Sequence[torch.Tensor]) -> None:
        """Make a tensor like each of these.

        Args:
            forms: whose shape, strides and dtype count, on the CPU.
        """
        for form in forms:
            made = torch.empty_like(form, requires_grad=False)
            made.zero_()  # `zeros` would leave the pages to whoever writes first
            self._free.setdefault(_key(form, form.dtype), []).append(made)

    def take(self, form: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor for good; None where there is none left.

        Args:
            form: whose shape, strides and device it is to have.
            dtype: that it is to have.
        """
        free = self._free.get(_key(form, dtype))
        return free.pop() if free else None

    def clear(self) -> None:
        """Give back what was not taken."""
        self._free = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of what is there."""
        return sum(tensor.nbytes for tensors in self._free.values() for tensor in tensors)


def _key(form: torch.Tensor, dtype: torch.dtype) -> tuple[object, ...]:
    return dtype, tuple(form.shape), form.stride(), form.device
