"""The guide's pieces of code train what they say, in one process."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from worker_alone import library

import springtide

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
SAMPLES = 512


def block(*words: str) -> str:
    """The one piece that holds all of these words."""
    (found,) = (text for text in BLOCKS if all(word in text for word in words))
    assert isinstance(found, str)
    return textwrap.dedent(found)


def names() -> dict[str, Any]:
    """Return the names that the guide takes for granted."""
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return {
        "torch": torch,
        "F": F,
        "DataLoader": DataLoader,
        "springtide": springtide,
        "dataset": dataset,
        "data": dataset,
        "test_set": dataset,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
    }


def run(text: str, found: dict[str, Any]) -> dict[str, Any]:
    exec(compile(text, "the guide", "exec"), found)
    return found


def test_every_piece_is_tried_below() -> None:
    assert len(BLOCKS) == 10


def test_the_plain_loop_becomes_the_elastic_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made = "model, optimizer = Net(), ...\n"
    plain, elastic = block("DataLoader"), block("springtide.init()")
    assert plain.startswith(made)
    assert made in elastic
    losses = [run(plain.replace(made, ""), names())["loss"]]
    monkeypatch.setattr(springtide, "init", lambda: None)
    with library() as runtime:
        losses.append(run(elastic.replace(made, ""), names())["loss"])
        assert runtime.position.ledger.audit()["totalSeen"] == 10 * SAMPLES
    assert max(loss.item() for loss in losses) < 1.0


def test_accumulation_and_evaluation() -> None:
    with library() as runtime:
        found = names()
        springtide.distribute(found["model"], found["optimizer"])
        run(block("micro_batch="), found)
        assert runtime.position.cursor.step == 60
        assert runtime.position.ledger.audit()["totalSeen"] == 60 * SAMPLES
        values = run(block("test_accuracy="), found)["evaluation"].values
        assert values["test_accuracy"] > 0.9


def test_several_loops_have_the_steps_that_are_said() -> None:
    with library() as runtime:
        found = names()
        springtide.distribute(found["model"], found["optimizer"])
        run(block("set_total_steps"), found)
        assert runtime.position.cursor.step == runtime.state.job_steps == 20


def test_rules_for_buffers() -> None:
    with library() as runtime:
        found = names()
        model = found["model"]
        model.register_buffer("lowest", torch.zeros(1))
        model.register_buffer("queue", torch.zeros(1))
        model.observer = torch.nn.Module()
        model.observer.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
        run(block("buffers="), found)
        assert runtime.trainer is not None
        assert runtime.trainer.buffers.rules == ["min", "local", "sum"]


def test_stopping_early() -> None:
    with library() as runtime:
        found = names()
        springtide.distribute(found["model"], found["optimizer"])
        run(block("break"), found)
        assert 1 <= found["epoch"] < 99
        assert found["evaluation"].values["error"] < 0.1
        assert runtime.position.ledger.audit()["totalSeen"] == SAMPLES * (1 + found["epoch"])


def test_stopping_within_an_epoch() -> None:
    with library() as runtime:
        found = names()
        found["optimizer"].param_groups[0]["lr"] = 0.0  # so that nothing gets better after the first time
        run(block("until="), found)
        assert (found["patience"].steps, found["patience"].worse) == (15, 4)
        assert (runtime.position.cursor.step, runtime.position.ledger.count) == (15, 256)
        assert runtime.position.ledger.lost == 0


def test_mixed_precision() -> None:
    text = block("GradScaler")
    on_cpu = text.replace('"cuda"', '"cpu"').replace("float16", "bfloat16")
    assert on_cpu != text
    with library() as runtime:
        assert run(on_cpu, names())["loss"].item() < 1.0
        assert runtime.position.ledger.audit()["totalSeen"] == 10 * SAMPLES


def test_several_models() -> None:
    generator, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    found = names() | {
        "generator": generator,
        "critic": critic,
        "optimizer_g": torch.optim.Adam(generator.parameters()),
        "optimizer_c": torch.optim.Adam(critic.parameters()),
        "critic_loss": lambda x: critic(generator(x).detach()).mean() - critic(x).mean(),
        "generator_loss": lambda x: -critic(generator(x)).mean(),
    }
    before = [module.weight.detach().clone() for module in (generator, critic)]
    with library() as runtime:
        run(block("[generator, critic]"), found)
        assert runtime.position.ledger.audit()["totalSeen"] == 10 * SAMPLES
    for module, weight in zip((generator, critic), before, strict=True):
        assert not torch.equal(module.weight, weight)
