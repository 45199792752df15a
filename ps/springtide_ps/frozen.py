"""A cut: what the chunks of a server were after a step, while training goes on. PURE.

The first member that asks makes the cut; each of them asks before its own word on the next step, so nothing
can have changed. From then on a chunk is copied just before it changes, unless it was read before that. Each
chunk is read once, by one of the members, a large slice of a table in parts; when all have said that they are
done, or another cut is asked for, or nobody has come for long, what is left of the cut goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide_ps.chunk import Chunk
from springtide_ps.readings import KEPT_SECONDS, Kept, Readings, keep, part_of, part_of_kept
from springtide_ps.rounds import RoundError
from springtide_ps.slices import Slice

Part = tuple[dict[str, Any], torch.Tensor, int]
"""(JSON, uint8 [n], bytes of all): some of what a chunk's dump is."""


@dataclass(slots=True)
class Cut:
    """step: after which. keys: the chunks that are in it. readers: how many members will read. since: seconds
    on a clock of the caller's, since it was made or read. kept: of chunks that have changed since, copies of
    what was not read. told: what is said of each chunk (`describe`). begun: how many bytes of a chunk were
    read. given: chunks that were read.
    """

    name: str
    step: int
    keys: frozenset[str]
    readers: int
    since: float
    kept: dict[str, Kept] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Of copies."""
        return sum(kept.block.nbytes for kept in self.kept.values())


class Cuts:
    """At most one cut. A chunk is given with the lock that keeps it from changing held by the caller.

    readings: of chunks by themselves, which see the same changes.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.readings = Readings(clock)
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
            self._cut.since = self._clock()
            return self._cut

    def before(self, key: str, chunk: Chunk | Slice, version: int) -> None:
        """The chunk is about to change, or to go."""
        self.readings.before(key, chunk)
        with self._lock:
            cut = self._cut
            if cut is not None and self._clock() - cut.since > KEPT_SECONDS:
                cut = self._cut = None
        if cut is None or key not in cut.keys or key in cut.kept or key in cut.given or version != cut.step:
            return
        cut.told.setdefault(key, describe(chunk))
        cut.kept[key] = keep(chunk, cut.begun.get(key, 0))


def tell(cut: Cut, key: str, chunk: Chunk | Slice | None, version: int) -> dict[str, Any] | None:
    """What is said of the chunk as it is in the cut; None: it has not come that far. Raise RoundError."""
    if key in cut.told:
        return cut.told[key]
    if chunk is not None and version < cut.step and key not in cut.given:
        return None
    if chunk is None or version > cut.step or key in cut.given:
        raise _lost(cut, key)
    return cut.told.setdefault(key, describe(chunk))


def give(
    cut: Cut, key: str, chunk: Chunk | Slice | None, version: int, at: int = 0, most: int | None = None
) -> Part | None:
    """The chunk as it is in the cut, once: at most so many bytes from `at` on (None: all that follow), in
    order. None: it has not come that far. Raise RoundError.
    """
    if key not in cut.keys or key in cut.given:
        raise _lost(cut, key)
    if at != cut.begun.get(key, 0):
        raise RoundError(f"chunk {key!r} is read in order: byte {cut.begun.get(key, 0)} is next, not {at}")
    if key in cut.kept:
        found = part_of_kept(cut.kept[key], at, most)
    elif chunk is not None and version < cut.step:
        return None
    elif chunk is None or version > cut.step:
        raise _lost(cut, key)
    else:
        cut.told.setdefault(key, describe(chunk))
        found = part_of(chunk, at, most)
    cut.begun[key] = at + found[1].nbytes
    if cut.begun[key] == found[2]:
        cut.given.add(key)
        cut.kept.pop(key, None)
    return found


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
