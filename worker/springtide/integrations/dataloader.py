"""Read from a training DataLoader what the library deals: its data set, sizes and order.

A data set whose samples have no numbers is read as shards, as `springtide.batches()` reads it; one that can
only be read from its begin is one shard. Other libraries' loaders leave the order of such data to them, so
nothing is shuffled unless the script says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from springtide.data.shards import ShardedDataset
from springtide.errors import UsageError
from springtide.integrations.sources import given, one_shard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Describe the data of a training loop.

    Attributes:
        dataset: whose samples have numbers, or a stream's shards.
        batch_size: samples that a worker computes at once.
        collate_fn: makes a batch of a list of samples.
        shuffle: each epoch has an order of its own.
        weights: chances of the samples, which are then drawn with replacement; None: each comes once.
        drop_last: an epoch's short last batch is left out.
        loader_workers: processes that read ahead.
        samples: of a pass; None: nobody knows how many a stream has.
        is_stream: the samples have no numbers.
    """

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any]
    shuffle: bool
    weights: torch.Tensor | None
    drop_last: bool
    loader_workers: int
    samples: int | None
    is_stream: bool = False


def has_numbers(dataset: Any) -> bool:
    """Return whether the samples of a data set can be read by their numbers."""
    ranges = callable(getattr(dataset, "read_range", None))
    by_number = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    return hasattr(dataset, "__len__") and (by_number or ranges)


def as_stream(dataset: Any, caller: str) -> ShardedDataset | None:
    """Return a data set whose samples have no numbers as shards; None for one whose samples have numbers.

    Args:
        dataset: of the script.
        caller: names where it came from, in an error.

    Raises:
        UsageError: samples of it cannot be accounted for; it says why and what to do.
    """
    try:
        found = given(dataset, None, False).dataset
    except TypeError as error:
        here = " (shuffle_buffer= is an argument here, too)" if "shuffle_buffer" in str(error) else ""
        raise UsageError(f"{caller}: {error}{here}") from None
    if isinstance(found, ShardedDataset):
        return found
    if has_numbers(dataset):
        return None
    name = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise UsageError(f"{caller}: this is a {name}: give its data set, batches are dealt by the library")
    if isinstance(dataset, Iterator):
        raise UsageError(
            f"{caller}: the data set is a {name}, which can be iterated once only, so no sample can be dealt "
            "again: give an IterableDataset whose __iter__() begins anew each time"
        )
    if not isinstance(dataset, Iterable):
        raise UsageError(
            f"{caller}: the data set is a {name} without samples by number, which cannot be iterated either: "
            "give a map-style data set, an IterableDataset, or its shards (springtide.data.Shards)"
        )
    return one_shard(dataset)


def length_of(dataset: Any) -> int | None:
    """Return how many samples a stream says that it has; None where it does not say."""
    try:
        return len(dataset)
    except (TypeError, AttributeError, NotImplementedError):
        return None


def tell_reading(stream: ShardedDataset) -> None:
    """Log where each worker reads all of a stream, for it has one shard only."""
    try:
        only = len(stream.shards) == 1  # type: ignore[arg-type]
    except TypeError:
        return
    if only:
        log.info(
            "the training data are one shard, of which each worker reads all and computes its part: give "
            "them in several shards (springtide.data.Shards) to share the reading out"
        )


def check_shuffle_buffer(caller: str, value: object) -> None:
    """Raise ValueError for a `shuffle_buffer` that is no integer of 0 or more.

    Args:
        caller: names the class in the error.
        value: of the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{caller}(): shuffle_buffer must be an integer of 0 or more, got {value!r}")


def order_options(data: TrainingData, shuffle_buffer: int, caller: str) -> dict[str, Any]:
    """Return the arguments of `batches()` that say in which order samples come.

    Args:
        data: of the loop.
        shuffle_buffer: samples of a stream that are mixed at a time; 0: they come in its own order.
        caller: names the class in an error.

    Raises:
        UsageError: samples have numbers, and are to be mixed as a stream's.
    """
    if not data.is_stream:
        if shuffle_buffer:
            raise UsageError(
                f"{caller}(shuffle_buffer={shuffle_buffer}): it mixes samples of a stream, and these have "
                "numbers: leave it out, and say in the DataLoader or the arguments whether they are shuffled"
            )
        return {"shuffle": data.shuffle, "weights": data.weights, "drop_last": data.drop_last}
    return {"shuffle": shuffle_buffer > 0, "shuffle_buffer": shuffle_buffer}


def read_loader(loader: Any, caller: str) -> TrainingData:
    """Return what a DataLoader says of the data.

    Args:
        loader: of the script.
        caller: names where it came from, in an error.

    Raises:
        UsageError: its samples cannot be dealt to workers that come and go; it says why and what to do.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"{caller}: {_kind(loader)} is no torch.utils.data.DataLoader: samples are dealt by the library, "
            "from one DataLoader with a data set; put several data sets into one"
        )
    dataset: Any = loader.dataset
    stream = as_stream(dataset, caller)
    ranges = callable(getattr(dataset, "read_range", None))
    by_number = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    if loader.batch_size is None or (by_number and not _is_plain(loader.batch_sampler)):
        raise UsageError(
            f"{caller}: the DataLoader has {_kind(loader.batch_sampler)} for its batches: batches are dealt "
            "by the library, give batch_size="
        )
    context = loader.multiprocessing_context
    if loader.num_workers and context is not None and context.get_start_method() != "fork":
        raise UsageError(f"{caller}: processes that read are forked: leave multiprocessing_context out")
    if stream is not None:
        return _of_stream(loader, stream, caller)
    sampler: Any = loader.sampler
    size = len(dataset)
    shuffle, weights = _is_random(sampler), None
    if isinstance(sampler, WeightedRandomSampler):
        shuffle, weights = True, sampler.weights
        if not sampler.replacement or sampler.num_samples != size:
            raise UsageError(
                f"{caller}: WeightedRandomSampler draws as many samples as the data set has ({size}), with "
                f"replacement: num_samples is {sampler.num_samples}"
            )
    elif shuffle:
        if sampler.replacement or sampler.num_samples != size:
            raise UsageError(
                f"{caller}: RandomSampler draws each of the {size} samples once: leave replacement and "
                "num_samples out"
            )
    elif by_number and not _is_sequential(sampler):
        raise UsageError(
            f"{caller}: {_kind(sampler)} is a sampler of one process, which knows nothing of workers that "
            "come and go: use shuffle=True, shuffle=False or a WeightedRandomSampler, or give the data set "
            "in the wanted order"
        )
    assert loader.collate_fn is not None
    return TrainingData(
        dataset,
        loader.batch_size,
        loader.collate_fn,
        shuffle and not ranges,
        weights,
        loader.drop_last,
        loader.num_workers,
        size,
    )


def _of_stream(loader: DataLoader[Any], stream: ShardedDataset, caller: str) -> TrainingData:
    """Return what a DataLoader says of a stream."""
    refuse_drop_last(caller, drop_last=loader.drop_last)
    if _is_random(loader.sampler) or isinstance(loader.sampler, WeightedRandomSampler):
        raise UsageError(
            f"{caller}: {_kind(loader.sampler)} draws samples by number, which those of a stream have not: "
            "leave it out, and say shuffle_buffer="
        )
    tell_reading(stream)
    assert loader.batch_size is not None
    assert loader.collate_fn is not None
    size = length_of(loader.dataset)
    return TrainingData(
        stream, loader.batch_size, loader.collate_fn, False, None, False, loader.num_workers, size, True
    )


def refuse_drop_last(caller: str, *, drop_last: bool) -> None:
    """Raise UsageError where the last batch of a stream is to be left out.

    Args:
        caller: names where the stream came from.
        drop_last: of the script.
    """
    if drop_last:
        raise UsageError(
            f"{caller}: drop_last leaves out samples of a pass whose end nobody knows before it is there: "
            "leave it out (the last batch of a pass over a stream may be short)"
        )


def _is_plain(sampler: object) -> bool:
    """Return whether batches are made of samples in the order in which they come; torchdata has a class of
    its own for it."""
    return isinstance(sampler, BatchSampler) and type(sampler).__name__ == "BatchSampler"


def _is_random(sampler: Any) -> bool:
    return isinstance(sampler, RandomSampler) or type(sampler).__name__ == "RandomSampler"


def _is_sequential(sampler: object) -> bool:
    return isinstance(sampler, SequentialSampler) or type(sampler).__name__ == "SequentialSampler"


def smallest_part(models: Iterable[torch.nn.Module], at_once: int | None) -> int:
    """Return the fewest samples that a worker computes at once: statistics of one are none.

    Args:
        models: of the script.
        at_once: most samples of a micro-batch; None: a part is computed as a whole.
    """
    has_norms = any(isinstance(item, _BatchNorm) for model in models for item in model.modules())
    return 2 if has_norms and (at_once is None or at_once > 2) else 1


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
