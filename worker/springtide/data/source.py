"""Samples by id: the one thing that the library asks of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate


@dataclass(frozen=True, slots=True)
class FetchHalves:
    """The two halves of a fetch: reading samples, and collating them.

    The result of a script's own function for some samples says nothing of each of them (lengths are padded to
    the longest, say), so it cannot be split and joined as rows.

    Attributes:
        read: returns the samples as they are, by ids.
        collate: makes one object of them.
    """

    read: Callable[[torch.Tensor], list[Any]]
    collate: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Source:
    """size: number of samples; ids are 0..size-1.

    Fetch(ids: int64 of shape (n,), n >= 1) returns them collated. runs_code: the script's, which may draw
    random numbers. reads_ranges: it reads consecutive ids only, in one go. halves: with a collate_fn of the
    script's.
    """

    size: int
    fetch: Callable[[torch.Tensor], Any]
    runs_code: bool = False
    reads_ranges: bool = False
    halves: FetchHalves | None = None


def _rows(tensor: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, ids.to(tensor.device))


def _common_size(tensors: Mapping[str, torch.Tensor]) -> int:
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise ValueError(f"dataset: tensor {name} has no first dimension to number the samples by")
    sizes = {name: tensor.size(0) for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"dataset: the tensors differ in their number of samples: {sizes}")
    return next(iter(sizes.values()))


def _all_tensors(values: Any) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values)


def _from_tensors(dataset: Any) -> Source | None:
    """One index_select per tensor instead of a Python call per sample.

    None if the dataset is not just tensors.
    """
    if isinstance(dataset, torch.Tensor):
        return Source(_common_size({"dataset": dataset}), lambda ids: _rows(dataset, ids))
    if isinstance(dataset, dict):
        if not _all_tensors(dataset.values()):
            raise TypeError(
                "dataset: a dict must hold tensors, one row per sample; wrap anything else in a Dataset"
            )
        return Source(
            _common_size(dataset), lambda ids: {name: _rows(tensor, ids) for name, tensor in dataset.items()}
        )
    if isinstance(dataset, tuple):
        if not _all_tensors(dataset):
            raise TypeError(
                "dataset: a tuple must hold tensors, one row per sample; wrap anything else in a Dataset"
            )
        tensors = dataset
    elif isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        tensors = dataset.tensors
    else:
        return None
    if not tensors:
        raise ValueError("dataset: it holds no tensors")
    size = _common_size({str(i): tensor for i, tensor in enumerate(tensors)})
    return Source(size, lambda ids: tuple(_rows(tensor, ids) for tensor in tensors))


def _read(dataset: Any, ids: list[int]) -> list[Any]:
    # The same protocol as torch's own fetcher: a dataset may answer for many ids at once.
    if callable(getattr(dataset, "__getitems__", None)):
        samples = list(dataset.__getitems__(ids))
        if len(samples) != len(ids):
            raise ValueError(
                f"dataset: __getitems__ was asked for {len(ids)} samples and returned {len(samples)}"
            )
        return samples
    samples = []
    for i in ids:
        try:
            samples.append(dataset[i])
        except Exception as error:
            error.add_note(f"while reading sample {i} of the dataset")
            raise
    return samples


def _from_ranges(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> Source:
    """An IterableDataset that says how long it is and reads any range of itself."""
    if not callable(getattr(dataset, "read_range", None)) or not hasattr(dataset, "__len__"):
        raise TypeError(
            "dataset: an IterableDataset has no samples by number, so none can be dealt again: give it "
            "__len__() and read_range(start, stop), which yields the samples start..stop-1, or give a "
            "dataset with __len__ and __getitem__, or its shards (springtide.data.Shards, docs/data.md)"
        )
    size = len(dataset)
    if size < 1:
        raise ValueError("dataset: it is empty; check the path or the split that it was made from")

    def read(ids: torch.Tensor) -> list[Any]:
        samples: list[Any] = []
        for start, stop in _runs(ids.tolist()):
            found = list(dataset.read_range(start, stop))
            if len(found) != stop - start:
                raise ValueError(
                    f"dataset: read_range({start}, {stop}) yielded {len(found)} samples, and should yield "
                    f"{stop - start}"
                )
            samples += found
        return samples

    return _collated(size, read, collate, reads_ranges=True)


def _collated(
    size: int,
    read: Callable[[torch.Tensor], list[Any]],
    collate: Callable[[list[Any]], Any] | None,
    *,
    reads_ranges: bool = False,
) -> Source:
    """collate: the script's, torch's if None."""
    if collate is None:
        return Source(size, lambda ids: default_collate(read(ids)), True, reads_ranges)
    return Source(size, lambda ids: collate(read(ids)), True, reads_ranges, FetchHalves(read, collate))


def _each(rows: Any) -> list[Any]:
    """The samples of tensors, or of a tuple or dict of them, one by one."""
    if isinstance(rows, torch.Tensor):
        return list(rows.unbind())
    if isinstance(rows, dict):
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    return list(zip(*rows, strict=True))


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (start, stop)."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def make_source(dataset: Any, collate_fn: Any = None) -> Source:
    """Make a source of samples by id.

    Args:
        dataset: a map-style dataset, a TensorDataset, tensors (one, a tuple or a dict of them), or an
            IterableDataset with `read_range`.
        collate_fn: makes a batch's data of a list of samples; None: torch's `default_collate`.

    Raises:
        TypeError: it cannot be read by id (a DataLoader, say), or `collate_fn` is no function; the text says
            what to do.
        ValueError: the data set is empty.
    """
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(
            f"batches(): collate_fn must be a function of a list of samples, got {type(collate_fn).__name__}"
        )
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset: this is a DataLoader; give its dataset (and its collate_fn, if you gave it one): "
            "batches() shuffles and batches itself"
        )
    if isinstance(dataset, IterableDataset):
        return _from_ranges(dataset, collate_fn)
    source = _from_tensors(dataset)
    if source is not None and collate_fn is not None:
        rows = source.fetch
        source = _collated(source.size, lambda ids: _each(rows(ids)), collate_fn)
    if source is None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset: {type(dataset).__name__} has no __len__ and __getitem__; give a map-style dataset"
            )
        source = _collated(len(dataset), lambda ids: _read(dataset, ids.tolist()), collate_fn)
    if source.size < 1:
        raise ValueError("dataset: it is empty; check the path or the split that it was made from")
    return source
