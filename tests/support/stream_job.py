"""A job over shards without processes: members deal, read, vote, are lost, and go back to a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from springtide.data import Cursor, Ledger, LoopPlan, Shards, contribution, plan_loop
from springtide.data.balance import Proportions
from springtide.data.batch import Batch
from springtide.loading.streams import StreamLoader, make_stream_loader

Sample = tuple[int, int]


class Endless:
    """Shards whose number nobody can ask for; without `count` they never end."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        number = 0
        while self._count is None or number < self._count:
            yield number
            number += 1


@dataclass
class StreamJob:
    """Hold the committed position; each verb is what a job may live through between two commits.

    lengths: samples of the shards, which are (shard, number). options: of `plan_loop`. unknown: nobody knows
    how many shards there are. seeks: the data set can begin in the middle of a shard. dataset: one in shards,
    in place of those of `lengths`.
    """

    lengths: Sequence[int]
    options: dict[str, Any]
    unknown: bool = False
    seeks: bool = False
    processes: int = 0
    dataset: Any = None
    cursor: Cursor = field(default_factory=Cursor)
    ledger: Ledger = field(default_factory=Ledger)
    steps: list[tuple[int, list[Sample]]] = field(default_factory=list)
    """A list by committed step: its pass, and the samples of its global batch in order."""
    read: int = 0
    """Samples that the data set was asked for."""

    def __post_init__(self) -> None:
        self._end = self._plan()
        self._members: list[tuple[LoopPlan, StreamLoader]] = []
        self._saved = (self.cursor.to_json(), self.ledger.to_json(), 0)

    def resize(self, size: int) -> None:
        """Go on with so many members: some are lost, or new ones come."""
        while len(self._members) > size:
            self._members.pop(0)[1].close()
        while len(self._members) < size:
            plan = self._plan()
            loader = make_stream_loader(plan, self.processes, collate_fn=list)
            self._members.append((plan, loader))

    def save(self) -> None:
        """Write a checkpoint."""
        self._saved = self.cursor.to_json(), self.ledger.to_json(), len(self.steps)

    def restore(self, size: int) -> None:
        """Lose all members; go back to the checkpoint with others."""
        self.close()
        self.resize(size)
        cursor, ledger, steps = self._saved
        self.cursor, self.ledger = Cursor.from_json(cursor), Ledger.from_json(ledger)
        del self.steps[steps:]

    @property
    def ended(self) -> bool:
        return self._end.ended(self.cursor)

    def dealt(self) -> Cursor:
        """Return where the next step starts, with what members tell each other."""
        plan, cursor = self._members[0][0], self.cursor
        assert plan.streams is not None
        if not plan.is_known(cursor):
            cursor = plan.streams.opened(cursor)
        while not plan.is_known(cursor):
            found = {}
            for rank, (_, loader) in enumerate(self._members):
                found |= loader.look(cursor, rank, len(self._members))
            cursor = plan.streams.extended(cursor, found)
        return cursor

    def step(self, speeds: Sequence[int] = (), commits: bool = True) -> list[Sample]:
        """Make a step; return the samples of its global batch. It is dropped in the end unless it commits."""
        cursor, size = self.dealt(), len(self._members)
        times = tuple(speeds[rank % len(speeds)] for rank in range(size)) if speeds else ()
        proportions = Proportions(times, (0,) * size) if times else None
        dealt, sums, found = list[Sample](), [0.0, 0.0, 0.0], list[float]()
        for rank, (plan, loader) in enumerate(self._members):
            loader.stand_at(cursor, rank, size, proportions)
            batch = plan.batch(
                cursor,
                rank,
                size,
                lambda ids, loader=loader: loader.read(cursor.step, ids),
                proportions=proportions,
            )
            dealt += self._computed(batch)
            added = contribution(batch.micro.contributed_ids, cursor.stage, cursor.epoch)
            sums = [a + float(b) for a, b in zip(sums, added, strict=True)]
            vote = loader.found()
            found = [a + b for a, b in zip(found, vote, strict=True)] if found else vote
        if commits:
            plan = self._members[0][0]
            self.cursor, self.ledger = plan.commit(self.ledger, cursor, *sums, found=found)
            self.steps.append((cursor.epoch, dealt))
        return dealt

    def samples(self, epoch: int) -> list[Sample]:
        """Return all samples that the committed steps of a pass have taken, sorted."""
        return sorted(sample for own, batch in self.steps if own == epoch for sample in batch)

    def close(self) -> None:
        self.resize(0)

    @staticmethod
    def _computed(batch: Batch) -> list[Sample]:
        batch.micro.contribute()
        samples: list[Sample] = batch.data
        return [] if batch.standin else samples

    def _plan(self) -> LoopPlan:
        options = {"seed": 3, "min_part": 1} | self.options
        if self.dataset is not None:
            return plan_loop(self.dataset, **options)
        numbers: Any = Endless(len(self.lengths)) if self.unknown else list(range(len(self.lengths)))
        read: Any = self._from if self.seeks else self._whole
        return plan_loop(Shards(numbers, read), **options)

    def _whole(self, shard: int) -> Iterator[Sample]:
        yield from self._from(shard, 0)

    def _from(self, shard: int, start: int) -> Iterator[Sample]:
        for number in range(start, self.lengths[shard]):
            self.read += 1
            yield shard, number


def keys(ids: torch.Tensor) -> list[Sample]:
    """Return the (shard, number) of samples' keys."""
    return [(key >> 39, key & ((1 << 39) - 1)) for key in ids.tolist()]
