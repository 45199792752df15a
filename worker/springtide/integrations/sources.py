"""Data sets of other libraries as data in shards; `springtide.batches()` finds out by itself which it has.

Nothing of those libraries is imported before a data set of theirs is given. Some of what they can do cannot
be accounted for, and is refused by name: an order that nobody can make a second time, samples that are drawn
with replacement, a split by rank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from springtide.data.shards import ShardedDataset, Shards

__all__ = ["hugging_face", "one_shard", "webdataset"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Given:
    """Say what `batches()` reads.

    Attributes:
        dataset: with samples by number, or in shards.
        collate_fn: makes a batch's data of a list of samples; None: torch's.
        shuffle: whether each pass has an order of its own.
    """

    dataset: Any
    collate_fn: Any
    shuffle: Any


def given(dataset: Any, collate_fn: Any, shuffle: Any) -> Given:
    """Return what `batches()` reads of a data set of another library; any other one as it is.

    Args:
        dataset: what the script gave.
        collate_fn: the script's.
        shuffle: the script's.

    Raises:
        TypeError: it is one that cannot be accounted for; the text says why, and what to do.
    """
    if isinstance(dataset, ShardedDataset):
        return Given(dataset, collate_fn, shuffle)
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__}
    if ("torchdata", "StatefulDataLoader") in kinds:
        return _of_loader(dataset, collate_fn, shuffle)
    if ("datasets", "IterableDataset") in kinds:
        return Given(hugging_face(dataset), collate_fn, shuffle)
    if ("webdataset", "DataPipeline") in kinds:
        return Given(webdataset(dataset), collate_fn, shuffle)
    if ("streaming", "StreamingDataset") in kinds:
        raise TypeError(
            "dataset: StreamingDataset deals its samples to ranks by itself, so they cannot be accounted "
            "for: give springtide.integrations.mds.MDS(folder) of the same shards"
        )
    return Given(dataset, collate_fn, shuffle)


# ---- torchdata


def _of_loader(loader: Any, collate_fn: Any, shuffle: Any) -> Given:
    """Unwrap a StatefulDataLoader: its data set, its `collate_fn`, and whether it shuffles."""
    if collate_fn is None and loader.collate_fn not in (default_collate, None):
        collate_fn = loader.collate_fn if loader.batch_size is not None else None
    if isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, ShardedDataset):
        inner = given(loader.dataset, collate_fn, shuffle)
        if inner.dataset is loader.dataset and not hasattr(loader.dataset, "read_range"):
            return Given(one_shard(loader.dataset), collate_fn, shuffle)
        return inner
    order, sampler = _order_of(loader.sampler), type(loader.sampler).__name__
    if loader.batch_sampler is not None and type(loader.batch_sampler).__name__ != "BatchSampler":
        order, sampler = None, type(loader.batch_sampler).__name__
    if order is None:
        raise TypeError(
            f"dataset: this StatefulDataLoader has a sampler of its own ({sampler}), whose order nobody "
            "knows at a batch that is dealt again: leave it out, and use shuffle= or weights= of batches()"
        )
    return Given(loader.dataset, collate_fn, shuffle and order == "random")


def _order_of(sampler: Any) -> str | None:
    """Return sequential or random; None for an order of another kind."""
    names = {kind.__name__ for kind in type(sampler).__mro__}
    if isinstance(sampler, SequentialSampler) or type(sampler).__name__ == "SequentialSampler":
        return "sequential"
    if isinstance(sampler, RandomSampler) or "RandomSampler" in names:
        return None if getattr(sampler, "replacement", False) else "random"
    return None


def one_shard(dataset: Iterable[Any]) -> Shards:
    """Return data that can only be read from their begin as one shard.

    Each worker reads all of it, and computes its own part. A worker that takes over, or is restored, reads it
    from the begin again; so does each pass of a data set that keeps its place (`state_dict()`).

    Args:
        dataset: an iterable that gives the same samples in the same order each time; it need not end.
    """
    begin = _begins.of(dataset)
    return Shards((type(dataset).__name__,), lambda _: begin(dataset))


class _Begins:
    """Know where data sets begin that keep their place, and go on from there when they are read again.

    One that has `state_dict()` and `load_state_dict()` may stand anywhere when a worker reads it: a reading
    that ended early, as members came or went, has left it there.
    """

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def of(self, dataset: Iterable[Any]) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Return what reads a data set from its begin: where it stood when it was first given.

        Args:
            dataset: that is given to `batches()`.
        """
        save, load = getattr(dataset, "state_dict", None), getattr(dataset, "load_state_dict", None)
        if not callable(save) or not callable(load):
            return iter
        number = id(dataset)
        if number not in self._states:
            self._states[number] = copy.deepcopy(save())
            with contextlib.suppress(TypeError):  # a class with slots; then its state is kept for good
                weakref.finalize(dataset, self._states.pop, number)
        state = self._states[number]

        def begin(source: Iterable[Any]) -> Iterator[Any]:
            load(copy.deepcopy(state))
            return iter(source)

        return begin


_begins = _Begins()


# ---- Hugging Face datasets


def hugging_face(dataset: Any) -> Shards:
    """Return a `datasets.IterableDataset` as the shards that it has.

    Args:
        dataset: not split by node.

    Raises:
        TypeError: it is split already.
    """
    if getattr(dataset, "_distributed", None) is not None:
        raise TypeError(
            "dataset: split_dataset_by_node() has split it by rank, and ranks come and go: leave that out, "
            "batches() deals its shards"
        )
    kinds = list(_kinds(getattr(dataset, "_ex_iterable", None)))
    whole = sorted({name for name, _ in kinds if _needs_all(name)})
    state = zlib.crc32(repr([text for _, text in kinds]).encode())
    count = int(dataset.num_shards)
    if whole and count > 1:
        log.warning(
            "%s of a streaming data set depends on all of its %d shards, so it is one stream, and each "
            "worker reads all of it: do that before the shards are made, or leave it out",
            " and ".join(whole),
            count,
        )
    if whole or count == 1:
        return Shards((f"all/{state}",), lambda _: iter(dataset))

    def read(shard: tuple[int, int]) -> Iterator[Any]:
        return iter(dataset.shard(num_shards=count, index=shard[0]))

    return Shards([(number, state) for number in range(count)], read)


def _kinds(iterable: Any) -> Iterator[tuple[str, str]]:
    """Yield the steps of a data set's pipeline: the kind, and a text that differs where their random numbers
    do.
    """
    if iterable is None:
        return
    generator = getattr(iterable, "generator", None)
    bits = getattr(generator, "bit_generator", None)
    yield type(iterable).__name__, "" if bits is None else repr(bits.state)
    inner = getattr(iterable, "ex_iterables", None) or [getattr(iterable, "ex_iterable", None)]
    for part in inner:
        yield from _kinds(part)


def _needs_all(kind: str) -> bool:
    """Return whether a step of a pipeline is another one over shards than over the whole."""
    return kind in ("TakeExamplesIterable", "SkipExamplesIterable") or "Cycling" in kind


# ---- WebDataset

_LEFT_OUT = frozenset(("single_node_only", "split_by_node", "split_by_worker", "check_empty", "non_empty"))
_REFUSED = {
    "shuffle": "shuffles by numbers that nobody can draw again; batches() shuffles (shuffle_buffer=)",
    "detshuffle": "shuffles by itself; batches() shuffles (shuffle_buffer=)",
    "batched": "makes batches; batches() makes them (batch_size=, collate_fn=)",
    "slice": "counts samples over all shards",
    "rsample": "draws samples at random",
    "mux": "mixes pipelines",
}


def webdataset(dataset: Any) -> Shards:
    """Return a `webdataset.WebDataset`, or a DataPipeline over a list of shards, as its tar files.

    Args:
        dataset: its pipeline is run for each tar file by itself, without the stages that split by rank.

    Raises:
        TypeError: a stage of it cannot be accounted for; it is named.
    """
    from webdataset import DataPipeline, SimpleShardList

    first, *stages = dataset.pipeline
    urls = getattr(first, "urls", None)
    if not isinstance(first, SimpleShardList) or not isinstance(urls, Sequence):
        raise TypeError(
            f"dataset: this WebDataset begins with {type(first).__name__}, which is no list of shards that "
            "each is read once: leave resampled=True out (batches(epochs=) repeats)"
        )
    if dataset.repetitions != 1 or dataset.nsamples > 0:
        raise TypeError(
            "dataset: this WebDataset has an epoch of its own (with_epoch, repeat): leave it out, a pass of "
            "batches() takes each sample once"
        )
    kept = [stage for stage in stages if not _is_left_out(stage, stages)]

    def read(url: Any) -> Iterator[Any]:
        return iter(DataPipeline(SimpleShardList([url]), *kept))

    return Shards(list(urls), read)


def _is_left_out(stage: Any, stages: Sequence[Any]) -> bool:
    """Return whether a stage is not run for a single tar file. Raise TypeError for one that is refused."""
    name = _stage_name(stage)
    if name in _LEFT_OUT:
        return True
    if name in ("shuffle", "detshuffle"):
        before = [_stage_name(other) for other in stages[: stages.index(stage)]]
        of_shards = not any(name.startswith(("tar", "group")) for name in before)
        arguments = [*getattr(stage, "args", ()), getattr(stage, "bufsize", None)]
        if of_shards or (arguments and arguments[0] in (False, 0)):
            return True  # of shards, which batches() shuffles; or of nothing
    if name in _REFUSED:
        raise TypeError(f"dataset: {name} of this WebDataset {_REFUSED[name]}: leave it out")
    return False


def _stage_name(stage: Any) -> str:
    function: Callable[..., Any] = getattr(stage, "f", stage)
    name = getattr(function, "__name__", type(function).__name__)
    return str(name).lstrip("_")
