"""Chunks that are updated as pushes come, where workers do not step together: lent out one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from springtide_ps.chunk import Chunk
from springtide_ps.early_shards import EarlyShards
from springtide_ps.held import Borrowed
from springtide_ps.ranges import Book
from springtide_ps.rounds import RoundError, Token


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
        """A chunk that nobody else reads or changes meanwhile."""
        with self._lock:
            self._rounds.check_token(token)
            if not isinstance(chunk := self._chunk(key), Chunk):
                raise RoundError(f"{key!r} is a slice of a table, whose rows take part in steps only")
            held = self._held[key]
            held.lock.acquire()
        try:
            yield Borrowed(chunk, held.forward)
        finally:
            held.lock.release()

    def changes(self, key: str, chunk: Chunk) -> None:
        """A borrowed chunk is about to change."""
        self.cuts.before(key, chunk, self._held[key].version)

    def books(self, token: Token) -> dict[str, Book | None]:
        """Of all chunks that are here."""
        with self._lock:
            self._rounds.check_token(token)
            keys = [key for key, held in self._held.items() if isinstance(held.chunk, Chunk)]
        found = {}
        for key in keys:
            with self.borrowed(token, key) as held:
                book = held.chunk.book
                found[key] = None if book is None else book.copy()
        return found
