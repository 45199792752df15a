"""Read from a training DataLoader what the library deals: its data set, sizes and order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

from springtide.errors import UsageError


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Describe the data of a training loop.

    Attributes:
        dataset: whose samples have numbers.
        batch_size: samples that a worker computes at once.
        collate_fn: makes a batch of a list of samples.
        shuffle: each epoch has an order of its own.
        weights: chances of the samples, which are then drawn with replacement; None: each comes once.
        drop_last: an epoch's short last batch is left out.
        loader_workers: processes that read ahead.
    """

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any]
    shuffle: bool
    weights: torch.Tensor | None
    drop_last: bool
    loader_workers: int


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
    ranges = callable(getattr(dataset, "read_range", None))
    by_number = not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__")
    if not (hasattr(dataset, "__len__") and (by_number or ranges)):
        raise UsageError(
            f"{caller}: the data set is a {type(dataset).__name__} without samples by number, so none can be "
            "dealt again: give a map-style data set, or one with __len__() and read_range(start, stop)"
        )
    if loader.batch_size is None or (by_number and type(loader.batch_sampler) is not BatchSampler):
        raise UsageError(
            f"{caller}: the DataLoader has {_kind(loader.batch_sampler)} for its batches: batches are dealt "
            "by the library, give batch_size="
        )
    context = loader.multiprocessing_context
    if loader.num_workers and context is not None and context.get_start_method() != "fork":
        raise UsageError(f"{caller}: processes that read are forked: leave multiprocessing_context out")
    sampler, size = loader.sampler, len(dataset)
    shuffle, weights = isinstance(sampler, RandomSampler | WeightedRandomSampler), None
    if isinstance(sampler, WeightedRandomSampler):
        weights = sampler.weights
        if not sampler.replacement or sampler.num_samples != size:
            raise UsageError(
                f"{caller}: WeightedRandomSampler draws as many samples as the data set has ({size}), with "
                f"replacement: num_samples is {sampler.num_samples}"
            )
    elif isinstance(sampler, RandomSampler):
        if sampler.replacement or sampler.num_samples != size:
            raise UsageError(
                f"{caller}: RandomSampler draws each of the {size} samples once: leave replacement and "
                "num_samples out"
            )
    elif by_number and not isinstance(sampler, SequentialSampler):
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
    )


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
