"""Shards of which a cut can be read while training goes on (see `frozen`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from springtide_ps.chunk import Chunk
from springtide_ps.frozen import Part, give, tell
from springtide_ps.lent import LentShards
from springtide_ps.rounds import RoundError, Token
from springtide_ps.slices import Slice

_STEP_SECONDS: Final = 60.0

Found = TypeVar("Found")


class FrozenShards(LentShards):
    """As `Shards`."""

    def freeze(self, token: Token, name: str, step: int, readers: int) -> None:
        """Keep the chunks as they are after `step`, which may still be made. Raise RoundError.

        Of members that ask alike, one may come when another one has entered the next generation already.
        """
        with self._lock:
            if self.cuts.has(name):
                return
            self._rounds.check_token(token)
            versions = [(key, held.version) for key, held in self._held.items() if held.chunk is not None]
            self.cuts.freeze(name, step, readers, versions)

    def told(self, name: str) -> dict[str, dict[str, Any]]:
        """What is said of each chunk of the cut. Raise RoundError."""
        cut = self.cuts.find(name)
        return {key: self._of_cut(key, partial(tell, cut, key)) for key in sorted(cut.keys)}

    def frozen(self, name: str, key: str, at: int = 0, most: int | None = None) -> Part:
        """As `give`, of a chunk of the cut. Raise RoundError."""
        cut = self.cuts.find(name)
        return self._of_cut(key, partial(give, cut, key, at=at, most=most))

    def _of_cut(self, key: str, look: Callable[[Chunk | Slice | None, int], Found | None]) -> Found:
        """What `look` finds once the chunk has come so far."""
        with self._lock:
            end = time.monotonic() + _STEP_SECONDS
            while not self._closed and time.monotonic() < end:
                held = self._held.get(key)
                if held is None:
                    found = look(None, -1)
                else:
                    with held.lock:
                        found = look(held.chunk, held.version)
                if found is not None:
                    return found
                self._wake.wait(1.0)
        raise RoundError(f"chunk {key!r} did not come to its step within {_STEP_SECONDS:g} s")
