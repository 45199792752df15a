"""Order in which a pass takes samples that have no numbers: streams of shards, dealt from what is known."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from springtide.data import streams
from springtide.data.balance import Proportions
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.partition import partition
from springtide.data.permutation import shuffled
from springtide.data.shards import DEFAULT_STREAMS, MAX_STREAMS, UNKNOWN_COUNT, ShardList
from springtide.data.streams import Finding, Interval, StreamPosition


class Draw(NamedTuple):
    """Say what a global batch takes of one stream.

    Attributes:
        stream: number of the stream.
        start: place of the first of its samples in the global batch.
        keys: of the samples, int64 (n,): the shard's number in the source, and the sample's in the shard.
    """

    stream: int
    start: int
    keys: torch.Tensor


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """Take samples from streams of shards.

    Attributes:
        shards: by number.
        streams: how many there are, for the job's life.
        window: samples of a stream that are mixed; 1: they are taken as they come.
        shuffle: whether each pass has an order of the shards of its own, where their number is known.
    """

    shards: ShardList
    streams: int
    window: int = 1
    shuffle: bool = True

    # ---- what a step takes

    def opened(self, cursor: Cursor) -> Cursor:
        """Return the cursor with the positions at which a pass begins, where it has none yet."""
        if cursor.streams is not None:
            return cursor
        return cursor.with_streams((StreamPosition(),) * self.streams)

    def is_known(self, cursor: Cursor, batch_size: int) -> bool:
        """Return whether the batch at the cursor can be dealt: it is full, or nothing follows.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        if cursor.streams is None:
            return False
        ready = sum(streams.usable(position, self.window) for position in cursor.streams)
        return ready >= batch_size or all(position.over for position in cursor.streams)

    def counts(self, cursor: Cursor, batch_size: int) -> list[int]:
        """Return how many samples of the step's batch come from each stream.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        known = [streams.usable(position, self.window) for position in _positions(cursor)]
        return streams.share_batch(known, batch_size, cursor.position % self.streams)

    def draws(self, seed: int, cursor: Cursor, batch_size: int) -> list[Draw]:
        """Return what the step at the cursor takes, stream after stream: the places of its global batch.

        Args:
            seed: of the loop.
            cursor: where the step starts; its batch is known.
            batch_size: samples of the global batch.
        """
        found, start = list[Draw](), 0
        for stream, (position, count) in enumerate(
            zip(_positions(cursor), self.counts(cursor, batch_size), strict=True)
        ):
            if not count:
                continue
            names = self.names(seed, cursor.epoch, stream)
            shards, offsets = streams.drawn(position, count, self.window, names)
            numbers = self._numbers(seed, cursor.epoch, stream, shards)
            found.append(Draw(stream, start, (numbers << streams.OFFSET_BITS) | offsets))
            start += count
        return found

    def batch_ids(self, seed: int, cursor: Cursor, batch_size: int) -> torch.Tensor:
        """Return the keys of the samples of the step at the cursor; do not write into them.

        Args:
            seed: of the loop.
            cursor: where the step starts.
            batch_size: samples of the global batch.

        Returns:
            int64 [n]; as many as the batch has.
        """
        return _batch_ids(self, seed, cursor, batch_size)

    def account(self, ids: torch.Tensor, cursor: Cursor) -> torch.Tensor:
        """Return the numbers that the ledger counts: the keys themselves.

        Args:
            ids: keys of samples.
            cursor: where the step starts.
        """
        return ids

    # ---- how it goes on

    def readers(
        self, cursor: Cursor, batch_size: int, size: int, min_part: int, proportions: Proportions | None
    ) -> list[int]:
        """Return by stream the rank of the member that reads ahead in it.

        It is the one that computes the last of the stream's samples of the step, where there are any.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
            size: members.
            min_part: fewest samples of a part.
            proportions: by which parts follow speed; None: even parts.
        """
        counts = self.counts(cursor, batch_size)
        total = sum(counts)
        if not total:
            return [stream * size // self.streams for stream in range(self.streams)]
        parts = partition(total, size, min_part, proportions)
        ends = [part.start + part.size for part in parts]
        found, stop = list[int](), 0
        for count in counts:
            stop += count
            found.append(bisect.bisect_right(ends, stop - 1 if count else min(stop, total - 1)))
        return found

    def stepped(self, cursor: Cursor, batch_size: int) -> list[StreamPosition]:
        """Return the positions after the step at the cursor, without what is found in it.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        return [
            streams.advanced(position, count, self.window)
            for position, count in zip(_positions(cursor), self.counts(cursor, batch_size), strict=True)
        ]

    def wanted(self, positions: Sequence[StreamPosition], batch_size: int) -> list[int]:
        """Return by stream how many samples behind the known ones are to be read; 0: none.

        Args:
            positions: of all streams.
            batch_size: samples of the global batch.
        """
        ahead = streams.lookahead(batch_size, positions)
        return [streams.missing(position, self.window, ahead) for position in positions]

    def extended(self, cursor: Cursor, findings: Mapping[int, Finding]) -> Cursor:
        """Return the cursor with what members have found of streams.

        Args:
            cursor: where the step starts.
            findings: by stream.
        """
        return cursor.with_streams(
            tuple(
                streams.extended(position, findings.get(stream, Finding()))
                for stream, position in enumerate(_positions(cursor))
            )
        )

    def advance(self, cursor: Cursor, batch_size: int, found: Sequence[float] = ()) -> Cursor:
        """Return the cursor after the step that starts here.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
            found: `to_numbers` of the findings of all streams, one after another; none: nothing was found.

        Raises:
            ValueError: the numbers are not those of this many streams.
        """
        after = self.stepped(cursor, batch_size)
        width = streams.FINDING_NUMBERS
        if found:
            if len(found) != width * self.streams:
                raise ValueError(f"{len(found)} numbers of what {self.streams} streams hold")
            after = [
                streams.extended(position, Finding.from_numbers(found[at * width : (at + 1) * width]))
                for at, position in enumerate(after)
            ]
        if all(position.is_finished for position in after):
            return Cursor(cursor.stage, cursor.epoch + 1, 0, cursor.step + 1)
        taken = cursor.position + sum(self.counts(cursor, batch_size))
        return Cursor(cursor.stage, cursor.epoch, taken, cursor.step + 1, tuple(after))

    def commit(
        self,
        ledger: Ledger,
        before: Cursor,
        after: Cursor,
        ids: Callable[[], torch.Tensor],
        sums: Sequence[float],
        skipped: bool,
    ) -> Ledger:
        """Return the ledger after a committed step.

        Args:
            ledger: before it.
            before: the cursor that it started from.
            after: the cursor behind it.
            ids: returns the keys of the global batch that was dealt.
            sums: over all workers: samples whose gradients went in, low and high halves of their hashes.
            skipped: the step changed no parameter.
        """
        count, hash_lo, hash_hi = sums
        return ledger.commit_dealt(before, after, ids(), count, hash_lo, hash_hi, skipped=skipped)

    # ---- where shards are

    def names(self, seed: int, epoch: int, stream: int) -> tuple[int, int, int]:
        """Return the names by which orders of windows differ.

        Args:
            seed: of the loop.
            epoch: the pass.
            stream: number of the stream.
        """
        return seed, epoch, stream

    def number(self, seed: int, epoch: int, stream: int, shard: int) -> int | None:
        """Return the number in the source of a stream's shard; None where the stream has ended before.

        Args:
            seed: of the loop.
            epoch: the pass.
            stream: number of the stream.
            shard: number of the shard among the stream's own.

        Raises:
            OverflowError: there are more shards than can be counted.
        """
        place = stream + shard * self.streams
        if not self.shards.has(place):
            return None
        if place >= streams.MAX_SHARDS:
            raise OverflowError(f"batches(): a pass can have {streams.MAX_SHARDS} shards")
        return int(self._order(seed, epoch, place, place + 1)[0])

    def intervals(self, seed: int, cursor: Cursor) -> tuple[list[int], list[Interval]]:
        """Return what of the running pass has been taken: shards taken whole, and parts of others.

        Args:
            seed: of the loop.
            cursor: where the next step starts.

        Returns:
            Numbers of shards, and intervals of shards that have been begun.
        """
        whole, parts = list[int](), list[Interval]()
        for stream, position in enumerate(cursor.streams or ()):
            for shard in range(position.shard):
                number = self.number(seed, cursor.epoch, stream, shard)
                assert number is not None
                whole.append(number)
            for part in streams.begun_shards(position, self.window, self.names(seed, cursor.epoch, stream)):
                number = self.number(seed, cursor.epoch, stream, part.shard)
                assert number is not None
                parts.append(Interval(number, part.start, part.stop))
        return whole, parts

    def _numbers(self, seed: int, epoch: int, stream: int, shards: torch.Tensor) -> torch.Tensor:
        first, last = shards.min().item(), shards.max().item()
        table = [self.number(seed, epoch, stream, int(shard)) for shard in range(int(first), int(last) + 1)]
        return torch.tensor([-1 if number is None else number for number in table])[shards - int(first)]

    def _order(self, seed: int, epoch: int, start: int, stop: int) -> torch.Tensor:
        if not self.shuffle or self.shards.count == UNKNOWN_COUNT:
            return torch.arange(start, stop)
        return shuffled(self.shards.count, seed, epoch, start, stop)

    # ---- what others ask of an order

    def whole(self, batch_size: int) -> int:
        """Return the samples of a batch that is not the last one."""
        return batch_size

    def steps(self, batch_size: int) -> int:
        """Return the steps of a pass: 0, since nobody knows."""
        return 0

    def fingerprint(self) -> dict[str, int]:
        """Return what has to be equal on all workers."""
        return {
            "streams": self.streams,
            "shards": self.shards.count,
            "names_of_shards": self.shards.digest,
            "window": self.window,
            "shuffle": int(self.shuffle),
        }

    def describe(self, seed: int, cursor: Cursor, batch_size: int) -> str:
        """Return which samples the step at the cursor takes, in words.

        Args:
            seed: of the loop.
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        if not self.is_known(cursor, batch_size):
            return f"samples from number {cursor.position} of pass {cursor.epoch + 1} on"
        keys = self.batch_ids(seed, cursor, batch_size)
        shards = sorted(set((keys >> streams.OFFSET_BITS).tolist()))
        names = ", ".join(str(self.shards.name(number))[-60:] for number in shards[:3])
        more = f" and {len(shards) - 3} more" if len(shards) > 3 else ""
        return (
            f"{keys.numel()} samples from number {cursor.position} of pass {cursor.epoch + 1} on, of the "
            f"shards {names}{more}"
        )


def key_parts(key: int) -> tuple[int, int]:
    """Return the shard's number and the sample's number in it of a sample's key."""
    return key >> streams.OFFSET_BITS, key & (streams.MAX_OFFSET - 1)


def make_stream_order(
    shards: ShardList, batch_size: int, shuffle: bool, shuffle_buffer: int, wanted: int | None
) -> StreamOrder:
    """Check the arguments of `batches`, and make the order of a pass over shards.

    Args:
        shards: of the source.
        batch_size: samples of the global batch.
        shuffle: whether shards have another order in each pass, and samples are mixed.
        shuffle_buffer: samples that are mixed at a time, over all streams; 0: none.
        wanted: how many streams; None: DEFAULT_STREAMS, or as many as there are shards.

    Raises:
        ValueError: a value is of another kind, or there are more streams than shards.
    """
    if wanted is not None and (
        isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_STREAMS
    ):
        raise ValueError(f"batches(): streams must be an integer from 1 to {MAX_STREAMS}, got {wanted!r}")
    known = shards.count if shards.count != UNKNOWN_COUNT else DEFAULT_STREAMS
    if wanted is not None and shards.count != UNKNOWN_COUNT and wanted > known:
        raise ValueError(f"batches(): streams={wanted} of {known} shards: a stream has at least one shard")
    count = min(known, DEFAULT_STREAMS) if wanted is None else wanted
    window = max(1, -(-shuffle_buffer // count)) if shuffle else 1
    return StreamOrder(shards, count, window, shuffle)


@lru_cache(maxsize=4)  # asked for when a step is dealt, at its commit, and by each logical part
def _batch_ids(order: StreamOrder, seed: int, cursor: Cursor, batch_size: int) -> torch.Tensor:
    return torch.cat([draw.keys for draw in order.draws(seed, cursor, batch_size)])


def _positions(cursor: Cursor) -> tuple[StreamPosition, ...]:
    if cursor.streams is None:
        raise ValueError("the cursor has no positions of streams: nobody has looked at them yet")
    return cursor.streams
