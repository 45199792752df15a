"""Pure decisions on arguments of Lightning's Trainer and of Accelerator, without these libraries."""

from __future__ import annotations

import math
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import springtide.integrations.accelerate as accelerate
import springtide.integrations.lightning as lightning
from springtide.data import Shards
from springtide.errors import UsageError
from springtide.integrations.accelerate import arguments as of_accelerate
from springtide.integrations.dataloader import as_stream, check_shuffle_buffer, order_options, read_loader
from springtide.integrations.lightning import arguments as of_lightning
from springtide.integrations.treatment import Treatment


def steps(samples: int | None, **changed: Any) -> of_lightning.Schedule:
    arguments: dict[str, Any] = {
        "batch_size": 4,
        "accumulation": 2,
        "reference_workers": 3,
        "drop_last": False,
        "limit": 1.0,
        "max_steps": -1,
        "max_epochs": 2,
    }
    return of_lightning.schedule(samples, **(arguments | changed))


@pytest.mark.parametrize("table", [of_lightning.ARGUMENTS, of_accelerate.ARGUMENTS], ids=["one", "other"])
def test_each_argument_has_a_sentence(table: Any) -> None:
    for name, known in table.items():
        assert known.note, name
        assert bool(known.allowed) == (known.treatment is Treatment.REFUSED), name


def test_refusals_name_argument_and_remedy() -> None:
    (found,) = of_lightning.refusals({"precision": "16-mixed", "overfit_batches": 0.0, "accelerator": "cpu"})
    assert found.startswith("Trainer(precision='16-mixed')")
    assert "use bf16-mixed" in found
    assert len(of_accelerate.refusals({"fsdp_plugin": object(), "cpu": True, "brand_new": 1})) == 2
    assert of_accelerate.refusals({"mixed_precision": "bf16", "dynamo_backend": "no"}) == []


def test_unknown_arguments_are_found() -> None:
    assert of_lightning.unclassified({"self": 1, "logger": 2, "brand_new": 3}) == ["brand_new"]
    assert of_accelerate.unclassified({"self": 1, "cpu": 2, "brand_new": 3}) == ["brand_new"]


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
def test_steps_are_those_of_the_reference(samples: int, size: int, accumulation: int, workers: int) -> None:
    """Lightning pads each process's samples, makes batches of them, and steps at the last one, too."""
    found = steps(samples, batch_size=size, accumulation=accumulation, reference_workers=workers)
    batches = math.ceil(math.ceil(samples / workers) / size)
    assert (found.batches, found.steps) == (batches, -(-batches // accumulation))
    assert found.known == 2 * found.steps


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"max_steps": 7}, (5, 2, 7)),
        ({"max_steps": 30, "max_epochs": -1}, (5, 6, 30)),
        ({"max_epochs": -1}, (5, 1 << 30, 0)),
        ({"max_epochs": 1, "limit": 4}, (2, 1, 2)),
        ({"max_steps": 2, "limit": 4}, (2, 1, 2)),
        ({"max_steps": 7, "steps_per_optimizer_step": False}, (5, 2, 10)),
        ({"drop_last": True}, (4, 2, 8)),
    ],
)
def test_ends_of_a_run(changed: dict[str, Any], wanted: tuple[int, int, int]) -> None:
    found = steps(100, **changed)
    assert (found.steps, found.epochs, found.known) == wanted


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, (math.inf, 0, 2, 0)),
        ({"max_steps": 7, "max_epochs": -1}, (math.inf, 0, 1 << 30, 7)),
        ({"limit": 4, "max_epochs": 1}, (4, 2, 1, 2)),
    ],
)
def test_a_stream_has_as_many_steps_as_it_turns_out(changed: dict[str, Any], wanted: Any) -> None:
    found = steps(None, **changed)
    assert (found.batches, found.steps, found.epochs, found.known) == wanted


def test_a_share_of_a_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="a share of a stream"):
        steps(None, limit=0.5, max_epochs=1)


def test_passes_of_a_stream_are_not_counted_before() -> None:
    """A stream may be shorter than it says, and the run still makes its steps."""
    assert steps(100, max_steps=7).epochs == 2
    assert steps(100, max_steps=7, max_epochs=9, is_certain=False).epochs == 9


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"drop_last": True, "batch_size": 60}, "the global batch 360"),
        ({"limit": 4}, "in more than one epoch"),
        ({"limit": 3, "max_epochs": 1}, "no multiple of accumulate_grad_batches=2"),
        ({"limit": 0.01, "max_epochs": 1}, "leaves no batch of 9"),
    ],
)
def test_runs_that_cannot_be(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        steps(100, **changed)


def test_loaders_are_read() -> None:
    data = TensorDataset(torch.arange(10))
    assert read_loader(DataLoader(data, batch_size=3, shuffle=True), "fit()").shuffle
    found = read_loader(
        DataLoader(data, batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 10)), "fit()"
    )
    assert found.weights is not None
    assert found.weights.tolist() == [1.0] * 10
    found = read_loader(DataLoader(data, sampler=SequentialSampler(data), drop_last=True), "fit()")
    assert (found.batch_size, found.shuffle, found.drop_last) == (1, False, True)


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([1, 2], "a list is no torch.utils.data.DataLoader"),
        (DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 2)), r"as the data set has \(4\)"),
        (DataLoader(range(4), batch_sampler=[[0, 1]]), "has a list for its batches"),
    ],
)
def test_loaders_that_cannot_be(loader: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read_loader(loader, "fit()")


@pytest.mark.parametrize(
    ("package", "name", "part", "missing"),
    [
        (lightning, "SpringtideStrategy", "strategy", "lightning"),
        (accelerate, "ElasticAccelerator", "accelerator", "accelerate"),
    ],
)
def test_missing_libraries_are_named(
    package: ModuleType, name: str, part: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    for module in [module for module in sys.modules if module.startswith(f"{package.__name__}.{part}")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ImportError, match=f"{missing}, which is not installed: pip install"):
        getattr(package, name)
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        package.Trainer  # noqa: B018


class Numbers(IterableDataset[int]):
    """Can only be read from its begin."""

    def __iter__(self) -> Any:
        return iter(range(7))


class Counted(Numbers):
    """Says how many there are, too."""

    def __len__(self) -> int:
        return 7


def read_all(dataset: Any) -> list[int]:
    return [sample for shard in dataset.shards for sample in dataset.read_shard(shard, 0)]


@pytest.mark.parametrize(
    ("dataset", "samples"),
    [
        (Numbers(), None),
        (Counted(), 7),
        (Shards([0, 1], lambda shard: range(shard * 3, 3 + shard * 4)), None),
    ],
    ids=["iterable", "with a length", "shards"],
)
def test_loaders_over_streams_are_read(dataset: Any, samples: int | None) -> None:
    loader: Any = DataLoader(dataset, batch_size=3)
    found = read_loader(loader, "fit()")
    assert (found.is_stream, found.samples, found.batch_size) == (True, samples, 3)
    assert read_all(found.dataset) == list(range(7))
    assert order_options(found, 0, "X") == {"shuffle": False, "shuffle_buffer": 0}
    assert order_options(found, 9, "X") == {"shuffle": True, "shuffle_buffer": 9}


@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_loaders_are_read(shuffle: bool) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    data = TensorDataset(torch.arange(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        numbered = torchdata.StatefulDataLoader(data, batch_size=3, shuffle=shuffle)
        stream = torchdata.StatefulDataLoader(Numbers(), batch_size=3)
    found = read_loader(numbered, "fit()")
    assert (found.shuffle, found.samples, found.is_stream) == (shuffle, 10, False)
    assert read_all(read_loader(stream, "fit()").dataset) == list(range(7))


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (DataLoader(Numbers(), drop_last=True), "fit\\(\\): drop_last leaves out samples of a pass"),
        (DataLoader(Numbers(), batch_size=None), "batches are dealt by the library, give batch_size="),
    ],
    ids=["drop_last", "no batches"],
)
def test_loaders_over_streams_that_cannot_be(loader: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        read_loader(loader, "fit()")


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (iter([1]), "fit\\(\\): the data set is a list_iterator, which can be iterated once only"),
        (3, "a int without samples by number, which cannot be iterated either"),
        (DataLoader(Numbers()), "this is a DataLoader: give its data set"),
    ],
    ids=["iterator", "number", "loader"],
)
def test_data_that_are_no_stream_are_refused(dataset: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        as_stream(dataset, "fit()")


def test_a_shuffle_of_webdataset_names_the_argument() -> None:
    wds = pytest.importorskip("webdataset")
    with pytest.raises(UsageError, match=r"leave it out \(shuffle_buffer= is an argument here, too\)"):
        as_stream(wds.WebDataset(["a.tar"], shardshuffle=False).shuffle(10), "fit()")


@pytest.mark.parametrize("value", [-1, True, 2.0])
def test_a_shuffle_buffer_is_a_number_of_samples(value: Any) -> None:
    with pytest.raises(ValueError, match="shuffle_buffer must be an integer of 0 or more"):
        check_shuffle_buffer("X", value)


def test_a_shuffle_buffer_is_for_streams() -> None:
    data = read_loader(DataLoader(range(4)), "fit()")
    with pytest.raises(UsageError, match=r"X\(shuffle_buffer=3\): it mixes samples of a stream"):
        order_options(data, 3, "X")
