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

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text()
SHARDS, TOKENS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
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


def test_files_are_trained_line_by_line(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(springtide, "init", lambda: None)
    with library() as runtime:
        exec(compile(SHARDS, "docs/data.md", "exec"), names(paths))
        audit = runtime.position.ledger.audit()
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


def test_every_refused_stage_is_on_the_page() -> None:
    for word in ("resampled=True", ".shuffle()", "with_epoch", "batched", "split_dataset_by_node"):
        assert word in PAGE
    for name in sources.__all__:
        assert callable(getattr(sources, name))
