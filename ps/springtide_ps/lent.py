"""Chunks that are updated as pushes come, where workers do not step together: lent out one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from springtide_ps.chunk import Chunk
from springtide_ps.early_shards import EarlyShards
from springtide_ps.held import Borrowed
from springtide_ps.ranges import Book
from springtide_ps.rounds import RoundError, Token
from springtide_ps.slices import Slice


class LentShards(EarlyShards):
    """As `Shards`."""

    def check_token(self, token: Token, booked: bool = False) -> None:
        """Raise StaleError; RoundError for a generation that has not entered, or (booked) counts steps."""
        with self._lock:
            self._rounds.check_token(token)
            if booked and not self._rounds.booked:
                raise RoundError(f"the members of generation {token} step together: it has no ranges")

    def check_member(self, token: Token, member: str) -> None:
        """Raise RoundError for one that is not of the generation, or as `check_token` with booked."""
        with self._lock:
            self.check_token(token, booked=True)
            if member not in self._rounds.members:
                raise RoundError(f"{member} is no member of generation {token}")

    @contextmanager
    def borrowed(self, token: Token, key: str) -> Iterator[Borrowed]:
        """A chunk that nobody else changes meanwhile, or reads, but for rows of a slice."""
        with self._lock:
            self._rounds.check_token(token)
            self._chunk(key)
            held = self._held[key]
            held.lock.acquire()
        try:
            yield Borrowed(held)
        finally:
            held.lock.release()

    def check_pushed(self, key: str, nbytes: int, dtype: torch.dtype, selected: bool) -> None:
        """Raise RoundError when the chunk is not here, ChunkError or SelectedError for a gradient of this
        type that does not fit it. selected: it is of some elements only.
        """
        coming = self._coming.get(key)
        chunk = coming.piece if coming else self.dense(key) if selected else self._chunk(key)
        if isinstance(chunk, Slice):
            chunk.check_records(nbytes, dtype)
        elif selected:
            chunk.check_selected(nbytes, dtype)
        else:
            chunk.check_gradient(nbytes, dtype)

    def changes(self, key: str, chunk: Chunk | Slice) -> None:
        """A borrowed chunk is about to change."""
        self.cuts.before(key, chunk, self._held[key].version)

    def books(self, token: Token) -> dict[str, Book | None]:
        """Of all chunks that are here."""
        with self._lock:
            self._rounds.check_token(token)
            keys = [key for key, held in self._held.items() if held.chunk is not None]
        found = {}
        for key in keys:
            with self.borrowed(token, key) as held:
                book = held.chunk.book
                found[key] = None if book is None else book.copy()
        return found
