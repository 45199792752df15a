"""Rows of collated samples: tensors, and dicts, tuples and lists of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def is_rows(collated: Any) -> bool:
    """Whether every part of it is a tensor with one row per sample."""
    if isinstance(collated, torch.Tensor):
        return collated.dim() > 0
    if isinstance(collated, Mapping):
        return all(is_rows(part) for part in collated.values())
    if isinstance(collated, list | tuple):
        return bool(collated) and all(is_rows(part) for part in collated)
    return False


def take_rows(collated: Any, start: int, stop: int) -> Any:
    """Return some rows of everything that was collated, as views.

    Args:
        collated: tensors whose first dimension counts samples, and dicts, tuples and lists of them.
        start: first row.
        stop: behind the last one.

    Returns:
        The same kinds of containers around the views.
    """
    if isinstance(collated, torch.Tensor):
        return collated[start:stop]
    if isinstance(collated, Mapping):
        return {name: take_rows(part, start, stop) for name, part in collated.items()}
    return _like(collated, [take_rows(part, start, stop) for part in collated])


def spans(places: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Places (chunk, row) in order, as (chunk, start, stop) of consecutive rows."""
    found: list[tuple[int, int, int]] = []
    for chunk, row in places:
        if found and found[-1][0] == chunk and found[-1][2] == row:
            found[-1] = chunk, found[-1][1], row + 1
        else:
            found.append((chunk, row, row + 1))
    return found


def join_rows(rows: Sequence[Any]) -> Any:
    """One after another, what `take_rows` gave."""
    first = rows[0]
    if len(rows) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(rows))
    if isinstance(first, Mapping):
        return {name: join_rows([row[name] for row in rows]) for name in first}
    return _like(first, [join_rows(parts) for parts in zip(*rows, strict=True)])


def _like(example: Any, parts: list[Any]) -> Any:
    if isinstance(example, tuple):
        return type(example)(*parts) if hasattr(example, "_fields") else tuple(parts)
    return parts
