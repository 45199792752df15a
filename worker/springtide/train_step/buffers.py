"""The model's buffers: which of them a body has moved, and how to put them back.

`_version` tells of changes in place. BatchNorm's kernels are an exception: they write the running statistics
without moving their version (measured), so the buffers of a norm layer in training mode always count as
moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn.modules.batchnorm import _NormBase

from springtide.comm.layout import Field, field_of
from springtide.errors import UsageError


class Buffers:
    """Copies of all buffers as of the last `remember`.

    Buffers are looked up by name each time: a script may replace them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: list[tuple[torch.nn.Module, str]] = []
        self.names: list[str] = []
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self._places.append((module, name))
                    self.names.append(f"{prefix}.{name}" if prefix else name)
        self._copies = [buffer.detach().clone() for buffer in self.current()]
        self._seen: list[tuple[int, int]] = []
        self._trained: list[bool] = []
        self._note()

    def current(self) -> list[torch.Tensor]:
        """The buffers themselves, in the order of `names`. Raise KeyError if the script removed one."""
        found = []
        for (module, name), full in zip(self._places, self.names, strict=True):
            buffer = module._buffers.get(name)
            if buffer is None:
                raise KeyError(f"the model's buffer {full} is gone; buffers may change, but not disappear")
            found.append(buffer)
        return found

    @property
    def fields(self) -> list[Field]:
        """Names, shapes and types, which all workers have to agree on."""
        return [field_of(name, item) for name, item in zip(self.names, self.current(), strict=True)]

    @property
    def committed(self) -> list[torch.Tensor]:
        """The copies, in the order of `names`."""
        return self._copies

    def copies(self, indices: list[int]) -> dict[int, torch.Tensor]:
        """By index: a copy of what the buffer holds. Raise UsageError if shape or type have changed."""
        found, current = {}, self.current()
        for index in indices:
            buffer, committed = current[index], self._copies[index]
            if buffer.shape != committed.shape or buffer.dtype != committed.dtype:
                raise UsageError(
                    f"the model's buffer {self.names[index]} was {tuple(committed.shape)} {committed.dtype} "
                    f"and is {tuple(buffer.shape)} {buffer.dtype} now: in exact mode buffers keep their shape"
                )
            found[index] = buffer.detach().clone()
        return found

    def moved(self) -> list[bool]:
        """By buffer: whether it may differ from its copy."""
        return [
            (id(buffer), buffer._version) != seen or trained or _writes_silently(module)
            for buffer, seen, trained, (module, _) in zip(
                self.current(), self._seen, self._trained, self._places, strict=True
            )
        ]

    def remember(self) -> None:
        """Refresh the copies of what moved."""
        buffers = self.current()
        for index, moved in enumerate(self.moved()):
            if moved:
                buffer = buffers[index]
                if self._copies[index].shape == buffer.shape and self._copies[index].dtype == buffer.dtype:
                    self._copies[index].copy_(buffer)
                else:
                    self._copies[index] = buffer.detach().clone()
        self._note()

    def put_back(self) -> None:
        """Copy the remembered values into what moved."""
        self.write([index for index, moved in enumerate(self.moved()) if moved], self._copies)
        self._note()

    def write(self, indices: list[int], values: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]) -> None:
        """Replace the buffers `indices` by values[index], in place; a buffer of another shape is replaced as
        an object.
        """
        with torch.no_grad():
            for index in indices:
                module, name = self._places[index]
                buffer, value = module._buffers[name], values[index]
                if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                    buffer.copy_(value)
                else:
                    where = value.device if buffer is None else buffer.device
                    module._buffers[name] = value.detach().to(where, copy=True)

    def _note(self) -> None:
        self._seen = [(id(buffer), buffer._version) for buffer in self.current()]
        self._trained = [_writes_silently(module) for module, _ in self._places]


def _writes_silently(module: torch.nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.training
