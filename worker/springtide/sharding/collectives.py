"""The exchanges of a sharded step: gradients to the owners of their shards, sums to buddies, values to all.

In a step of n members each bucket is exchanged three times: every member sends each owner its gradients of
the owner's shards (n-1 parts of n), each owner sends its sums to the buddies (1 of n), and after the
optimizer's step its values to all but those (n-2 of n). Together that is what one all-reduce moves.

With two or three members on the CPU, whole buckets are summed at all members instead, where gradients stay in
their buckets anyway: up to a quarter more bytes, and much less work for the processors
(`WHOLE_SUMS_MEMBERS`). Values are sent as ever.

A bucket is exchanged in chunks, each of which has an equal part of what every member owns of it. So what is
packed for sending and what comes takes little memory, however large a bucket is: `most_under_way` in all.

All members must begin these exchanges in the same order. Buckets leave in one order at all of them; the sums
of a chunk go on to the buddies when the chunk `LAG` places behind it leaves, or room is needed, and the last
ones when all have left. So nobody waits for an exchange that a peer has not begun for another reason than its
own pace.

[Note: window] Values of all buckets at once would take the memory of two more models. So those of a few
chunks are on their way, and the next ones begin when some have come: when the forward pass has waited for
them. That is at each member's own pace, but in the same order at all of them, and nothing else may come in
between: before a member begins any other collective, it begins the values of all buckets that are left
(`Group.before_next`).

The script's thread calls all of this, or autograd's while it waits in backward().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from springtide.comm.exchanged_sums import MOST_AT_ONCE
from springtide.comm.nccl import DeviceSum
from springtide.comm.process_group import Group, Work, wait_for
from springtide.sharding.shard_map import Shard, ShardMap

WINDOW = 8
"""Chunks whose values are on their way at a time."""
LAG = 2
"""Chunks that leave before the sums of a chunk are passed on: by then they are usually there."""
LEAST_UNDER_WAY = 5 << 20
"""Bytes of memory for what is on its way, at least."""
WHOLE_SUMS_MEMBERS = 3
"""Members of the largest group whose buckets are summed as a whole.

Two members move the same bytes either way, three 5/3 of a bucket instead of 4/3, four 2 instead of 3/2.
Nothing is packed, added up in Python and unpacked, and a chunk is one message instead of three.
"""
_UNDER_WAY, _MOST_UNDER_WAY = 1 / 12, 64 << 20
"""Memory under way as a share of all gradients, and the most of it in bytes.

Less makes more exchanges of the same bytes. With 1 MiB the steps of a model of 26 MB took 1.6 times as long
as without shards, with 4 MiB 1.05, with 5 MiB and more 0.9.
"""
_FOR_GRADIENTS, _FOR_SUMS = 3 / 4, 1 / 4
"""Parts of that memory for gradients on their way to owners, and for sums on their way to buddies."""
VALUES_FACTOR = 2
"""How many times that memory values may take: they come in forward, where there are no gradients."""
_AT_A_TIME = 2
"""Chunks of gradients for which there is memory, where chunks are as large as they may be."""
_ALIGN = 64
"""Chunks of a bucket begin at multiples of so many of an owner's elements."""

Interval = tuple[int, int]
"""Elements start..stop-1 of a bucket."""

Ways = Callable[[int], Sequence[tuple[int, int]]]
"""The (sender, receiver) pairs of a shard, by its number."""

Part = tuple[int, int, int]
"""(shard's number, start, stop): elements of the shard's bucket that lie in the shard."""


def most_under_way(nbytes: int, least: int = LEAST_UNDER_WAY) -> int:
    """Return the bytes that packed gradients, or values, and what comes of them may take at a time. PURE.

    Args:
        nbytes: Of all gradients.
        least: So much may they take in any case.
    """
    return max(least, min(int(nbytes * _UNDER_WAY), _MOST_UNDER_WAY))


def agreed_least(told: Sequence[int | None]) -> int:
    """Return the least memory that all members have for what is on its way. PURE.

    Chunks follow from it, so all must have the same. One of a release that cannot say it has the usual one.

    Args:
        told: By member; None: it has said nothing.
    """
    said = [least for least in told if least is not None]
    return min(said) if len(said) == len(told) else LEAST_UNDER_WAY


@dataclass(frozen=True, slots=True)
class Route:
    """The part of an exchange that one member takes.

    Attributes:
        sent: By rank, the intervals that it gets from here.
        received: By rank, those that come from it.
        used: Whether any member sends anything.
    """

    sent: tuple[tuple[Interval, ...], ...]
    received: tuple[tuple[Interval, ...], ...]
    used: bool

    @property
    def sent_sizes(self) -> list[int]:
        """Return the elements for each rank."""
        return [sum(stop - start for start, stop in own) for own in self.sent]

    @property
    def received_sizes(self) -> list[int]:
        """Return the elements from each rank."""
        return [sum(stop - start for start, stop in own) for own in self.received]


def merged(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Return ascending intervals with neighbours made one. PURE."""
    found: list[Interval] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def route(parts: Sequence[Part], rank: int, size: int, ways: Ways) -> Route:
    """Return one member's part of an exchange of a chunk. PURE.

    Args:
        parts: Of the chunk, ascending.
        rank: The member.
        size: How many members there are.
        ways: The (sender, receiver) pairs of a shard, by its number.
    """
    sent: list[list[Interval]] = [[] for _ in range(size)]
    received: list[list[Interval]] = [[] for _ in range(size)]
    used = False
    for number, start, stop in parts:
        for sender, receiver in ways(number):
            used = True
            if sender == rank:
                sent[receiver].append((start, stop))
            if receiver == rank:
                received[sender].append((start, stop))
    return Route(tuple(map(merged, sent)), tuple(map(merged, received)), used)


def chunks_of(parts: Sequence[Part], owners: Sequence[int], most: int) -> list[tuple[Part, ...]]:
    """Cut a bucket into chunks, so that each has an equal part of what every member owns of it. PURE.

    Args:
        parts: Its shards, ascending.
        owners: By shard's number.
        most: Elements of a chunk, about.

    Returns:
        By chunk: its parts, ascending. Chunks that would have none are left out.
    """
    by_owner: dict[int, list[Part]] = {}
    for part in parts:
        by_owner.setdefault(owners[part[0]], []).append(part)
    count = max(1, -(-sum(stop - start for _, start, stop in parts) // max(1, most)))
    chunks: list[list[Part]] = [[] for _ in range(count)]
    for own in by_owner.values():
        units = -(-sum(stop - start for _, start, stop in own) // _ALIGN)
        edges = [units * number // count * _ALIGN for number in range(1, count)]
        at = chunk = 0
        for number, start, stop in own:
            while start < stop:
                while chunk < len(edges) and edges[chunk] <= at:
                    chunk += 1
                end = min(stop, start + edges[chunk] - at) if chunk < len(edges) else stop
                chunks[chunk].append((number, start, end))
                at, start = at + end - start, end
    return [tuple(sorted(chunk, key=lambda part: part[1])) for chunk in chunks if chunk]


class Source(Protocol):
    """A bucket's gradients, wherever they lie."""

    def copy(self, elements: Interval, into: torch.Tensor) -> None:
        """Write some of its elements, one-dimensional.

        Args:
            elements: Of the bucket.
            into: As many.
        """
        ...


class Flat:
    """A bucket's gradients in one tensor."""

    def __init__(self, flat: torch.Tensor) -> None:
        """Take the tensor, which is one-dimensional."""
        self._flat = flat

    def copy(self, elements: Interval, into: torch.Tensor) -> None:
        """Write some of its elements.

        Args:
            elements: Of the bucket.
            into: As many.
        """
        into.copy_(self._flat[elements[0] : elements[1]])


class Sums(Protocol):
    """Sums of a bucket's gradients, by the bucket's elements: at least where this member holds shards."""

    def __getitem__(self, elements: slice, /) -> torch.Tensor: ...


class HeldSums:
    """Sums of the shards that are held here alone, one behind the other."""

    def __init__(self, intervals: Sequence[Interval], like: torch.Tensor) -> None:
        """Take the memory.

        Args:
            intervals: Of the bucket: ascending, neighbours merged.
            like: Has the dtype and device.
        """
        self._intervals, self._ends = intervals, list(accumulate(stop - start for start, stop in intervals))
        self._memory = torch.zeros(self._ends[-1] if self._ends else 0, dtype=like.dtype, device=like.device)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return self._memory.nbytes

    def __getitem__(self, elements: slice) -> torch.Tensor:
        """Return the sums of elements that lie in one interval. Raise KeyError for others."""
        for (start, stop), end in zip(self._intervals, self._ends, strict=True):
            if start <= elements.start and elements.stop <= stop:
                first = end - (stop - elements.start)
                return self._memory[first : first + elements.stop - elements.start]
        raise KeyError(f"elements {elements.start} to {elements.stop} are not held here")


class Exchange:
    """One exchange under way: packs what is sent, unpacks what comes."""

    def __init__(self, group: Group, way: Route, memory: Memory) -> None:
        self._group, self._way, self._memory = group, way, memory
        self._work: Work | None = None
        self._error: RuntimeError | None = None
        self._packed: torch.Tensor | None = None
        self.nbytes = 0

    def start(self, source: Source, like: torch.Tensor) -> None:
        """Pack gradients and send them.

        Args:
            source: Of the bucket.
            like: Has the dtype and device of what is sent.

        Raises:
            RuntimeError: The group's, when it cannot begin the exchange.
        """
        if not self._way.used:
            return
        packed = self._packed = self._memory.take(sum(self._way.sent_sizes), like)
        at = 0
        for own in self._way.sent:
            for start, stop in own:
                source.copy((start, stop), packed[at : at + stop - start])
                at += stop - start
        self._send(packed, like)

    def start_parts(
        self,
        parts: Callable[[Interval], Sequence[torch.Tensor]],
        like: torch.Tensor,
        fails_late: bool = False,
    ) -> None:
        """Send what does not change before the exchange is over: as it lies there, where it is in one piece.

        Args:
            parts: The tensors, one-dimensional, that an interval consists of, in its order.
            like: Has the dtype and device of what is sent.
            fails_late: Where the group cannot begin it, `wait` says so.

        Raises:
            RuntimeError: The group's, when it cannot begin the exchange.
        """
        if not self._way.used:
            return
        pieces = [part for own in self._way.sent for interval in own for part in parts(interval)]
        if len(pieces) == 1:
            sent = pieces[0]
        else:
            sent = self._packed = self._memory.take(sum(self._way.sent_sizes), like)
            if pieces:
                torch.cat(pieces, out=sent)
        try:
            self._send(sent, like)
        except RuntimeError as error:
            if not fails_late:
                raise
            self._error = error

    def _send(self, sent: torch.Tensor, like: torch.Tensor) -> None:
        received_sizes = self._way.received_sizes
        self._received = self._memory.take(sum(received_sizes), like)
        self._work = self._group.start_exchange(self._received, sent, received_sizes, self._way.sent_sizes)
        self.nbytes = sent.nbytes

    @property
    def works(self) -> list[Work]:
        """Return what is under way."""
        return [] if self._work is None else [self._work]

    @property
    def is_completed(self) -> bool:
        """Return whether `wait` returns, or raises, at once."""
        return self._work is None or self._work.is_completed()

    def queue(self) -> None:
        """Wait until it has come; on a device, have what follows on its stream come after it.

        Raise RuntimeError when it fails.
        """
        if isinstance(self._work, DeviceSum):
            self._work.queue()
        elif self._work is not None:
            self._work.wait()

    def wait(self) -> None:
        """Wait until it has come. Raise RuntimeError when it fails, or could not begin."""
        if self._error is not None:
            raise self._error
        wait_for(self.works)

    def unpack(self, take: Callable[[int, Interval, torch.Tensor], None]) -> None:
        """Give what has come to `take`: (the sender's rank, interval, its elements); then it is over."""
        if self._work is None:
            return
        offset = 0
        for rank, own in enumerate(self._way.received):
            for start, stop in own:
                take(rank, (start, stop), self._received[offset : offset + stop - start])
                offset += stop - start
        # Nothing reads or writes that memory any more.
        self._memory.give_back(self._received)
        if self._packed is not None:
            self._memory.give_back(self._packed)
        self._work = self._packed = None


class Memory:
    """Memory for what is on its way, used again: new memory costs more than copying into it.

    It keeps no more for that, together with the memory in use, than a limit.
    """

    def __init__(self, most: int) -> None:
        """Have none yet.

        Args:
            most: Bytes that it keeps.
        """
        self._most = most
        self._free: list[torch.Tensor] = []
        self._whole: dict[int, torch.Tensor] = {}
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes that are in use, or kept to be used again."""
        return self._nbytes

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of so many elements, one-dimensional.

        Args:
            size: Elements.
            like: Has the dtype and device.
        """
        nbytes = size * like.element_size()
        fitting = [n for n, item in enumerate(self._free) if _fits(item, nbytes, like.device)]
        if fitting:
            whole = self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        else:
            while self._free and self._nbytes + nbytes > self._most:
                self._nbytes -= self._free.pop(0).numel()
            whole = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            self._nbytes += nbytes
        part = whole[:nbytes].view(like.dtype)
        self._whole[id(part)] = whole
        return part

    def give_back(self, part: torch.Tensor) -> None:
        """Take back what `take` has given."""
        whole = self._whole.pop(id(part))
        if self._nbytes > self._most:
            self._nbytes -= whole.numel()
        else:
            self._free.append(whole)


def _fits(whole: torch.Tensor, nbytes: int, device: torch.device) -> bool:
    return whole.numel() >= nbytes and whole.device == device


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Values of a bucket that are to be sent.

    Attributes:
        bucket: Its number.
        parts: The values of an interval, in order: the parameters that it covers, and zeros for gaps. They do
            not change before `receive` has returned for the bucket.
        like: Has the values' dtype and device.
        take: Gets an interval that has come, and its elements.
    """

    bucket: int
    parts: Callable[[Interval], Sequence[torch.Tensor]]
    like: torch.Tensor
    take: Callable[[Interval, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Describe a part of a bucket that is exchanged at a time, and this member's part in that.

    Attributes:
        to_owners: The way of gradients.
        to_buddies: That of sums.
        to_all: That of values.
        owned: Intervals of it that this member owns.
        gradient_bytes: The most memory that the exchange of gradients takes at any member.
        sum_bytes: Likewise that of sums.
        value_bytes: Likewise that of values.
    """

    bucket: int
    to_owners: Route
    to_buddies: Route
    to_all: Route
    owned: tuple[Interval, ...]
    gradient_bytes: int
    sum_bytes: int
    value_bytes: int


@dataclass(slots=True)
class _Reducing:
    """A chunk whose gradients are on their way, or its sums."""

    chunk: _Chunk
    exchange: Exchange
    sums: Sums
    like: torch.Tensor


@dataclass(slots=True)
class _Gathering:
    """A chunk whose values are on their way, or have come."""

    chunk: _Chunk
    values: Outgoing
    exchange: Exchange


class Exchanges:
    """The exchanges of one generation."""

    def __init__(
        self,
        group: Group,
        shards: Sequence[Shard],
        assigned: ShardMap,
        flats: Sequence[torch.Tensor],
        most: int = LEAST_UNDER_WAY,
        sums_whole: bool = False,
    ) -> None:
        """Prepare them.

        Args:
            group: Of the generation.
            shards: Of the layout.
            assigned: The holders of each shard.
            flats: Hold the dtype and device of each bucket's gradients.
            most: Bytes of memory for what is on its way; the same at all members.
            sums_whole: Whether gradients come by `sum_whole` instead of `reduce`; the same at all members.
        """
        self.sums_whole = sums_whole
        self._whole_sums: list[Work] = []
        self._in_place = sum(flat.nbytes for flat in flats) > MOST_AT_ONCE
        self._group, self._likes = group, [flat[:0] for flat in flats]
        by_bucket: list[list[Part]] = [[] for _ in flats]
        self._parts = by_bucket
        for number, shard in enumerate(shards):
            by_bucket[shard.bucket].append((number, shard.start, shard.stop))
        self._most, self._most_gradients, self._most_sums = most, most * _FOR_GRADIENTS, most * _FOR_SUMS
        self.memory = Memory(most)
        self._chunks = self._chunks_by(assigned)
        self._left: deque[_Reducing] = deque()
        self._going_on: deque[_Reducing] = deque()
        self._gathering: deque[_Gathering] = deque()
        self._to_start: deque[tuple[_Chunk, Outgoing]] = deque()
        self._awaited: dict[int, None] = {}

    def _chunks_by(self, assigned: ShardMap) -> list[list[_Chunk]]:
        # Each member sends and receives (n - 1) parts of n of a chunk.
        share = 2 * (self._group.size - 1) / self._group.size or 1.0
        return [
            [
                _chunk(bucket, parts, assigned, self._group, like.element_size())
                for parts in chunks_of(
                    self._parts[bucket],
                    assigned.owners,
                    int(self._most_gradients / _AT_A_TIME / share / like.element_size()),
                )
            ]
            for bucket, like in enumerate(self._likes)
        ]

    @property
    def most(self) -> int:
        """Return the bytes of memory for what is on its way."""
        return self._most

    def reassign(self, assigned: ShardMap) -> None:
        """Have the gradients of the next step, and all that follows, go by another map.

        All members call this after the same step; the values of that step are on their way as they were.

        Args:
            assigned: The holders of each shard.
        """
        self._chunks = self._chunks_by(assigned)

    # ---- gradients

    def begin_step(self) -> None:
        """Forget the gradients of a step that was dropped."""
        # A dropped step's exchanges ended with its group, or all members left it alike when all had come.
        self._left, self._going_on, self._whole_sums = deque(), deque(), []

    def sum_whole(self, gradients: torch.Tensor) -> int:
        """Begin to replace a bucket's gradients by their sums, at all members; return the bytes of them.

        Args:
            gradients: Flat. Nobody else may use them before `finish_sums` has returned.

        Raises:
            RuntimeError: The group's, when it cannot begin the sum.
        """
        self._whole_sums.append(self._group.start_sum(gradients, in_place=self._in_place))
        return gradients.nbytes

    def reduce(
        self, bucket: int, source: Source, sums: Sums, apart: bool, like: torch.Tensor | None = None
    ) -> int:
        """Send a bucket's gradients to the owners of its shards; return the bytes that leave here.

        The gradients are not needed after this call where the sums are apart from them.

        Args:
            bucket: Its number.
            source: Its gradients.
            sums: Where the sums of what is held here go.
            apart: They do not hold this member's own gradients yet.
            like: Has the dtype and device of what is sent, where it is not the bucket's (integers of exact
                sums).
        """
        nbytes, like = 0, self._likes[bucket] if like is None else like[:0]
        for chunk in self._chunks[bucket]:
            # By sizes alone, so that all members do the same.
            while self._left and self._left_bytes() + chunk.gradient_bytes > self._most_gradients:
                self._pass_on()
            exchange = Exchange(self._group, chunk.to_owners, self.memory)
            exchange.start(source, like)
            if apart:
                for start, stop in chunk.owned:
                    source.copy((start, stop), sums[start:stop])
            self._left.append(_Reducing(chunk, exchange, sums, like))
            nbytes += exchange.nbytes
            if len(self._left) > LAG:
                self._pass_on()
            while self._going_on and self._going_on[0].exchange.is_completed:
                self._end_oldest()
        return nbytes

    @property
    def under_way(self) -> int:
        """Return how many chunks have left whose sums have not gone on."""
        return len(self._left)

    def finish_sums(self) -> None:
        """Return when all sums are at owners and buddies. Raise RuntimeError when an exchange fails."""
        if self._whole_sums:
            wait_for(self._whole_sums)
            self._whole_sums = []
        while self._left:
            self._pass_on()
        wait_for([work for each in self._going_on for work in each.exchange.works])
        while self._going_on:
            self._end_oldest()

    def _left_bytes(self) -> int:
        return sum(each.chunk.gradient_bytes for each in self._left)

    def _pass_on(self) -> None:
        """Add up what has come for the oldest chunk, and send the sums on."""
        oldest = self._left.popleft()
        oldest.exchange.queue()
        oldest.exchange.unpack(partial(_add, oldest.sums))
        sums, chunk = oldest.sums, oldest.chunk
        # To wait begins nothing, so it may be for what is there already.
        while (
            self._going_on
            and sum(each.chunk.sum_bytes for each in self._going_on) + chunk.sum_bytes > self._most_sums
        ):
            self._end_oldest()
        onward = Exchange(self._group, chunk.to_buddies, self.memory)
        onward.start_parts(lambda interval: [sums[interval[0] : interval[1]]], oldest.like)
        self._going_on.append(_Reducing(chunk, onward, sums, oldest.like))

    def _end_oldest(self) -> None:
        """Keep the sums of the oldest chunk that was passed on."""
        onward = self._going_on.popleft()
        onward.exchange.wait()
        onward.exchange.unpack(partial(_put, onward.sums))

    # ---- values

    def gather(self, values: Sequence[Outgoing]) -> None:
        """Begin to send the values of own shards to all that do not hold them; see [Note: window].

        Args:
            values: Of all buckets, in the order in which they will be needed; the same order at all members.
        """
        self._awaited |= {each.bucket: None for each in values}
        self._to_start.extend((chunk, each) for each in values for chunk in self._chunks[each.bucket])
        self._fill_window()

    def send_behind(self, extra: Outgoing, way: Route, nbytes: int) -> None:
        """Begin to send something else when all values are on their way; `receive` waits for it, too.

        Args:
            extra: Its bucket has a number that no bucket of gradients has.
            way: This member's part of the exchange.
            nbytes: The most that any member sends or receives.
        """
        self._to_start.append((_Chunk(extra.bucket, way, way, way, (), 0, 0, nbytes), extra))
        self._fill_window()
        if self._to_start:
            self._group.before_next = self._start_rest

    def _fill_window(self) -> None:
        while self._to_start and len(self._gathering) < WINDOW and self._has_room(self._to_start[0][0]):
            self._start_next()

    def _has_room(self, chunk: _Chunk) -> bool:
        used = sum(each.chunk.value_bytes for each in self._gathering)
        return not self._gathering or used + chunk.value_bytes <= self._most * VALUES_FACTOR

    def _start_next(self) -> None:
        """Begin with the values of the next chunk, after earlier ones have made room for it."""
        self._group.before_next = None
        chunk, values = self._to_start[0]
        while not self._has_room(chunk):
            self._take_oldest()
        self._to_start.popleft()
        exchange = Exchange(self._group, chunk.to_all, self.memory)
        # The step is committed already, and its end is no place for errors: a wait for values is.
        exchange.start_parts(values.parts, values.like, fails_late=True)
        self._gathering.append(_Gathering(chunk, values, exchange))
        if self._to_start:
            self._group.before_next = self._start_rest

    def _start_rest(self) -> None:
        while self._to_start:
            self._start_next()

    def _take_oldest(self) -> None:
        """Wait for the oldest chunk's values, and take them. Raise RuntimeError when they do not come."""
        oldest = self._gathering[0]
        oldest.exchange.wait()
        self._gathering.popleft()
        oldest.exchange.unpack(lambda _, interval, came: oldest.values.take(interval, came))

    @property
    def gathering(self) -> list[int]:
        """Return the buckets whose values were not awaited, in the order in which they were asked for."""
        return list(self._awaited)

    def receive(self, bucket: int) -> None:
        """Wait until a bucket's values have come, and were taken.

        Those of buckets before it are taken with them, as they come in one order.

        Args:
            bucket: Its number.

        Raises:
            RuntimeError: The exchange failed.
        """
        while any(chunk.bucket == bucket for chunk, _ in self._to_start):
            self._start_next()
        while any(each.chunk.bucket == bucket for each in self._gathering):
            self._take_oldest()
        self._awaited.pop(bucket, None)
        self._fill_window()


def _chunk(bucket: int, parts: Sequence[Part], assigned: ShardMap, group: Group, itemsize: int) -> _Chunk:
    owners, buddies, members = assigned.owners, assigned.buddies, range(group.size)

    def on_way(ways: Ways) -> tuple[Route, int]:
        sizes = [0] * group.size
        for number, start, stop in parts:
            for pair in ways(number):
                for rank in pair:
                    sizes[rank] += stop - start
        return route(parts, group.rank, group.size, ways), max(sizes, default=0) * itemsize

    to_owners, gradient_bytes = on_way(lambda s: [(rank, owners[s]) for rank in members if rank != owners[s]])
    to_buddies, sum_bytes = on_way(lambda s: [(owners[s], buddies[s])] if owners[s] != buddies[s] else [])
    to_all, value_bytes = on_way(
        lambda s: [(owners[s], rank) for rank in members if rank not in (owners[s], buddies[s])]
    )
    owned = merged([(start, stop) for number, start, stop in parts if owners[number] == group.rank])
    return _Chunk(bucket, to_owners, to_buddies, to_all, owned, gradient_bytes, sum_bytes, value_bytes)


def _add(sums: Sums, rank: int, interval: Interval, came: torch.Tensor) -> None:
    sums[slice(*interval)].add_(came)


def _put(sums: Sums, rank: int, interval: Interval, came: torch.Tensor) -> None:
    sums[slice(*interval)].copy_(came)
