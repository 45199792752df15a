"""Pure decisions on arguments of Lightning's Trainer and of Accelerator, without these libraries."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

import springtide.integrations.accelerate as accelerate
import springtide.integrations.lightning as lightning
from springtide.errors import UsageError
from springtide.integrations.accelerate import arguments as of_accelerate
from springtide.integrations.dataloader import read_loader
from springtide.integrations.lightning import arguments as of_lightning
from springtide.integrations.treatment import Treatment


def steps(samples: int, **changed: Any) -> of_lightning.Schedule:
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
