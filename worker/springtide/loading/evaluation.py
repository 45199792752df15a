"""Read what an evaluation goes over: samples by number, or data in shards.

Workers share out numbers, each once: of samples, or of shards whose samples nobody has counted. A batch of
data in shards ends with its shard, so that batches are the same ones however the shards are shared out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from springtide.data.batch import Batch, Micro
from springtide.data.loop import LoopPlan
from springtide.data.shards import ShardedDataset, ShardList
from springtide.data.source import Source, make_source
from springtide.data.stream_order import StreamOrder
from springtide.data.streams import MAX_SHARDS, OFFSET_BITS
from springtide.loading.device_copies import Copier, with_copies
from springtide.loading.stream_reader import StreamWalk
from springtide.pods.evaluation import ForwardPass, forward_passes
from springtide.pods.pod import Pod
from springtide.train_step.randomness import isolated

MAX_UNCOUNTED = 1 << 20
"""Most shards of an evaluation whose number the data set does not say; more are taken for no end."""
_COLLATING = 1
"""Names the random numbers of collating, beside those of reading."""


class EvaluationData(Protocol):
    """Be what an evaluation goes over.

    Attributes:
        count: numbers that are shared out, from 0.
        unit: numbers that a worker takes at once, at least.
        kind: what the numbers are of, which has to be equal on all workers; empty: samples.
    """

    count: int
    unit: int
    kind: str

    def batches(self, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of some numbers, each with the samples of it that count here.

        Args:
            start: the first number.
            stop: the number behind the last one.
        """


class NumberedData:
    """Give samples by number to an evaluation; the processes of a pod with a mesh take them as one."""

    def __init__(self, source: Source, batch_size: int, pod: Pod | None = None) -> None:
        """Take the samples.

        Args:
            source: of the samples.
            batch_size: samples that this process computes at once.
            pod: whose processes evaluate together; None: this one does so by itself.
        """
        self._source, self._batch_size, self._pod = source, batch_size, pod
        self.count = source.size
        self.unit = batch_size * (1 if pod is None else pod.shape.data_degree)
        self.kind = ""

    def batches(self, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of some samples; see `EvaluationData`.

        Args:
            start: the first sample.
            stop: the sample behind the last one.
        """
        for forward in self._forward_passes(start, stop):
            ids = torch.arange(forward.ids.start, forward.ids.stop)
            own, standin_ids = (ids[:0], ids) if forward.is_standin else (ids, None)
            batch = Batch(Micro(own, ids.numel()), own, self._source.fetch, standin_ids=standin_ids)
            yield batch, forward.weight

    def _forward_passes(self, start: int, stop: int) -> Iterator[ForwardPass]:
        if self._pod is not None:
            return forward_passes(start, stop, self._batch_size, self._pod.shape, self._pod.local_rank)
        firsts = range(start, stop, self._batch_size)
        ranges = (range(first, min(first + self._batch_size, stop)) for first in firsts)
        return (ForwardPass(ids, False, len(ids)) for ids in ranges)


class ShardData:
    """Give data in shards to an evaluation, shard by shard, each from its begin to its end."""

    def __init__(
        self,
        dataset: ShardedDataset,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Count the shards; nothing of them is read yet.

        Args:
            dataset: the shards, which have an end.
            batch_size: samples that this process computes at once.
            collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
            copier: brings batches to the device; None: they stay where `collate_fn` leaves them.

        Raises:
            TypeError: the shards can be iterated once only, or `collate_fn` is no function.
            ValueError: there are no shards, too many, or no end of them.
        """
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(
                "batches(): collate_fn must be a function of a list of samples, got "
                f"{type(collate_fn).__name__}"
            )
        shards = ShardList(_with_end(dataset))
        self._batch_size = batch_size
        self._collate = default_collate if collate_fn is None else collate_fn
        self._copier = copier
        # A stream for each shard, which is read alone; nothing is mixed, and there is one pass.
        order = StreamOrder(shards, shards.count, shuffle=False)
        self._plan = LoopPlan(Source(0, _has_no_numbers), order, batch_size, 1, 0, None, 1)
        self.count, self.unit = shards.count, 1
        self.kind = f"shards {shards.digest:08x}, batch_size {batch_size}"

    def batches(self, start: int, stop: int) -> Iterator[tuple[Batch, int]]:
        """Yield the batches of some shards; see `EvaluationData`.

        Args:
            start: the first shard.
            stop: the shard behind the last one.
        """
        for shard in range(start, stop):
            walk, first, is_over = StreamWalk(self._plan, 0, shard, 0, 0), 0, False
            while not is_over:
                with isolated(0):
                    piece = walk.read(self._batch_size)
                is_over, count = piece.over, len(piece.samples)
                if count:
                    yield self._batch(shard, first, piece.samples), count
                first += count

    def _batch(self, shard: int, first: int, samples: list[Any]) -> Batch:
        ids = (shard << OFFSET_BITS) | torch.arange(first, first + len(samples))

        def collated(_: torch.Tensor) -> Any:
            with isolated(0, shard, first, _COLLATING):
                found = self._collate(samples)
            return found if self._copier is None else self._copier.now(found)

        return Batch(Micro(ids, len(samples)), ids, collated)


def _has_no_numbers(ids: torch.Tensor) -> Any:
    raise RuntimeError("samples of shards are read in their order, not by number")


@dataclass(slots=True)
class _Listed:
    """Be a data set in shards that are in a list."""

    shards: Iterable[Any]
    read_shard: Callable[[Any, int], Iterable[Any]]


def _with_end(dataset: ShardedDataset) -> ShardedDataset:
    """Return the data set with its shards in a sequence. Raise ValueError for too many, or no end of them."""
    names = dataset.shards
    if isinstance(names, Sequence):
        if len(names) > MAX_SHARDS:
            raise ValueError(f"batches(train=False): {len(names)} shards; there can be {MAX_SHARDS}")
        return dataset
    ShardList(dataset)  # refuses shards that can be iterated once only
    found = list(itertools.islice(iter(names), MAX_UNCOUNTED + 1))
    if len(found) > MAX_UNCOUNTED:
        raise ValueError(
            "batches(train=False): an evaluation goes over the data once, and the shards of this data set "
            f"have no length and no end in sight ({MAX_UNCOUNTED} were looked at): give a list of the "
            "shards to evaluate"
        )
    return _Listed(found, dataset.read_shard)


def evaluation_data(
    dataset: Any,
    batch_size: Any,
    collate_fn: Any = None,
    *,
    copier: Copier | None = None,
    pod: Pod | None = None,
) -> EvaluationData:
    """Check the arguments of `batches(..., train=False)`, and return what it goes over.

    Args:
        dataset: with samples by number, or in shards.
        batch_size: samples that this process computes at once, an integer of the script.
        collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.
        copier: brings batches to the device; None: they stay where `collate_fn` leaves them.
        pod: whose processes evaluate together; None: this one does so by itself.

    Raises:
        ValueError: `batch_size` is out of its range, or there is nothing to evaluate, or no end of it.
        TypeError: the data set cannot be read, or `collate_fn` is no function.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batches(): batch_size must be an integer >= 1, got {batch_size!r}")
    if isinstance(dataset, ShardedDataset):
        return ShardData(dataset, batch_size, collate_fn, copier)
    return NumberedData(with_copies(make_source(dataset, collate_fn), copier), batch_size, pod)
