"""Samples by id: the one thing that the library asks of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate


@dataclass(frozen=True, slots=True)
class Source:
    """size: number of samples; ids are 0..size-1.

    Fetch(ids: int64 of shape (n,), n >= 1) returns them collated. runs_code: the script's, which may draw
    random numbers. ranges: it reads consecutive ids only, in one go.
    """

    size: int
    fetch: Callable[[torch.Tensor], Any]
    runs_code: bool = False
    ranges: bool = False


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


def _from_ranges(dataset: Any) -> Source:
    """An IterableDataset that says how long it is and reads any range of itself."""
    if not callable(getattr(dataset, "read_range", None)) or not hasattr(dataset, "__len__"):
        raise TypeError(
            "dataset: an IterableDataset has no samples by number, so none can be dealt again: give it "
            "__len__() and read_range(start, stop), which yields the samples start..stop-1, or give a "
            "dataset with __len__ and __getitem__"
        )
    size = len(dataset)
    if size < 1:
        raise ValueError("dataset: it is empty; check the path or the split that it was made from")

    def fetch(ids: torch.Tensor) -> Any:
        samples: list[Any] = []
        for start, stop in _runs(ids.tolist()):
            read = list(dataset.read_range(start, stop))
            if len(read) != stop - start:
                raise ValueError(
                    f"dataset: read_range({start}, {stop}) yielded {len(read)} samples, and should yield "
                    f"{stop - start}"
                )
            samples += read
        return default_collate(samples)

    return Source(size, fetch, runs_code=True, ranges=True)


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as (start, stop)."""
    runs: list[tuple[int, int]] = []
    for number in ids:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs


def make_source(dataset: Any) -> Source:
    """Read by id from a map-style dataset, a TensorDataset, tensors (one, a tuple or a dict of them), or an
    IterableDataset with `read_range`.

    Samples are collated by torch's `default_collate`. Raise TypeError for what cannot be read by id,
    ValueError for an empty dataset; each says what to do.
    """
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "dataset: this is a DataLoader; give its dataset: batches() shuffles and batches itself"
        )
    if isinstance(dataset, IterableDataset):
        return _from_ranges(dataset)
    source = _from_tensors(dataset)
    if source is None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset: {type(dataset).__name__} has no __len__ and __getitem__; give a map-style dataset"
            )
        source = Source(len(dataset), lambda ids: default_collate(_read(dataset, ids.tolist())), True)
    if source.size < 1:
        raise ValueError("dataset: it is empty; check the path or the split that it was made from")
    return source
