"""Files for plain PyTorch out of the checkpoints of real processes whose optimizer's state is in shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from worker_checks import TOLERANCE, check
from worker_cluster import WorkerCluster
from worker_reference import Reference
from worker_script import make_data, make_model

from springtide.checkpoint import consolidate, names, restore
from springtide.checkpoint.storage import Storage
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 5,
    "pace": 0.02,
    "optimizer": "adam",
    "lr": 0.003,
    "hidden": 96,
    "decay": 0.9,
}
STEPS = 40
FOLDER = "default-test-alone"

pytestmark = pytest.mark.timeout(300)


def flat(tensors: dict[str, torch.Tensor], model: torch.nn.Module) -> list[float]:
    found: list[float] = torch.cat(
        [tensors[name].reshape(-1) for name, _ in model.named_parameters()]
    ).tolist()
    return found


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a folder as any script does, without springtide."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def train_on(model: torch.nn.Module, optimizer: torch.optim.Optimizer, made: int) -> None:
    """Make the steps that are left, from the same batches.

    Args:
        model: As of the last step that was made.
        optimizer: Its.
        made: Steps that were made.
    """
    x, y = make_data(OPTIONS["samples"])
    plan = plan_loop((x, y), batch_size=OPTIONS["batch"], epochs=OPTIONS["epochs"], seed=5)
    cursor = Cursor()
    for step in range(1, STEPS + 1):
        ids = plan.global_ids(cursor)
        cursor = plan.advance(cursor)
        if step > made:
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= OPTIONS["decay"]
    assert plan.ended(cursor)


@pytest.mark.slow
def test_files_hold_what_the_workers_have_trained(
    new_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    """Plain PyTorch goes on from an early checkpoint to the numbers of the job's end."""
    volume = tmp_path / "volume"
    volume.mkdir()
    environment = {
        "SPRINGTIDE_SHARD": "Gradients",
        "SPRINGTIDE_CHECKPOINT_URI": str(volume),
        "SPRINGTIDE_CHECKPOINT_SECONDS": "0.05",
        "SPRINGTIDE_CHECKPOINT_KEEP": "99",
    }
    cluster = new_cluster(OPTIONS, environment=environment)
    workers = cluster.start(3)
    cluster.until(lambda: any(restore.candidates(Storage(str(volume), FOLDER))), "a checkpoint")
    cluster.until_done()
    check(cluster, reference, workers)
    ended = workers[0].result()
    assert ended is not None

    found = [names.parse(name) for name in restore.candidates(Storage(str(volume), FOLDER))]
    steps = [state.step for state in found if state is not None]
    assert steps[0] == STEPS
    assert 0 < steps[-1] < STEPS - 4
    last, early = (list(restore.candidates(Storage(str(volume), FOLDER)))[at] for at in (0, -1))
    source, file = str(volume / FOLDER), tmp_path / "model.safetensors"

    model = make_model("plain", OPTIONS["hidden"])
    assert consolidate.main([source, "--name", last, "--to", str(file)]) == 0
    model.load_state_dict(safetensors.torch.load_file(file), strict=True)
    assert flat(dict(model.named_parameters()), model) == ended["values"]

    torch.manual_seed(9)
    other = make_model("plain", OPTIONS["hidden"])
    optimizer = torch.optim.Adam(other.parameters(), lr=1.0)
    for name, folder, made in ((last, "last", STEPS), (early, "early", steps[-1])):
        command = [source, "--name", name, "--to-dcp", str(tmp_path / folder), "--optimizer"]
        assert consolidate.main(command) == 0
        load(tmp_path / folder, other, optimizer)
        train_on(other, optimizer, made)
        values = flat(dict(other.named_parameters()), other)
        if made == STEPS:
            assert values == ended["values"]
        assert values == pytest.approx(reference.values, abs=TOLERANCE)
