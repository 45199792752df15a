"""A pure state machine: the position of a job in streams of shards, whose samples have no numbers.

The shards of a pass are dealt to K *streams*, as cards are: stream k has those at the places k, k + K,
k + 2K, ... of the pass's order. K is fixed for the job's life and has nothing to do with the number of
workers. A stream is read in order, and its position is a shard and a number of samples in it: whoever takes
the stream over seeks there.

Nobody knows how long a shard is before somebody has read to its end. So a global batch is dealt from what is
*known* to be there: each position says how many samples follow, and where the shards end among them. Members
read a little ahead, and tell each other what they have found (`Finding`); the next batch is then a pure
function of the positions, to the sample, however many members there are.

Shuffled samples: a stream is cut into *windows* of so many samples, each of which is taken in an order of its
own. A window is dealt from when all of it is known. Its order follows from seed, pass, stream and window
alone, so nothing of it is saved, and it is the same after a restore.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from springtide.data.mixing import mix, mix_tensor, signed

OFFSET_BITS = 39
MAX_SHARDS = 1 << 23
"""Most shards of a pass; a sample's key has 62 bits."""
MAX_OFFSET = 1 << OFFSET_BITS
MAX_ENDS = 4
"""Ends of shards in a finding that travels with a step's vote: of those with samples."""
MAX_EMPTY = (1 << 13) - 1
"""Most empty shards in a row that such a finding tells of."""
FINDING_NUMBERS = 2 + MAX_ENDS


class StreamPosition(NamedTuple):
    """Say where one stream is in its pass, and what is known of what follows.

    Attributes:
        shard: number, among the stream's own shards, of the one in which the window begins.
        offset: samples of that shard before the window.
        window: number of the window in the pass. All windows before it have been taken, and were full.
        taken: samples of the window that have been taken, in the window's order.
        known: samples that are known to exist, from the window's begin.
        ends: lengths of the shards from `shard` on whose ends are known.
        over: whether the stream has no other samples than those known.
    """

    shard: int = 0
    offset: int = 0
    window: int = 0
    taken: int = 0
    known: int = 0
    ends: tuple[int, ...] = ()
    over: bool = False

    @property
    def left(self) -> int:
        """Return how many of the known samples have not been taken."""
        return self.known - self.taken

    @property
    def is_finished(self) -> bool:
        """Return whether all samples of the stream have been taken."""
        return self.over and not self.left

    def to_json(self) -> list[int]:
        """Return it as numbers: the fields in order, the ends last."""
        return [self.shard, self.offset, self.window, self.taken, self.known, int(self.over), *self.ends]

    @classmethod
    def from_json(cls, value: Sequence[int]) -> StreamPosition:
        """Read it from JSON. Raise ValueError when it is no position."""
        if len(value) < 6 or any(type(number) is not int or number < 0 for number in value) or value[5] > 1:
            raise ValueError(f"streams: a position is 6 numbers >= 0 and ends of shards, got {value!r}")
        shard, offset, window, taken, known, over, *ends = value
        if taken > known:
            raise ValueError(f"streams: {taken} samples are taken of {known} that are known")
        return cls(shard, offset, window, taken, known, tuple(ends), bool(over))


class Finding(NamedTuple):
    """Say what a member has read behind what is known of a stream.

    Attributes:
        added: samples more.
        ends: lengths of the shards that were found to end, in order: the first one is the shard in which the
            known samples end.
        over: whether the stream ends there.
    """

    added: int = 0
    ends: tuple[int, ...] = ()
    over: bool = False

    def to_numbers(self) -> list[float]:
        """Return it as FINDING_NUMBERS whole numbers below 2^53, which a float64 sum with zeros keeps.

        Raise ValueError when it has more ends than these can tell; see `bounded`.
        """
        slots = _slots(self.ends)
        if len(slots) > MAX_ENDS:
            raise ValueError(f"a finding tells of at most {MAX_ENDS} ends, got {len(slots)}")
        rest = [0] * (MAX_ENDS - len(slots))
        return [*map(float, (self.added, 2 * len(slots) + self.over, *slots, *rest))]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Finding:
        """Read it from what `to_numbers` gave."""
        added, flags, *slots = map(int, numbers)
        ends: list[int] = []
        for slot in slots[: flags // 2]:
            length, empty = divmod(slot, MAX_EMPTY + 1)
            ends += [length, *[0] * empty]
        return cls(added, tuple(ends), bool(flags % 2))

    def to_json(self) -> list[int]:
        """Return it as numbers, with ends as many as there are."""
        return [self.added, int(self.over), *self.ends]

    @classmethod
    def from_json(cls, value: Sequence[int]) -> Finding:
        """Read it from JSON."""
        added, over, *ends = value
        return cls(added, tuple(ends), bool(over))


def _slots(ends: Iterable[int]) -> list[int]:
    """Return ends as numbers: each a length, and the number of empty shards behind it."""
    slots: list[int] = []
    for length in ends:
        _add_slot(slots, length)
    return slots


def _add_slot(slots: list[int], length: int) -> None:
    if length == 0 and slots and slots[-1] % (MAX_EMPTY + 1) < MAX_EMPTY:
        slots[-1] += 1
    else:
        slots.append(length * (MAX_EMPTY + 1))


def usable(position: StreamPosition, window: int) -> int:
    """Return how many samples can be dealt from a stream: those of windows that are known whole.

    Args:
        position: of the stream.
        window: samples of a window; 1: samples are taken as they come.
    """
    whole = position.known if position.over else position.known // window * window
    return whole - position.taken


def lookahead(batch_size: int, positions: Sequence[StreamPosition]) -> int:
    """Return how many samples of each stream members want to know of: two batches, over all that go on.

    Args:
        batch_size: samples of the global batch.
        positions: of all streams.
    """
    going = sum(not position.over for position in positions)
    return 2 * -(-batch_size // max(1, going))


def share_batch(counts: Sequence[int], batch_size: int, first: int) -> list[int]:
    """Return how many samples of a batch come from each stream: as evenly as what they have allows.

    Args:
        counts: samples that each stream has to give.
        batch_size: samples of the whole batch; fewer are dealt where there are not as many.
        first: number of the stream that gets the first of the samples that even parts leave over.
    """
    left, streams = min(batch_size, sum(counts)), len(counts)
    level, going = 0, [count for count in counts if count]
    while going and left >= len(going):
        rise = min(left // len(going), min(going) - level)
        level, left = level + rise, left - rise * len(going)
        going = [count for count in going if count > level]
    dealt = [min(count, level) for count in counts]
    for place in range(streams):
        number = (first + place) % streams
        if left and counts[number] > level:
            dealt[number] += 1
            left -= 1
    return dealt


def advanced(position: StreamPosition, count: int, window: int) -> StreamPosition:
    """Return the position after so many more samples were taken.

    Args:
        position: of the stream.
        count: samples that a step has taken, at most `usable`.
        window: samples of a window.

    Raises:
        ValueError: there are not so many.
    """
    if not 0 <= count <= usable(position, window):
        raise ValueError(f"{count} samples of a stream that has {usable(position, window)} to give")
    taken = position.taken + count
    behind = taken // window * window
    if not behind:
        return position._replace(taken=taken)
    shard, offset, ends = position.shard, position.offset + behind, position.ends
    while ends and offset >= ends[0]:
        shard, offset, ends = shard + 1, offset - ends[0], ends[1:]
    return StreamPosition(
        shard,
        offset,
        position.window + behind // window,
        taken - behind,
        position.known - behind,
        ends,
        position.over,
    )


def extended(position: StreamPosition, finding: Finding) -> StreamPosition:
    """Return the position with what a member has found.

    Args:
        position: of the stream.
        finding: read from where the known samples end.

    Raises:
        ValueError: the stream was known to be over.
    """
    if position.over and finding != Finding():
        raise ValueError(f"something was found behind the end of a stream: {finding}")
    return position._replace(
        known=position.known + finding.added,
        ends=position.ends + finding.ends,
        over=position.over or finding.over,
    )


def frontier(position: StreamPosition) -> tuple[int, int]:
    """Return where the known samples end, as (shard, samples of it that are known)."""
    return position.shard + len(position.ends), position.offset + position.known - sum(position.ends)


def find(
    position: StreamPosition,
    wanted: int,
    length_of: Callable[[int], int | None],
    is_shard: Callable[[int], bool],
    *,
    bounded: bool,
) -> Finding:
    """Return what is to be told of a stream that was read so far that `wanted` samples more are here.

    It does not depend on how much further somebody has read, so that it is the same whoever says it.

    Args:
        position: of the stream.
        wanted: samples behind the known ones, at least 1.
        length_of: samples of one of the stream's shards; None: it goes on behind what was read.
        is_shard: whether the stream has a shard of this number.
        bounded: it travels with a vote, which has room for MAX_ENDS ends.

    Raises:
        OverflowError: a bounded finding would be nothing but empty shards.
    """
    shard, behind = frontier(position)
    added, ends, slots = 0, list[int](), list[int]()
    while added < wanted:
        if not is_shard(shard):
            return Finding(added, tuple(ends), True)
        length = length_of(shard)
        if length is None:
            return Finding(wanted, tuple(ends))
        added += min(length - behind, wanted - added)
        if added == wanted:
            break
        _add_slot(slots, length)
        if bounded and len(slots) > MAX_ENDS:
            if not added:
                raise OverflowError(f"{len(ends)} shards in a row are empty")
            break
        ends.append(length)
        shard, behind = shard + 1, 0
    return Finding(added, tuple(ends))


def missing(position: StreamPosition, window: int, ahead: int) -> int:
    """Return how many samples behind the known ones are to be read, so that `ahead` can be dealt; 0: none.

    Args:
        position: of the stream.
        window: samples of a window.
        ahead: samples that are wanted.
    """
    if position.over or usable(position, window) >= ahead:
        return 0
    return -(-(position.taken + ahead) // window) * window - position.known


class Located(NamedTuple):
    """Say which samples of a stream are taken, in order: int64 tensors of one shape (n,).

    Attributes:
        shards: numbers of their shards among the stream's own.
        offsets: numbers in the shard.
    """

    shards: torch.Tensor
    offsets: torch.Tensor


def drawn(position: StreamPosition, count: int, window: int, names: tuple[int, ...]) -> Located:
    """Return the next samples of a stream.

    Args:
        position: of the stream.
        count: how many, at most `usable`.
        window: samples of a window.
        names: by which the orders of windows differ: seed, pass and stream.
    """
    places = torch.arange(position.taken, position.taken + count)
    if window > 1 and count:
        first, last = position.taken // window, (position.taken + count - 1) // window
        orders = [
            number * window
            + _order(min(window, position.known - number * window), *names, position.window + number)
            for number in range(first, last + 1)
        ]
        places = torch.cat(orders)[position.taken - first * window :][:count]
    return located(position, places)


def located(position: StreamPosition, places: torch.Tensor) -> Located:
    """Return where samples of a stream are.

    Args:
        position: of the stream.
        places: numbers of samples from the window's begin, known ones: int64 (n,).
    """
    if not position.ends:
        return Located(torch.full_like(places, position.shard), places + position.offset)
    begins = torch.tensor([-position.offset, *(end - position.offset for end in accumulate(position.ends))])
    numbers = torch.searchsorted(begins, places, right=True) - 1
    return Located(numbers + position.shard, places - begins[numbers])


@functools.lru_cache(maxsize=512)
def _order(size: int, *names: int) -> torch.Tensor:
    """Return the order of a window: a permutation of 0..size-1, int64."""
    return torch.argsort(mix_tensor(torch.arange(size) ^ signed(mix(*names))))


@dataclass(frozen=True, slots=True)
class Interval:
    """Say which samples of a shard are taken: those of numbers start..stop-1.

    Attributes:
        shard: number of the shard.
        start: first sample.
        stop: behind the last one.
    """

    shard: int
    start: int
    stop: int


def begun_shards(position: StreamPosition, window: int, names: tuple[int, ...]) -> list[Interval]:
    """Return what has been taken of the shards that a stream has begun, as intervals in order.

    All of its shards before those are taken whole.

    Args:
        position: of the stream.
        window: samples of a window.
        names: as for `drawn`.
    """
    found = [Interval(position.shard, 0, position.offset)] if position.offset else []
    shards, offsets = drawn(position._replace(taken=0), position.taken, window, names)
    for shard, offset in sorted(zip(shards.tolist(), offsets.tolist(), strict=True)):
        if found and (found[-1].shard, found[-1].stop) == (shard, offset):
            found[-1] = Interval(shard, found[-1].start, offset + 1)
        else:
            found.append(Interval(shard, offset, offset + 1))
    return found
