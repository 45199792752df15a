"""Pure decisions on arguments of transformers' Trainer, without transformers."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

import springtide.integrations.transformers as integration
from springtide.integrations.transformers.arguments import (
    FIELDS,
    OPTIMIZERS,
    Treatment,
    refusals,
    schedule,
    unclassified,
)


class Strategy(enum.Enum):
    LOMO = "lomo"
    SGD = "sgd"


@dataclass
class Arguments:
    """Stands for TrainingArguments, with a field that no release of springtide knows."""

    learning_rate: float = 0.1
    optim: Any = Strategy.SGD
    push_to_hub: bool = False
    average_tokens_across_devices: bool = True
    accelerator_config: Any = None
    fsdp: Any = None
    brand_new: list[str] = field(default_factory=list)


@dataclass
class OwnArguments(Arguments):
    """A script's own class below it."""

    dataset_name: str = "mine"


def steps(samples: int, **changed: Any) -> Any:
    arguments: dict[str, Any] = {
        "per_device": 4,
        "accumulation": 2,
        "reference_workers": 3,
        "max_steps": -1,
        "num_epochs": 2,
        "drop_last": False,
    }
    return schedule(samples, **(arguments | changed))


def test_each_field_has_a_sentence() -> None:
    for name, known in FIELDS.items():
        assert known.note, name
        assert bool(known.allowed) == (known.treatment is Treatment.REFUSED), name


def test_plain_arguments_are_not_refused() -> None:
    assert refusals(Arguments(), Arguments) == []
    assert refusals(OwnArguments(dataset_name="other"), Arguments) == []


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("optim", Strategy.LOMO, "optim='lomo': it steps inside of backward()"),
        ("optim", "galore_adamw", "optimizers="),
        ("push_to_hub", True, "upload output_dir when the job has ended"),
        ("average_tokens_across_devices", False, "leave it True"),
        ("fsdp", "full_shard", "strategy.allReduce.shard"),
        ("accelerator_config", {"split_batches": True}, "leave split_batches"),
        ("brand_new", ["x"], "this release of springtide does not know"),
    ],
)
def test_refusal_names_argument_and_remedy(name: str, value: Any, remedy: str) -> None:
    (found,) = refusals(Arguments(**{name: value}), Arguments)
    assert found.startswith(f"{name}=")
    assert remedy in found


def test_harmless_values_of_refused_ones_pass() -> None:
    for optimizer in OPTIMIZERS:
        assert refusals(Arguments(optim=optimizer), Arguments) == []
    assert refusals(Arguments(fsdp=[], accelerator_config={"non_blocking": True}), Arguments) == []


def test_unknown_field_is_found() -> None:
    assert unclassified(Arguments) == ["brand_new"]


def test_global_batch_is_that_of_the_reference() -> None:
    found = steps(100)
    assert (found.global_batch, found.steps_per_epoch, found.max_steps, found.epochs) == (24, 5, 10, 2)
    assert steps(100, drop_last=True).steps_per_epoch == 4


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"max_steps": 7}, (7, 2)),
        ({"num_epochs": 0.5}, (3, 1)),
        ({"num_epochs": 1.5}, (8, 2)),
        ({"max_steps": 10}, (10, 2)),
    ],
)
def test_steps_of_a_part_of_an_epoch(changed: dict[str, Any], wanted: tuple[int, int]) -> None:
    found = steps(100, **changed)
    assert (found.max_steps, found.epochs) == wanted


def test_no_whole_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match="20 samples, and the global batch 24"):
        steps(20, drop_last=True)


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "springtide.integrations.transformers.trainer", raising=False)
    told = r"needs transformers, which is not installed: pip install 'springtide\[worker,transformers\]'"
    with pytest.raises(ImportError, match=told):
        integration.ElasticTrainer  # noqa: B018


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Trainer'"):
        integration.Trainer  # noqa: B018
