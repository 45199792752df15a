"""The exchanges of a sharded step: gradients to the owners of their shards, sums to buddies, values to all.

In a step of n members each bucket is exchanged three times: every member sends each owner its gradients of
the owner's shards (n-1 parts of n), each owner sends its sums to the buddies (1 of n), and after the
optimizer's step its values to all but those (n-2 of n). Together that is what one all-reduce moves.

All members must begin these exchanges in the same order. Buckets leave in one order at all of them; the sums
of a bucket go on to the buddies when the bucket `LAG` places behind it leaves, and the last ones when all
have left. So nobody waits for an exchange that a peer has not begun for another reason than its own pace.

[Note: window] Values of all buckets at once would take the memory of two more models. So those of a few are
on their way, and the next ones begin when some have come: when the forward pass has waited for them. That is
at each member's own pace, but in the same order at all of them, and nothing else may come in between: before
a member begins any other collective, it begins the values of all buckets that are left
(`Group.before_next`).

The script's thread calls all of this, or autograd's while it waits in backward().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch

from springtide.comm.nccl import DeviceSum
from springtide.comm.process_group import Group, Work, wait_for
from springtide.sharding.shard_map import Shard, ShardMap

WINDOW = 4
"""Buckets whose values are on their way at a time."""
LAG = 2
"""Buckets that leave before the sums of a bucket are passed on: by then they are usually there."""
MOST_UNDER_WAY = 1 / 8
"""Share of all gradients that is on its way at a time, where buckets are large; one bucket at least."""

Interval = tuple[int, int]
"""Elements start..stop-1 of a bucket."""

Ways = Callable[[int], Sequence[tuple[int, int]]]
"""The (sender, receiver) pairs of a shard, by its number."""


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


def route(shards: Sequence[Shard], bucket: int, rank: int, size: int, ways: Ways) -> Route:
    """Return one member's part of an exchange of a bucket. PURE.

    Args:
        shards: All of the layout.
        bucket: Its number.
        rank: The member.
        size: How many members there are.
        ways: The (sender, receiver) pairs of a shard, by its number.
    """
    sent: list[list[Interval]] = [[] for _ in range(size)]
    received: list[list[Interval]] = [[] for _ in range(size)]
    used = False
    for number, shard in enumerate(shards):
        if shard.bucket != bucket:
            continue
        for sender, receiver in ways(number):
            used = True
            if sender == rank:
                sent[receiver].append((shard.start, shard.stop))
            if receiver == rank:
                received[sender].append((shard.start, shard.stop))
    return Route(tuple(map(merged, sent)), tuple(map(merged, received)), used)


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
        self.nbytes = 0

    def start(
        self,
        parts: Callable[[Interval], Sequence[torch.Tensor]],
        like: torch.Tensor,
        fails_late: bool = False,
    ) -> None:
        """Pack the parts and send them.

        Args:
            parts: The tensors, one-dimensional, that an interval consists of, in its order.
            like: Has the dtype and device of what is sent.
            fails_late: Where the group cannot begin it, `wait` says so.

        Raises:
            RuntimeError: The group's, when it cannot begin the exchange.
        """
        if not self._way.used:
            return
        sizes = self._way.sent_sizes
        sent = self._memory.take(sum(sizes), like)
        pieces = [part for own in self._way.sent for interval in own for part in parts(interval)]
        if pieces:
            torch.cat(pieces, out=sent)
        received_sizes = self._way.received_sizes
        self._received = self._memory.take(sum(received_sizes), like)
        self._sent = sent
        try:
            self._work = self._group.start_exchange(self._received, sent, received_sizes, sizes)
        except RuntimeError as error:
            if not fails_late:
                raise
            self._error = error
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
        self.done()

    def done(self) -> None:
        """Give the memory back: nothing reads or writes it any more."""
        if self._work is not None:
            self._memory.give_back(self._received)
            self._memory.give_back(self._sent)
            self._work = None


class Memory:
    """Memory for what is on its way, used again: new memory costs more than copying into it."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._whole: dict[int, torch.Tensor] = {}

    def take(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of so many elements, one-dimensional.

        Args:
            size: Elements.
            like: Has the dtype and device.
        """
        free = self._free.setdefault((like.dtype, like.device), [])
        fitting = [item for item in free if item.numel() >= size]
        if fitting:
            whole = min(fitting, key=lambda item: item.numel())
            # Not `remove`, which compares tensors by element.
            del free[next(place for place, item in enumerate(free) if item is whole)]
        else:
            whole = torch.empty(size, dtype=like.dtype, device=like.device)
        part = whole[:size]
        self._whole[id(part)] = whole
        return part

    def give_back(self, part: torch.Tensor) -> None:
        """Take back what `take` has given."""
        whole = self._whole.pop(id(part))
        self._free[whole.dtype, whole.device].append(whole)


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Values of a bucket that are to be sent.

    Attributes:
        bucket: Its number.
        parts: The values of an interval, in order: the parameters that it covers, and zeros for gaps.
        like: Has the values' dtype and device.
    """

    bucket: int
    parts: Callable[[Interval], Sequence[torch.Tensor]]
    like: torch.Tensor


class Exchanges:
    """The exchanges of one generation."""

    def __init__(
        self,
        group: Group,
        shards: Sequence[Shard],
        assigned: ShardMap,
        flats: Sequence[torch.Tensor],
    ) -> None:
        """Prepare them.

        Args:
            group: Of the generation.
            shards: Of the layout.
            assigned: The holders of each shard.
            flats: Hold the dtype and device of each bucket's gradients.
        """
        self._group, self._memory = group, Memory()
        owners, buddies = assigned.owners, assigned.buddies
        buckets = range(len(flats))
        members = range(group.size)

        def routes(ways: Ways) -> list[Route]:
            return [route(shards, bucket, group.rank, group.size, ways) for bucket in buckets]

        self._to_owners = routes(lambda s: [(rank, owners[s]) for rank in members if rank != owners[s]])
        self._to_buddies = routes(lambda s: [(owners[s], buddies[s])] if owners[s] != buddies[s] else [])
        self._to_all = routes(
            lambda s: [(owners[s], rank) for rank in members if rank not in (owners[s], buddies[s])]
        )
        self._owned = [
            merged(
                [(s.start, s.stop) for n, s in enumerate(shards) if s.bucket == b and owners[n] == group.rank]
            )
            for b in buckets
        ]
        self._reducing: dict[int, tuple[Exchange, Sums, torch.Tensor]] = {}
        self._going_on: deque[tuple[Exchange, Sums]] = deque()
        self._left: deque[int] = deque()
        self._gathering: dict[int, Exchange] = {}
        self._to_start: deque[Outgoing] = deque()
        sizes = [max((s.stop for s in shards if s.bucket == b), default=0) for b in buckets]
        self._nbytes = [size * flat.element_size() for size, flat in zip(sizes, flats, strict=True)]
        self._most = sum(self._nbytes) * MOST_UNDER_WAY

    # ---- gradients

    def begin_step(self) -> None:
        """Forget the gradients of a step that was dropped."""
        # A dropped step's exchanges ended with its group, or all members left it alike when all had come.
        self._reducing, self._going_on, self._left = {}, deque(), deque()

    def reduce(self, bucket: int, flat: torch.Tensor, sums: Sums | None = None) -> int:
        """Send a bucket's gradients to the owners of its shards; return the bytes that leave here.

        Args:
            bucket: Its number.
            flat: Its gradients, one-dimensional.
            sums: Where the sums of what is held here go, so that `flat` is not needed after this call; None:
                into `flat` itself.
        """
        # By sizes alone, so that all members do the same.
        while self._left and self._bytes_of(self._left) + self._nbytes[bucket] > self._most:
            self._pass_on(self._left.popleft())
        exchange = Exchange(self._group, self._to_owners[bucket], self._memory)
        exchange.start(lambda interval: [flat[interval[0] : interval[1]]], flat)
        if sums is not None:
            for start, stop in self._owned[bucket]:
                sums[start:stop].copy_(flat[start:stop])
        self._reducing[bucket] = exchange, flat if sums is None else sums, flat[:0]
        self._left.append(bucket)
        if len(self._left) > LAG:
            self._pass_on(self._left.popleft())
        while self._going_on and self._going_on[0][0].is_completed:
            onward, into = self._going_on.popleft()
            onward.wait()
            onward.unpack(partial(_put, into))
        return exchange.nbytes

    @property
    def under_way(self) -> int:
        """Return how many buckets have left whose sums have not gone on."""
        return len(self._left)

    def finish_sums(self) -> None:
        """Return when all sums are at owners and buddies. Raise RuntimeError when an exchange fails."""
        while self._left:
            self._pass_on(self._left.popleft())
        wait_for([work for exchange, _ in self._going_on for work in exchange.works])
        for exchange, sums in self._going_on:
            exchange.unpack(partial(_put, sums))
        self._going_on.clear()

    def _pass_on(self, bucket: int) -> None:
        """Add up what has come for a bucket, and send the sums on."""
        exchange, sums, like = self._reducing.pop(bucket)
        exchange.queue()
        exchange.unpack(partial(_add, sums))
        onward = Exchange(self._group, self._to_buddies[bucket], self._memory)
        onward.start(lambda interval: [sums[interval[0] : interval[1]]], like)
        self._going_on.append((onward, sums))

    # ---- values

    def gather(self, values: Sequence[Outgoing]) -> None:
        """Begin to send the values of own shards to all that do not hold them; see [Note: window].

        Args:
            values: Of all buckets, in the order in which they will be needed; the same order at all members.
        """
        self._to_start.extend(values)
        self._fill_window()

    def _fill_window(self) -> None:
        while self._to_start and len(self._gathering) < WINDOW:
            more = self._nbytes[self._to_start[0].bucket]
            if self._gathering and self._bytes_of(self._gathering) + more > self._most:
                return
            self._start_next()

    def _bytes_of(self, buckets: Iterable[int]) -> int:
        return sum(self._nbytes[bucket] for bucket in buckets)

    def _start_next(self) -> None:
        self._group.before_next = None
        values = self._to_start.popleft()
        exchange = Exchange(self._group, self._to_all[values.bucket], self._memory)
        # The step is committed already, and its end is no place for errors: a wait for values is.
        exchange.start(values.parts, values.like, fails_late=True)
        self._gathering[values.bucket] = exchange
        if self._to_start:
            self._group.before_next = self._start_rest

    def _start_rest(self) -> None:
        while self._to_start:
            self._start_next()

    @property
    def gathering(self) -> list[int]:
        """Return the buckets whose values have not all come, in the order in which they were asked for."""
        return [*self._gathering, *(values.bucket for values in self._to_start)]

    def receive(self, bucket: int, take: Callable[[Interval, torch.Tensor], None]) -> None:
        """Wait for a bucket's values.

        Args:
            bucket: Its number.
            take: Gets an interval and its elements.

        Raises:
            RuntimeError: The exchange failed.
        """
        while bucket not in self._gathering:
            self._start_next()
        exchange = self._gathering[bucket]
        exchange.wait()
        del self._gathering[bucket]
        exchange.unpack(lambda _, interval, came: take(interval, came))
        self._fill_window()


def _add(sums: Sums, rank: int, interval: Interval, came: torch.Tensor) -> None:
    sums[slice(*interval)].add_(came)


def _put(sums: Sums, rank: int, interval: Interval, came: torch.Tensor) -> None:
    sums[slice(*interval)].copy_(came)
