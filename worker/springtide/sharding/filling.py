"""Second copies of shards that are made while training goes on: which ones, in which step, and their bytes.

A lost member leaves shards at one member each. A few of them move before the next step begins; to send more
would have all wait for them. So the generation begins with these shards at one member, whose position as
owner and buddy is then shared: when it begins and after each step the owner sends some of them to those that
are to have them, behind the values that all wait for in the next forward pass. They are there before the next
vote, so from that step on both make the same updates.

All that decides is known to all members alike: the moves, and how each state looks. A state that looks
otherwise when its turn comes (an optimizer that makes new state on the way) is not sent, and the step is done
again in another generation, which finds out anew how states look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.comm.codec import as_bytes
from springtide.sharding.collectives import Interval, Route
from springtide.sharding.migration import VALUES, Form, Move, cut_bytes, expect, form_of
from springtide.sharding.pieces import ShardPart, State, Stretch, is_by_element
from springtide.sharding.shard_map import ShardMap

AT_ONCE = 2 << 20
"""Bytes that a member sends, or receives, before the first step of a generation, of what could wait."""
_FLAG = 1
"""Bytes before each shard: whether its state follows."""


@dataclass(frozen=True, slots=True)
class Fill:
    """One shard on its way to a second member.

    Attributes:
        move: From the member that holds it alone.
        forms: How its state looks.
        owner: Rank of the owner from then on.
        buddy: Rank of the buddy from then on.
    """

    move: Move
    forms: Sequence[Form]
    owner: int
    buddy: int

    @property
    def nbytes(self) -> int:
        """Return the bytes that travel."""
        return _FLAG + sum(map(form_bytes, self.forms))


def postponed(
    planned: Mapping[Move, Sequence[Form]],
    held: Sequence[Collection[int]],
    assigned: ShardMap,
    at_once: int = AT_ONCE,
) -> list[Fill]:
    """Return what of the moves can wait until training goes on. PURE.

    Only copies can that leave the shard where it is, too. A shard that changes its member moves at once, and
    so does one whose state may soon look otherwise: it has none yet, or something in it is no tensor.

    Args:
        planned: All moves, and how the states look.
        held: The shards of each member, by rank.
        assigned: The holders that each shard is to have.
        at_once: Bytes that a member may send, and receive, before the first step.
    """
    holders: dict[int, set[int]] = {}
    for rank, own in enumerate(held):
        for shard in own:
            holders.setdefault(shard, set()).add(rank)
    can_wait = {
        move: forms
        for move, forms in planned.items()
        if holders[move.shard] == {move.sender}
        and move.sender in assigned.holders(move.shard)
        and all(dtype for *_, entries in forms for _, dtype, *_ in entries)
        and any(cut_bytes(without_values(form)) for form in forms)
    }
    load = Counter[tuple[str, int]]()
    for move, forms in planned.items():
        if move not in can_wait:
            load.update(_load(move, sum(map(cut_bytes, forms))))
    found = []
    for move, forms in can_wait.items():
        added = _load(move, sum(map(cut_bytes, forms)))
        if all(load[key] + count <= at_once for key, count in added.items()):
            load.update(added)
            continue
        rest = [without_values(form) for form in forms]
        found.append(Fill(move, rest, assigned.owners[move.shard], assigned.buddies[move.shard]))
    return found


def without_values(form: Form) -> Form:
    """Return how a state looks without the parameters' values, which come to all in any case. PURE."""
    index, start, stop, entries = form
    return [index, start, stop, [entry for entry in entries if entry[0] != VALUES]]


def _load(move: Move, nbytes: int) -> dict[tuple[str, int], int]:
    return {("sends", move.sender): nbytes, ("receives", move.receiver): nbytes}


def alone(assigned: ShardMap, fills: Sequence[Fill]) -> ShardMap:
    """Return the map in which the shards that are to be filled are where they are. PURE.

    Args:
        assigned: The holders that each shard is to have.
        fills: Copies that are to be made.
    """
    return _with(assigned, {fill.move.shard: (fill.move.sender, fill.move.sender) for fill in fills})


def filled(assigned: ShardMap, fills: Sequence[Fill]) -> ShardMap:
    """Return the map in which shards have their second copy. PURE.

    Args:
        assigned: The holders before.
        fills: Copies that were made.
    """
    return _with(assigned, {fill.move.shard: (fill.owner, fill.buddy) for fill in fills})


def _with(assigned: ShardMap, changed: Mapping[int, tuple[int, int]]) -> ShardMap:
    owners, buddies = list(assigned.owners), list(assigned.buddies)
    for shard, (owner, buddy) in changed.items():
        owners[shard], buddies[shard] = owner, buddy
    return ShardMap(tuple(owners), tuple(buddies))


def next_batch(left: Sequence[Fill], most: int) -> list[Fill]:
    """Return what is sent after a step: as much as has room, one at least. PURE.

    Args:
        left: Copies that are to be made.
        most: Bytes that a member may send, and receive.
    """
    load = Counter[tuple[str, int]]()
    found: list[Fill] = []
    for fill in left:
        added = _load(fill.move, fill.nbytes)
        if not found or all(load[key] + count <= most for key, count in added.items()):
            load.update(added)
            found.append(fill)
    return found


def form_bytes(form: Form) -> int:
    """Return the bytes of all tensors of a stretch's state. PURE."""
    return cut_bytes(form) + sum(map(_rest_bytes, form[3]))


def _rest_bytes(entry: Sequence[Any]) -> int:
    _, dtype, _, rest = entry
    if rest is None:
        return 0
    count = 1
    for size in rest[0]:
        count *= size
    return count * getattr(torch, dtype).itemsize  # type: ignore[no-any-return]


@dataclass(slots=True)
class Batch:
    """Shards that are on their way to second members, as one of the members sees them.

    Attributes:
        fills: All of them.
        assigned: The holders of all shards once they are there.
        rank: Of this member.
        size: How many members there are.
        states: State that has come, by stretch.
        changed: Shards whose state did not look as it was expected to, so that it was not sent.
    """

    fills: Sequence[Fill]
    assigned: ShardMap
    rank: int
    size: int
    states: dict[Stretch, State] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)

    @property
    def coming(self) -> list[int]:
        """Return the shards that come to this member, ascending."""
        return sorted(fill.move.shard for fill in self.fills if fill.move.receiver == self.rank)

    @property
    def nbytes(self) -> int:
        """Return the most bytes that any member sends or receives."""
        load = Counter[tuple[str, int]]()
        for fill in self.fills:
            load.update(_load(fill.move, fill.nbytes))
        return max(load.values(), default=0)

    @property
    def runs(self) -> list[list[int]]:
        """Return this member's shards of the batch in runs that have one sender and one receiver.

        Both get the same.
        """
        own = sorted(
            (fill.move.shard, (fill.move.sender, fill.move.receiver))
            for fill in self.fills
            if self.rank in (fill.move.sender, fill.move.receiver)
        )
        found: list[list[int]] = []
        before: tuple[int, tuple[int, int]] | None = None
        for shard, pair in own:
            if before == (shard - 1, pair):
                found[-1].append(shard)
            else:
                found.append([shard])
            before = shard, pair
        return found

    @property
    def route(self) -> Route:
        """Return this member's part of the exchange, in bytes."""
        sent: list[tuple[Interval, ...]] = []
        received: list[tuple[Interval, ...]] = []
        out = into = 0
        for other in range(self.size):
            for ways, pair in ((sent, (self.rank, other)), (received, (other, self.rank))):
                size = sum(fill.nbytes for fill in self._between(*pair))
                start = out if ways is sent else into
                ways.append(((start, start + size),) if size else ())
                if ways is sent:
                    out += size
                else:
                    into += size
        return Route(tuple(sent), tuple(received), bool(self.fills))

    def _between(self, sender: int, receiver: int) -> list[Fill]:
        return [f for f in self.fills if (f.move.sender, f.move.receiver) == (sender, receiver)]

    def _at(self, start: int, sends: bool) -> list[Fill]:
        """Return the shards of the way of this member that begins at a byte."""
        at = 0
        for other in range(self.size):
            own = self._between(self.rank, other) if sends else self._between(other, self.rank)
            if own and at == start:
                return own
            at += sum(fill.nbytes for fill in own)
        raise ValueError(f"no way begins at byte {start}")

    def packed(
        self, way: Interval, shard_parts: Callable[[int], list[ShardPart]], device: torch.device
    ) -> list[torch.Tensor]:
        """Return what this member sends on one of its ways, uint8.

        Args:
            way: An interval of `route`.
            shard_parts: Returns the parts of a shard that is held here.
            device: Where it is to be.
        """
        found = []
        for fill in self._at(way[0], sends=True):
            parts = shard_parts(fill.move.shard)
            if not all(map(_looks_like, parts, fill.forms)) or len(parts) != len(fill.forms):
                found.append(torch.zeros(fill.nbytes, dtype=torch.uint8, device=device))
                continue
            found.append(torch.ones(_FLAG, dtype=torch.uint8, device=device))
            for part in parts:
                found += [
                    as_bytes(value).to(device)
                    for cut in (True, False)
                    for value in part.state.values()
                    if is_by_element(value, part.stretch) == cut
                ]
        return found

    def take(self, way: Interval, came: torch.Tensor) -> None:
        """Take what has come on one of the ways to this member.

        Args:
            way: An interval of `route`.
            came: uint8; used for other things afterwards.
        """
        at = 0
        for fill in self._at(way[0], sends=False):
            mine, at = came[at : at + fill.nbytes], at + fill.nbytes
            if not mine[0]:
                self.changed.append(fill.move.shard)
                continue
            first = _FLAG
            for form in fill.forms:
                stretch, state, tensors = expect(form)
                tensors += [value for value in state.values() if not any(value is own for own in tensors)]
                for tensor in tensors:
                    raw = as_bytes(tensor)
                    raw.copy_(mine[first : first + raw.numel()])
                    first += raw.numel()
                self.states[stretch] = state


def _looks_like(part: ShardPart, form: Form) -> bool:
    """Return whether a state has the same names, types and sizes as was told."""
    present = form_of(part)
    return present[:3] == list(form[:3]) and list(map(_shape, present[3])) == list(map(_shape, form[3]))


def _shape(entry: Sequence[Any]) -> list[Any]:
    name, dtype, device, rest = entry
    return [name, dtype, device, rest if rest is None or not dtype else list(rest[0])]
