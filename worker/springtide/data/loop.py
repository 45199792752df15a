"""One training loop as a pure function of the cursor: what a step takes, and which part a rank computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from springtide.data.balance import Proportions
from springtide.data.batch import Batch, Micro
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.marks import Marks, differing
from springtide.data.order import Order, make_order
from springtide.data.partition import Part, partition
from springtide.data.salvage import Carried, Places, among, size, take
from springtide.data.shards import ShardedDataset, ShardList
from springtide.data.source import Source, make_source
from springtide.data.stream_order import StreamOrder, make_stream_order

DEFAULT_SHUFFLE_BUFFER = 1024
"""Samples of shards that are mixed at a time, over all streams."""

_NOTHING = [Part(0, 0)]


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The arguments of one `batches` call, checked.

    Batch_size, micro_batch and min_part count samples; batch_size is global. order: of each pass; data
    without numbers have a `StreamOrder`, and a source that its loader fills in. marks: of a few samples.
    """

    source: Source
    order: Order | StreamOrder
    batch_size: int
    epochs: int
    seed: int
    micro_batch: int | None
    min_part: int
    marks: Marks = field(default_factory=dict)

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be short. 0: nobody knows how many there are."""
        return self.order.steps(self.batch_size)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def streams(self) -> StreamOrder | None:
        """Return the order of data that are read from streams of shards; None for other data."""
        return self.order if isinstance(self.order, StreamOrder) else None

    @property
    def whole_batch(self) -> int:
        """Samples of a batch that is not the last of an epoch."""
        return self.order.whole(self.batch_size)

    def numbered(self) -> Order:
        """Return the order of samples that have numbers. Raise TypeError for other data."""
        if isinstance(self.order, StreamOrder):
            raise TypeError("the samples of this loop have no numbers")
        return self.order

    def ended(self, cursor: Cursor) -> bool:
        return cursor.epoch >= self.epochs

    def advance(self, cursor: Cursor, found: Sequence[float] = ()) -> Cursor:
        """Return the cursor after the step that starts here.

        Args:
            cursor: where the step starts.
            found: what members have found of streams meanwhile; see `StreamOrder.advance`.
        """
        return self.order.advance(cursor, self.batch_size, found)

    def is_known(self, cursor: Cursor) -> bool:
        """Return whether the step at the cursor can be dealt; else members have to look ahead first."""
        return self.order.is_known(cursor, self.batch_size)

    def describe_samples(self, cursor: Cursor) -> str:
        """Return which samples the step at the cursor takes, in words."""
        return self.order.describe(self.seed, cursor, self.batch_size)

    def global_ids(self, cursor: Cursor) -> torch.Tensor:
        """Ids of the whole batch of the step that starts at the cursor: int64, shape (1..batch_size,)."""
        if self.ended(cursor):
            raise ValueError(f"the loop ended after {self.epochs} epochs, and the cursor stands at {cursor}")
        return self.order.batch_ids(self.seed, cursor, self.batch_size)

    def account(self, ids: torch.Tensor, cursor: Cursor) -> torch.Tensor:
        """Return the ledger's numbers for the global batch of a step.

        Args:
            ids: the samples of the global batch, int64 [n].
            cursor: where the step starts.

        Returns:
            int64 [n]: the ids themselves, or their places in the pass (`Order.account`).
        """
        return self.order.account(ids, cursor)

    def batch(
        self,
        cursor: Cursor,
        rank: int,
        world_size: int,
        fetch: Callable[[torch.Tensor], Any] | None = None,
        together: range = range(0),
        is_counted: bool = True,
        proportions: Proportions | None = None,
        rest: Places | None = None,
        carried: Carried | None = None,
    ) -> Batch:
        """Return this rank's part of the step at the cursor; a stand-in if the batch is too short for all.

        Args:
            cursor: where the step begins.
            rank: of the member, from 0.
            world_size: number of members.
            fetch: reads the samples; the source if None.
            together: ranks of those that run forward and backward together with this one, itself included;
                empty: it does so alone.
            is_counted: its samples count; False where another process counts the same ones.
            proportions: by which parts follow speed; None: even parts.
            rest: what is dealt of the global batch, the rest of which members have gradients of; None: all.
            carried: what this member has gradients of.

        Raises:
            ValueError: the rank is not below the world size.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} of a world of {world_size}")
        ids = self.global_ids(cursor)
        dealt = ((0, ids.numel()),) if rest is None else rest
        left = size(dealt)
        parts = partition(left, world_size, self.min_part, proportions) if left else _NOTHING * world_size
        part = parts[rank]
        places = among(dealt, part.start, part.start + part.size)
        own = take(ids, places)
        standin = ids[: self.min_part] if part.size == 0 else None
        return Batch(
            Micro(take(self.account(ids, cursor), places), ids.numel(), is_counted, places, carried),
            own,
            fetch or self.source.fetch,
            standin_ids=standin,
            micro_batch=self.micro_batch,
            min_part=self.min_part,
            together=[parts[mate].size for mate in together],
            empty_ids=ids[: self.min_part] if together else None,
        )

    def commit(
        self,
        ledger: Ledger,
        cursor: Cursor,
        count: float,
        hash_lo: float,
        hash_hi: float,
        *,
        skipped: bool = False,
        found: Sequence[float] = (),
    ) -> tuple[Cursor, Ledger]:
        """Return cursor and ledger after a committed step.

        Args:
            ledger: before the step.
            cursor: where the step started.
            count: samples of the step, summed over all workers by a float64 reduction.
            hash_lo: low halves of the workers' hashes, summed likewise.
            hash_hi: high halves.
            skipped: the step changed no parameter, since a gradient was not finite.
            found: what members have found of streams meanwhile; see `StreamOrder.advance`.

        Raises:
            ValueError: the step does not belong to the ledger's epoch, or a sum is no exact integer.
        """
        after, sums = self.advance(cursor, found), (count, hash_lo, hash_hi)
        dealt = partial(self.global_ids, cursor)
        return after, self.order.commit(ledger, cursor, after, dealt, sums, skipped)

    def fingerprint(self) -> dict[str, Any]:
        """Return the arguments and marks that are saved with a state and compared when it is loaded;
        JSON-able.
        """
        return {**self.arguments(), "marks": self.marks}

    def arguments(self) -> dict[str, int]:
        """Return the numbers that have to be equal on all workers, because the dealing follows from them."""
        return {
            "samples": self.source.size,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "seed": self.seed,
            "min_part": self.min_part,
            **self.order.fingerprint(),
        }

    def check_same(self, other: Mapping[str, Any]) -> None:
        """Raise ValueError that names the difference when another worker's arguments are not ours.

        other: its arguments, or its fingerprint, whose marks do not count here.
        """
        mine = self.arguments()
        different = {
            name: (mine.get(name), other.get(name))
            for name in [*mine, *(name for name in other if name not in mine)]
            if name != "marks" and other.get(name) != mine.get(name)
        }
        if different:
            text = ", ".join(
                f"{name} is {own} here and {theirs} there" for name, (own, theirs) in different.items()
            )
            raise ValueError(
                f"batches(): the workers do not agree: {text}; "
                "every worker must read the same dataset with the same arguments"
            )

    def changed_samples(self, other: Mapping[str, Any]) -> list[int]:
        """Return the numbers of samples that are not what they were for another's fingerprint."""
        return differing(self.marks, other.get("marks") or {})

    def describe(self) -> str:
        return ", ".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("source", "order", "marks")
        )


def _at_least(name: str, value: object, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"batches(): {name} must be an integer >= {minimum}, got {value!r}")
    return value


def plan_loop(
    dataset: Any,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    micro_batch: int | None = None,
    min_part: int = 2,
    shuffle: bool = True,
    drop_last: bool = False,
    weights: Any = None,
    collate_fn: Any = None,
    shuffle_buffer: int = DEFAULT_SHUFFLE_BUFFER,
    streams: int | None = None,
) -> LoopPlan:
    """Check the arguments of `batches` and make its plan.

    Args:
        dataset: what `make_source` reads by id, or shards.
        batch_size: samples of the global batch, at least 1; it stays the same whatever the number of workers.
        epochs: passes over the data, at least 0.
        seed: of the order and of random numbers in a step: an integer of 64 bits with sign.
        micro_batch: most samples that one worker computes at once, at least 2 * min_part - 1, so that every
            part can be cut; None: no limit.
        min_part: fewest samples that a worker computes at once (BatchNorm raises on one); smaller global
            batches are exempt.
        shuffle: whether each epoch has an order of its own; False: the data set's order.
        drop_last: whether an epoch's short last batch is left out.
        weights: chances of the samples, one number for each, which are then drawn with replacement; None:
            each once.
        collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
        shuffle_buffer: of shards: samples that are mixed at a time, over all streams, at least 0.
        streams: of shards: how many streams they are dealt to; None: as many as there are shards, at most 64.

    Returns:
        The plan, which decides what each step takes.

    Raises:
        ValueError: a value is out of its range, or two do not go together.
        TypeError: the data set has no samples by number, or `collate_fn` is no function.
    """
    _at_least("batch_size", batch_size, 1)
    _at_least("epochs", epochs, 0)
    _at_least("min_part", min_part, 1)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"batches(): seed must be an integer of 64 bits, got {seed!r}")
    if micro_batch is not None:
        _at_least("micro_batch", micro_batch, 1)
        if micro_batch < 2 * min_part - 1:
            raise ValueError(
                f"batches(): micro_batch={micro_batch} cannot keep pieces of min_part={min_part} or more; "
                f"use micro_batch >= {2 * min_part - 1}, or a smaller min_part if the model has no BatchNorm"
            )
    _at_least("shuffle_buffer", shuffle_buffer, 0)
    if isinstance(dataset, ShardedDataset):
        _check_for_shards(drop_last, weights, shuffle)
        shards = ShardList(dataset)
        stream_order = make_stream_order(shards, batch_size, shuffle, shuffle_buffer, streams)
        nothing = Source(0, _not_filled_in)
        return LoopPlan(nothing, stream_order, batch_size, epochs, seed, micro_batch, min_part)
    if streams is not None:
        raise ValueError("batches(): streams= is for data in shards, and this data set has samples by number")
    source = make_source(dataset, collate_fn)
    order = make_order(source.size, batch_size, shuffle, drop_last, weights)
    if source.reads_ranges and shuffle:
        raise ValueError(
            "batches(): an IterableDataset is read in ranges, one after another: say shuffle=False (shuffle "
            "when the data is written)"
        )
    return LoopPlan(source, order, batch_size, epochs, seed, micro_batch, min_part)


def _check_for_shards(drop_last: Any, weights: Any, shuffle: Any) -> None:
    """Raise ValueError for arguments that take samples by number."""
    if not isinstance(shuffle, bool):
        raise ValueError(f"batches(): shuffle must be True or False, got {shuffle!r}")
    if drop_last:
        raise ValueError(
            "batches(): drop_last leaves out samples of a pass whose end nobody knows before it is there: "
            "leave it out (the last batch of a pass over shards may be short)"
        )
    if weights is not None:
        raise ValueError("batches(): weights= draws samples by number, which samples of shards have not")


def _not_filled_in(ids: torch.Tensor) -> Any:
    raise RuntimeError("samples of shards are read by a loader")
