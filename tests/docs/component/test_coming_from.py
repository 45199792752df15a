"""The code of docs/coming-from.md and docs/own-collectives.md: ours runs, the others' compiles."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from ps_servers import TOKEN, names, servers
from torch.nn import functional as F
from worker_alone import library

import springtide
from springtide import kv

DOCS = Path(__file__).resolve().parents[3] / "docs"
BLOCKS = [
    (page, block)
    for page in ("coming-from.md", "own-collectives.md")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]
OURS = [block for _, block in BLOCKS if "springtide" in block]
OTHERS = [block for _, block in BLOCKS if "springtide" not in block]


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def run(block: str, **more: Any) -> dict[str, Any]:
    """Execute a block as a script would find it, with `more` names."""
    torch.manual_seed(0)
    x = torch.randn(512, 4)
    dataset = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
    found: dict[str, Any] = {
        "springtide": springtide,
        "torch": torch,
        "F": F,
        "Net": Net,
        "dataset": dataset,
        "model": Net(),
        "test_set": dataset,
        "shard": lambda data, rank, size: [data[rank::size]],
        **more,
    }
    exec(compile(textwrap.dedent(block), "the page", "exec"), found)
    return found


def test_the_pages_hold_both_kinds() -> None:
    assert len(OURS) >= 4
    assert len(BLOCKS) - len(OURS) >= 6


@pytest.mark.parametrize("block", OTHERS)
def test_code_of_other_systems_is_code(block: str) -> None:
    compile(textwrap.dedent(block), "the page", "exec")


def parameters(found: dict[str, Any]) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in found["model"].parameters()])


def test_our_training_loop_does_what_theirs_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The page's two loops side by side, each in one process: they differ by the order of the samples."""
    (theirs,) = (block for block in OTHERS if "DistributedDataParallel(" in block)
    on_cpu = theirs.replace('"nccl"', f'"gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1')
    on_cpu = on_cpu.replace("device_ids=[local_rank]", "device_ids=None")
    given = {
        "dist": dist,
        "device": "cpu",
        "DataLoader": torch.utils.data.DataLoader,
        "DistributedSampler": torch.utils.data.DistributedSampler,
        "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
    }
    try:
        expected = parameters(run(on_cpu, **given))
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr(springtide, "init", lambda: None)
    (block,) = (block for block in OURS if "springtide.batches" in block)
    with library() as runtime:
        found = run(block)
        assert runtime.position.ledger.audit()["totalSeen"] == 10 * 512
    before = parameters(run("model = Net()"))
    assert (parameters(found) - before).norm() > 20 * (parameters(found) - expected).norm()


def test_our_collectives_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in OURS if "springtide.retry" in block]
    assert len(blocks) == 2
    with library():
        run(blocks[0])
        assert capsys.readouterr().out == "the sum of ranks from 1 is 1\n"
        assert 0.0 <= run(blocks[1])["accuracy"] <= 1.0


def test_our_store_pushes_and_pulls() -> None:
    (block,) = (block for block in OURS if "kv.connect" in block)
    with servers(2) as running:
        here = block.replace('["10.0.0.7:7080", "10.0.0.8:7080"]', "addresses")
        assert here != block
        found: dict[str, Any] = {
            "torch": torch,
            "addresses": names(running),
            "token": TOKEN,
            "shape": (3, 2),
            "gradient": torch.ones(3, 2),
            "w": torch.empty(3, 2),
        }
        try:
            exec(compile(here, "the page", "exec"), found)
            assert torch.equal(found["w"], torch.full((3, 2), -0.1))
        finally:
            store = found.get("store")
            if isinstance(store, kv.KVStore):
                store.close()


def test_manifests_on_the_page_are_yaml_whose_names_exist() -> None:
    page = (DOCS / "coming-from.md").read_text()
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        assert yaml.safe_load(block)
    api = (DOCS / "api.md").read_text()
    for name in (
        "workers.processesPerPod",
        "workers.minReplicas",
        "workers.maxReplicas",
        "strategy.type",
        "strategy.parameterServer.consistency",
        "strategy.allReduce.compression",
        "failurePolicy.backoffLimit",
        "checkpoint",
    ):
        assert f"`spec.{name}" in api, name
        assert name.rpartition(".")[2] in page
