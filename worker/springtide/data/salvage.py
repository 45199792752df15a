"""Which part of a step is left to compute when it is done again: a pure function of what members have kept.

A member loses nothing of what it has computed when another one dies: its gradients were computed from the
state that the step is done again from. So members tell each other which samples of the global batch they
have gradients of, and only the others are dealt anew.

Places are half-open ranges (start, stop) of a global batch: of its samples, in the order in which they are
dealt, or of its logical parts in exact mode. They are ascending, and neither empty nor touching.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Places = tuple[tuple[int, int], ...]


class Claim(NamedTuple):
    """Say what a member has kept of a dropped step.

    Attributes:
        work: name of the step and of the state that it was computed from; "" where nothing is kept.
        places: of the global batch, whose gradients it has.
    """

    work: str = ""
    places: Places = ()

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps([self.work, [end for place in self.places for end in place]]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Claim:
        """Read it from JSON. Raise ValueError."""
        work, ends = json.loads(text)
        return cls(str(work), tuple(zip(map(int, ends[::2]), map(int, ends[1::2]), strict=True)))


@dataclass(frozen=True, slots=True)
class Agreed:
    """Say what all members make of their claims.

    Attributes:
        accepted: by rank, whether the member's kept gradients count.
        rest: places that are to be computed.
    """

    accepted: tuple[bool, ...]
    rest: Places


def agree(claims: Sequence[Claim], work: str, n: int) -> Agreed:
    """Return which claims count, and what is left to compute.

    Each member's gradients are one sum, so a claim counts as a whole or not at all. Two overlap where one
    member has missed a generation in which its samples were dealt to others: the larger claim counts then,
    of equal ones that of the lower rank.

    Args:
        claims: of all members, by rank.
        work: name of the step that they are about to compute, and of the state.
        n: places of its global batch.
    """
    accepted, taken = [False] * len(claims), _Taken(n)
    for rank in sorted(range(len(claims)), key=lambda rank: (-size(claims[rank].places), rank)):
        claim = claims[rank]
        accepted[rank] = bool(claim.work) and claim.work == work and taken.add(claim.places)
    return Agreed(tuple(accepted), taken.rest())


class _Taken:
    def __init__(self, n: int) -> None:
        self._n = n
        self._places: Places = ()

    def add(self, places: Places) -> bool:
        """Take these places; return False, and take none, where one is taken or there is no such place."""
        if not places or places[0][0] < 0 or places[-1][1] > self._n:
            return False
        both = sorted([*self._places, *places])
        if any(start >= stop for start, stop in places):
            return False
        if any(after[0] < before[1] for before, after in itertools.pairwise(both)):
            return False
        self._places = merged(both)
        return True

    def rest(self) -> Places:
        ends = [0, *(end for place in self._places for end in place), self._n]
        return tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b)


def size(places: Places) -> int:
    """Return how many places there are."""
    return sum(stop - start for start, stop in places)


def merged(places: Iterable[tuple[int, int]]) -> Places:
    """Return ascending places with those that touch made one.

    Args:
        places: in any order; they do not overlap.
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(places):
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def among(places: Places, start: int, stop: int) -> Places:
    """Return those of the places that are the ones from number `start` to before `stop` among them.

    Args:
        places: of a batch.
        start: number of the first one, from 0.
        stop: number after the last one.
    """
    found, before = [], 0
    for first, after in places:
        low, high = max(start - before, 0), min(stop - before, after - first)
        if low < high:
            found.append((first + low, first + high))
        before += after - first
    return tuple(found)


def take(ids: torch.Tensor, places: Places) -> torch.Tensor:
    """Return the ids at these places.

    Args:
        ids: of the global batch, int64 [n].
        places: of it.

    Returns:
        int64, one for each place.
    """
    if len(places) == 1:
        return ids[places[0][0] : places[0][1]]
    return torch.cat([ids[:0], *(ids[start:stop] for start, stop in places)])


@dataclass(frozen=True, slots=True)
class Carried:
    """The account of what a member has kept, as a part of the step that it goes on with.

    Attributes:
        ids: the ledger's numbers of the samples, int64 [n].
        places: of the global batch.
        weight: that they count with.
    """

    ids: torch.Tensor
    places: Places
    weight: float
