"""Collated samples on the model's device, one micro-batch ahead of the step (`batches(..., to_device=True)`).

The copy of the next micro-batch is queued on a stream of its own when the one before is handed out, so that
it runs beside that one's forward and backward. It is queued only where its samples are here already: nothing
waits for it, and what has not been copied ahead is copied when it is asked for.

A step that is dropped, or dealt anew, asks for other samples, or for the same ones once more: what was copied
for it is let go, and the copies are made again from the samples in host memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from springtide.data.source import Source

Key = Hashable
"""Names a micro-batch: the step's number and the samples' ids."""


class Copier(Protocol):
    """Brings tensors to a device. Used from the script's thread alone."""

    def now(self, collated: Any) -> Any:
        """Return the samples on the device, behind all that the calling thread has queued."""

    def ahead(self, collated: Any) -> Any:
        """Queue a copy beside what the calling thread queues; return it, for nobody but `take`."""

    def take(self, moved: Any) -> Any:
        """Return what `ahead` gave; all that the calling thread queues from now on is behind that copy."""


class DeviceCopies:
    """Holds at most one micro-batch that is on its way to the device."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._key: Key = None
        self._moved: Any = None

    def take(self, key: Key, collated: Any) -> Any:
        """Return a micro-batch on the device: what was copied ahead under this name, or a copy made now.

        Args:
            key: of the micro-batch.
            collated: its samples in host memory.
        """
        known, moved = self._key, self._moved
        self.drop()
        return self._copier.take(moved) if known == key else self._copier.now(collated)

    def begin(self, key: Key, collated: Any) -> None:
        """Copy a micro-batch ahead, in place of any that was copied before.

        Anything but tensors, and dicts, lists and tuples of them, is left for `take`: an object that moves
        itself may keep tensors that nobody else knows of.

        Args:
            key: names it.
            collated: its samples in host memory.
        """
        self.drop()
        if _is_known(collated):
            self._key, self._moved = key, self._copier.ahead(collated)

    def drop(self) -> None:
        """Let go of what was copied ahead. Waits for nothing."""
        self._key = self._moved = None


class CudaCopier:
    """Copies to a CUDA device, ahead on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ahead: Any = None

    def now(self, collated: Any) -> Any:
        return moved_by(self._move, collated)

    def ahead(self, collated: Any) -> Any:
        if self._ahead is None:
            self._ahead = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._ahead):
            moved = moved_by(self._move, collated)
            return moved, self._ahead.record_event()

    def take(self, moved: Any) -> Any:
        tensors, copied = moved
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            # Its memory belongs to the other stream, which must not use it again before this one is through.
            tensor.record_stream(stream)
            return tensor

        return moved_by(keep, tensors)

    def _move(self, value: Any) -> Any:
        # Of locked memory the host only queues a copy; of other memory torch waits until it has read it.
        return value.to(self._device, non_blocking=True)


def copier_for(device: torch.device | None) -> Copier | None:
    """Return what copies to a model's device; None where samples stay in host memory."""
    return CudaCopier(device) if device is not None and device.type == "cuda" else None


def with_copies(source: Source, copier: Copier | None) -> Source:
    """Return a source whose samples are on the device when they have been read.

    Args:
        source: reads them into host memory.
        copier: to the device; None: they stay there.
    """
    if copier is None:
        return source
    fetch, now = source.fetch, copier.now
    return replace(source, fetch=lambda ids: now(fetch(ids)))


def moved_by(move: Callable[[Any], Any], collated: Any) -> Any:
    """Return collated samples with all their tensors moved, in the same kinds of containers.

    Args:
        move: called with each tensor, and with each object that has a `to()` of its own.
        collated: tensors, and dicts, tuples and lists of them; all else stays as it is.
    """
    if isinstance(collated, torch.Tensor):
        return move(collated)
    if isinstance(collated, Mapping):
        return _mapping_like(collated, {name: moved_by(move, part) for name, part in collated.items()})
    if callable(getattr(collated, "to", None)):
        return move(collated)
    if isinstance(collated, tuple):
        parts = [moved_by(move, part) for part in collated]
        return type(collated)(*parts) if hasattr(collated, "_fields") else tuple(parts)
    if isinstance(collated, list):
        return [moved_by(move, part) for part in collated]
    return collated


def _mapping_like(example: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(example) is dict or not isinstance(example, MutableMapping):
        return parts
    clone = copy.copy(example)  # it may have more than its items, as the tokens of a tokenizer have
    clone.update(parts)
    return clone


def _is_known(collated: Any) -> bool:
    """Return whether all tensors of it are in sight."""
    if isinstance(collated, torch.Tensor):
        return collated.layout is torch.strided
    if isinstance(collated, Mapping):
        return all(map(_is_known, collated.values()))
    if callable(getattr(collated, "to", None)):
        return False
    if isinstance(collated, list | tuple):
        return all(map(_is_known, collated))
    return collated is None or isinstance(collated, str | bytes | int | float | complex)
