"""The Python of README.md, fsdp.md, parameter-servers.md and trackers.md does what they say."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from page_code import python
from ps_servers import TOKEN, names, servers
from torch.distributed.fsdp import FSDPModule, fully_shard
from worker_alone import Script, library

import springtide
from springtide import kv

SAMPLES = 512


def run(code: str, **found: Any) -> dict[str, Any]:
    """Execute a piece with these names there, and return the names that are there afterwards."""
    exec(compile(code, "the page", "exec"), found)
    return found


def test_script_of_the_readme_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 4)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    monkeypatch.setattr(springtide, "init", lambda: None)
    with library() as runtime:
        found = run(
            python("README.md", "springtide.batches"),
            F=F,
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            dataset=torch.utils.data.TensorDataset(x, x[:, :3].argmax(1)),
        )
        assert runtime.position.ledger.audit()["totalSeen"] == 10 * SAMPLES
    assert found["loss"].item() < 0.8
    assert scheduler.last_epoch == 10 * SAMPLES // 256


def test_division_in_a_pod_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    rows = torch.randn(64, 4)
    losses = []
    monkeypatch.setattr(springtide, "init", lambda: None)
    with library():
        code = python("docs/fsdp.md", "springtide.mesh()")
        found = run(code, torch=torch, springtide=springtide, fully_shard=fully_shard, model=model)
        assert found["mesh"].size() == 1
        assert isinstance(model.blocks[0], FSDPModule)
        for (part,) in springtide.batches((rows,), batch_size=16, epochs=20, seed=0):
            with springtide.step():
                loss = (model(part) - part).square().mean()
                loss.backward()
                losses.append(loss.item())
                found["optimizer"].step()
                found["optimizer"].zero_grad()
    assert len(losses) == 80
    assert sum(losses[-4:]) < sum(losses[:4])


@pytest.mark.parametrize(("word", "files"), [("TensorBoard", "*/events.out.tfevents*"), ("Lines", "*.jsonl")])
def test_trackers_of_the_page_write(
    word: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = python("docs/trackers.md", f"loggers=[{word}(")
    here = code.replace('"/runs"', repr(str(tmp_path)))
    assert here != code
    given: dict[str, Any] = {}
    monkeypatch.setattr(springtide, "init", given.update)
    run(here)
    with library(given["loggers"]):
        script = Script()
        for batch in script.batches():
            with springtide.step():
                loss = script.loss(batch)
                loss.backward()
                springtide.report(loss=loss.item())
                script.finish()
    (written,) = tmp_path.glob(files)
    assert b"loss" in written.read_bytes()


def test_tables_of_a_module_train() -> None:
    code = textwrap.indent(python("docs/parameter-servers.md", "springtide.EmbeddingBag"), " " * 8)
    found = run(
        "class Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n" + code,
        torch=torch,
        springtide=springtide,
    )
    model = found["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    users = torch.tensor([-(2**62), 7, 7, 12])
    words = torch.tensor([[1, 2], [3, 3], [0, 49_999], [5, 6]])
    with library():
        springtide.distribute(model, optimizer)
        losses = []
        for user, word in springtide.batches((users, words), batch_size=4, epochs=20, seed=0):
            with springtide.step():
                made = torch.cat([model.users(user), model.words(word)], dim=1)
                assert made.shape == (4, 16 + 8)
                loss = (made - 1.0).square().mean()
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    assert losses[-1] < losses[0]


def test_store_of_named_tensors_and_its_table() -> None:
    store_code = python("docs/parameter-servers.md", "kv.connect")
    table_code = python("docs/parameter-servers.md", "store.table")
    with servers(2) as running:
        here = store_code.replace('["10.0.0.7:7080", "10.0.0.8:7080"]', "addresses")
        assert here != store_code
        w = torch.ones(3, 2)
        found: dict[str, Any] = {
            "addresses": names(running),
            "token": TOKEN,
            "w": w,
            "grad": torch.full((3, 2), 2.0),
        }
        try:
            found = run(here, **found)
            # Adam's first step is the learning rate, whatever the gradient.
            assert torch.allclose(w, torch.full((3, 2), 1.0 - 1e-3), atol=1e-6)
            given = {"ids": torch.tensor([[5, 9], [5, 11]]), "next_ids": torch.tensor([1, 2])}
            tables = run(table_code, store=found["store"], gradients=torch.ones(2, 2, 16), **given)
            assert tables["later"].result().shape == (2, 16)
            # `ids` and `rows` are now what the table holds: three rows were trained, two only looked at.
            rows = dict(zip(tables["ids"].tolist(), tables["rows"], strict=True))
            assert {5, 9, 11} <= set(rows)
            assert rows[5].shape == (16,)
        finally:
            store = found.get("store")
            if isinstance(store, kv.KVStore):
                store.close()
