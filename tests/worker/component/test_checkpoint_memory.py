"""Consolidating a checkpoint that is larger than the memory of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoint_members import FOLDER, Members, state

SCRIPT = """
import re, resource, sys
import torch.distributed.checkpoint
from springtide.checkpoint import consolidate, restore
from springtide.checkpoint.storage import Storage

[held] = re.findall(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())
limit = (int(held) << 10) + (int(sys.argv[1]) << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
if sys.argv[2] == "all at once":
    restore.read(*(lambda at: (Storage(at[0]), at[1]))(sys.argv[3].rsplit("/", 1)))
else:
    sys.exit(consolidate.main(sys.argv[3:]))
"""
LAYERS, WIDTH = 12, 1600  # 117 MiB, and twice that for Adam
MEBIBYTES = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a state that is larger than what the process may have."""
    root = tmp_path_factory.mktemp("large")
    named = {f"{n}.weight": torch.full((WIDTH, WIDTH), float(n)) for n in range(LAYERS)}
    states = [{"exp_avg": value + 1, "exp_avg_sq": value + 2} for value in named.values()]
    optimizer = {"state": states, "groups": [{"lr": 0.1}], "members": [[list(named)]]}
    writers = Members(root, 2)
    tree = {"parameters": named, "buffers": {}, "optimizer": optimizer, "tracked": {}}
    assert writers.save(state(5), tree).error == ""
    writers.close()
    return next((root / FOLDER).glob("step-*"))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run with memory of its own for MEBIBYTES beyond what the libraries take."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(MEBIBYTES), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_state_is_larger_than_what_the_process_may_have(folder: Path) -> None:
    failed = run("all at once", folder)
    assert failed.returncode != 0
    assert "cannot hold" in failed.stderr or "allocate" in failed.stderr


@pytest.mark.slow
def test_large_state_is_consolidated_in_little_memory(folder: Path, tmp_path: Path) -> None:
    done = run("in pieces", folder, "--to-dcp", tmp_path / "dcp", "--optimizer")
    assert (done.returncode, done.stderr) == (0, "")
    done = run("in pieces", folder, "--to", tmp_path / "model")
    assert (done.returncode, done.stderr) == (0, "")
    read = safetensors.torch.load_file(tmp_path / "model")
    assert [read[f"{n}.weight"].unique().tolist() for n in range(LAYERS)] == [[n] for n in range(LAYERS)]
