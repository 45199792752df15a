"""Shards that say how much they hold, for whoever watches the server."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from springtide_ps.chunk import Chunk, Recipe
from springtide_ps.copying import Later
from springtide_ps.frames import PART_BYTES
from springtide_ps.frozen_shards import FrozenShards
from springtide_ps.held import Borrowed, Fill, Forward, Held
from springtide_ps.rounds import Token
from springtide_ps.slices import Slice


@dataclass(frozen=True, slots=True)
class Holding:
    """pieces: chunks, and slices of tables, those that are copies of another server's included. nbytes: of
    them. rows: of the slices.
    """

    pieces: int
    nbytes: int
    rows: int


class CountedShards(FrozenShards):
    """As `Shards`. evicted: rows that slices let go on this server; those of a step that was only tried
    count, too, so that the number never falls.
    """

    def __init__(self, forward: Forward, fill: Fill, part_bytes: int = PART_BYTES) -> None:
        self.evicted = 0
        self._counting = threading.Lock()
        super().__init__(forward, fill, part_bytes)

    @property
    def holding(self) -> Holding:
        with self._lock:
            pieces = [held.chunk for held in self._held.values() if held.chunk is not None]
        rows = sum(len(piece.table) for piece in pieces if isinstance(piece, Slice))
        return Holding(len(pieces), sum(piece.nbytes for piece in pieces), rows)

    @contextmanager
    def borrowed(self, token: Token, key: str) -> Iterator[Borrowed]:
        with super().borrowed(token, key) as lent:
            before = _evicted(lent.chunk)
            try:
                yield lent
            finally:
                self._count(_evicted(lent.chunk) - before)

    def _make_late(self, piece: Slice, updates: Iterable[Later]) -> None:
        before = _evicted(piece)
        super()._make_late(piece, updates)
        self._count(_evicted(piece) - before)

    def _apply(self, held: Held, totals: dict[int, torch.Tensor], recipe: Recipe, step: int) -> None:
        before = _evicted(held.chunk)
        super()._apply(held, totals, recipe, step)
        self._count(_evicted(held.chunk) - before)

    def _count(self, evicted: int) -> None:
        """Chunks change on several threads."""
        with self._counting:
            self.evicted += evicted


def _evicted(piece: Chunk | Slice | None) -> int:
    """In its life, on whatever server."""
    return piece.table.evicted if isinstance(piece, Slice) else 0
