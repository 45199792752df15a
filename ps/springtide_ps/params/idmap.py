"""int64 ids to row numbers, for many ids at a time. PURE.

Open addressing with linear probing over numpy arrays. Every operation is a few passes over whole arrays; a
pass handles all ids that are still looking for their place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int64]

_LOAD = 0.5  # of the places at most; beyond that probing gets long


def mix(ids: Ids, seed: int = 0) -> npt.NDArray[np.uint64]:
    """Mix ids so that neighbours land far apart (the finalizer of splitmix64: Steele, Lea and Flood 2014).

    Args:
        ids: int64.
        seed: for another order.
    """
    with np.errstate(over="ignore"):
        x = ids.view(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & (2**64 - 1))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


class IdMap:
    """Any int64 is an id. Rows are numbered 0, 1, 2... as ids come; `count` of them are there."""

    def __init__(self, capacity: int = 1024) -> None:
        self.count = 0
        self._size = 1 << max(4, int(capacity / _LOAD - 1).bit_length())
        self._keys = np.zeros(self._size, np.int64)
        self._rows = np.full(self._size, -1, np.int64)

    def find(self, ids: Ids) -> Rows:
        """Row of each id, -1 for one that is not there. Repeated ids are fine."""
        rows = np.full(len(ids), -1, np.int64)
        place = self._place(ids)
        looking: npt.NDArray[Any] | slice = slice(None)
        wanted = ids
        while True:
            found = self._rows[place]
            hit = (self._keys[place] == wanted) & (found >= 0)
            if isinstance(looking, slice):
                rows = np.where(hit, found, -1)
                on = np.flatnonzero(~hit & (found >= 0))
                looking = on
            else:
                rows[looking[hit]] = found[hit]
                on = np.flatnonzero(~hit & (found >= 0))
                looking = looking[on]
            if not len(looking):
                return rows
            place = (place[on] + 1) & (self._size - 1)
            wanted = wanted[on]

    def add(self, ids: Ids) -> Rows:
        """Give rows to ids that are not there and are not repeated; return these rows, in order."""
        if self.count + len(ids) > self._size * _LOAD:
            self._grow(self.count + len(ids))
        rows = np.arange(self.count, self.count + len(ids), dtype=np.int64)
        self._insert(ids, rows)
        self.count += len(ids)
        return rows

    def rebuild(self, ids: Ids) -> None:
        """Hold exactly these ids, with rows 0 to len(ids) - 1."""
        self.__init__(max(len(ids), 1024))  # type: ignore[misc]
        self.add(ids)

    def _place(self, ids: Ids) -> npt.NDArray[np.int64]:
        return (mix(ids) & np.uint64(self._size - 1)).astype(np.int64)

    def _insert(self, ids: Ids, rows: Rows) -> None:
        place = self._place(ids)
        while len(ids):
            free = self._rows[place] < 0
            taken = place[free]
            # Of several that want the same place, the last writer has it; the others see that and go on.
            self._rows[taken] = rows[free]
            self._keys[taken] = ids[free]
            lost = ~free
            lost[free] = self._rows[taken] != rows[free]
            ids, rows, place = ids[lost], rows[lost], (place[lost] + 1) & (self._size - 1)

    def _grow(self, count: int) -> None:
        there = self._rows >= 0
        ids, rows = self._keys[there], self._rows[there]
        self._size = 1 << int(2 * count / _LOAD - 1).bit_length()
        self._keys = np.zeros(self._size, np.int64)
        self._rows = np.full(self._size, -1, np.int64)
        self._insert(ids, rows)
