"""The page on data in shards: its pieces of code train what they say, in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_alone import library

import springtide
from springtide.integrations import sources
from springtide_cli.audit import audit

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
SHARDS, EVALUATION, TOKENS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINES = 21


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """Five files of some lines with a number each."""
    for shard in range(5):
        (tmp_path / f"{shard}.txt").write_text("".join(f"{shard + n / 100}\n" for n in range(LINES)))
    return [str(tmp_path / f"{shard}.txt") for shard in range(5)]


def names(paths: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return {"paths": paths, "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}


def test_files_are_trained_line_by_line(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(springtide, "init", lambda: None)
    with library() as runtime:
        found = names(paths) | {"torch": torch, "test_paths": paths[:2], "Shards": springtide.data.Shards}
        exec(compile(SHARDS, "docs/data.md", "exec"), found)
        audit = runtime.position.ledger.audit()
        exec(compile(EVALUATION, "docs/data.md", "exec"), found)
        x = torch.tensor([[shard + n / 100] for shard in range(2) for n in range(LINES)])
        loss = (found["model"](x) ** 2).mean().item()
    assert capsys.readouterr().out == f"{found['evaluation'].values['test_loss']}\n"
    assert found["evaluation"].values["test_loss"] == pytest.approx(loss)
    assert (audit["totalSeen"], audit["repeated"], audit["lost"]) == (2 * 5 * LINES, 0, 0)


def test_tokens_are_packed_as_the_page_says(paths: list[str]) -> None:
    blocks: list[Any] = []
    found = names(paths) | {
        "read": lambda path: Path(path).read_text().splitlines(),
        "tokenizer": lambda text: {"input_ids": list(text.encode())},
        "springtide": type("Library", (), {"batches": lambda data, batch_size: blocks.append(data) or []}),
    }
    exec(compile(TOKENS, "docs/data.md", "exec"), found)
    (packed,) = blocks
    (block,) = packed.read_shard(paths[0], 0)
    assert int((block["segment_ids"] >= 0).sum()) == sum(
        len(line.encode()) + 1 for line in Path(paths[0]).read_text().splitlines()
    )


def test_the_audit_says_what_the_page_shows() -> None:
    (shown,) = re.findall(r"```console\n\$ springtide audit words\n(.*?)```", PAGE, re.DOTALL)
    counts = {"epoch": 0, "seen": 307200, "repeated": 0, "lost": 0, "skipped": 0, "totalSeen": 307200}
    taken = {"samples": 307200, "shards": "0-63,65", "begun": "64:800,66:12"}
    data = counts | {"taken": taken | {"step": 1200, "totalSeen": 307200}}
    found = audit({"metadata": {"name": "words"}, "status": {"state": "Running", "step": 1200, "data": data}})
    assert found.code == 0
    assert "".join(f"{line.text}\n" for line in found.lines) == shown


def test_every_refused_stage_is_on_the_page() -> None:
    for word in ("resampled=True", ".shuffle()", "with_epoch", "batched", "split_dataset_by_node"):
        assert word in PAGE
    for name in sources.__all__:
        assert callable(getattr(sources, name))
