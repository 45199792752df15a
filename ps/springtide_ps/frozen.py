"""A cut: what the chunks of a server were after a step, while training goes on. PURE.

The first member that asks makes the cut; each of them asks before its own word on the next step, so nothing
can have changed. From then on a chunk is copied just before it changes, unless it was read before that. Each
chunk is read once, by one of the members; when all have said that they are done, or another cut is asked for,
or nobody has come for long, what is left of the cut goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from springtide_ps.chunk import Chunk
from springtide_ps.rounds import RoundError
from springtide_ps.slices import Slice

KEPT_SECONDS: Final = 900.0

Dumped = tuple[dict[str, Any], torch.Tensor]


@dataclass(slots=True)
class Cut:
    """step: after which. keys: the chunks that are in it. readers: how many members will read. since: seconds
    on a clock of the caller's. kept: copies of chunks that have changed since, as they are dumped. told: what
    is said of each chunk (`describe`). given: chunks that were read.
    """

    name: str
    step: int
    keys: frozenset[str]
    readers: int
    since: float
    kept: dict[str, Dumped] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Of copies."""
        return sum(block.nbytes for _, block in self.kept.values())


class Cuts:
    """At most one cut. A chunk is given with the lock that keeps it from changing held by the caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._cut: Cut | None = None

    @property
    def nbytes(self) -> int:
        """Memory that copies take."""
        with self._lock:
            return self._cut.nbytes if self._cut is not None else 0

    def freeze(self, name: str, step: int, readers: int, versions: Iterable[tuple[str, int]]) -> None:
        """A member wants the chunks as they are after `step`. versions: of all chunks here.

        Raise RoundError when one of them is past that.
        """
        with self._lock:
            if self._cut is not None and self._cut.name == name:
                return
            versions = list(versions)
            if late := [key for key, version in versions if version > step]:
                raise RoundError(f"chunk {late[0]!r} is past step {step}: it cannot be kept as it was")
            keys = frozenset(key for key, _ in versions)
            self._cut = Cut(name, step, keys, readers, self._clock())

    def has(self, name: str) -> bool:
        """Whether this is the cut."""
        with self._lock:
            return self._cut is not None and self._cut.name == name

    def thaw(self, name: str, member: str) -> None:
        """A member needs the cut no more."""
        with self._lock:
            if self._cut is not None and self._cut.name == name:
                self._cut.done.add(member)
                if len(self._cut.done) >= self._cut.readers:
                    self._cut = None

    def find(self, name: str) -> Cut:
        """Raise RoundError when there is no such cut any more."""
        with self._lock:
            if self._cut is None or self._cut.name != name:
                raise RoundError(f"the state {name} is not kept here any more")
            return self._cut

    def before(self, key: str, chunk: Chunk | Slice, version: int) -> None:
        """The chunk is about to change, or to go."""
        with self._lock:
            cut = self._cut
            if cut is not None and self._clock() - cut.since > KEPT_SECONDS:
                cut = self._cut = None
        if cut is None or key not in cut.keys or key in cut.kept or key in cut.given or version != cut.step:
            return
        cut.told.setdefault(key, describe(chunk))
        cut.kept[key] = chunk.dump()


def tell(cut: Cut, key: str, chunk: Chunk | Slice | None, version: int) -> dict[str, Any] | None:
    """What is said of the chunk as it is in the cut; None: it has not come that far. Raise RoundError."""
    if key in cut.told:
        return cut.told[key]
    if chunk is not None and version < cut.step and key not in cut.given:
        return None
    if chunk is None or version > cut.step or key in cut.given:
        raise _lost(cut, key)
    return cut.told.setdefault(key, describe(chunk))


def give(cut: Cut, key: str, chunk: Chunk | Slice | None, version: int) -> Dumped | None:
    """The chunk as it is in the cut, once; None: it has not come that far. Raise RoundError."""
    if key in cut.kept:
        cut.given.add(key)
        return cut.kept.pop(key)
    if key not in cut.keys or key in cut.given:
        raise _lost(cut, key)
    if chunk is not None and version < cut.step:
        return None
    if chunk is None or version > cut.step:
        raise _lost(cut, key)
    cut.told.setdefault(key, describe(chunk))
    cut.given.add(key)
    return chunk.dump()


def describe(chunk: Chunk | Slice) -> dict[str, Any]:
    """state: of a chunk's optimizer: [name, dtype, whether it is one number, which pieces have it]. about,
    bytes: of a slice's dump.
    """
    if isinstance(chunk, Chunk):
        return {"state": chunk.state_fields()}
    # Where training goes on from it, says the state that the cut belongs to.
    about = {name: value for name, value in chunk.about().items() if name != "book"}
    return {"about": about, "bytes": chunk.dumped_bytes}


def _lost(cut: Cut, key: str) -> RoundError:
    return RoundError(f"chunk {key!r} as it was after step {cut.step} is not here any more")
