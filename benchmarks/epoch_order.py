"""How long a worker takes to know which samples a step has, and how much memory that needs.

    python -m benchmarks.epoch_order [--quick] [--json FILE]

A worker that joins in the middle of an epoch of 10^9 samples makes its batch of 4,096 there; the peer is a
table by `torch.randperm`, as torch's `RandomSampler` makes it. The peer is measured on 10^7 samples, since it
takes minutes and 8 GB for 10^9; `peer_seconds_for_1e9` is a hundred times that. Each measurement is a process
of its own; bytes are what the process grew by at its highest, after it has used a small data set.

Keys: `seconds_for_1e9` (the first batch), `bytes`, `next_batch_seconds` (batches after it, on average over an
epoch's stretch of 2^20 samples), `expected_hash_step_seconds` (the share of a step in the epoch's expected
hash), `peer_seconds_for_1e7`, `peer_bytes_for_1e7`, `peer_seconds_for_1e9`, `ratio_to_peer`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLES = 10**9
PEER_SAMPLES = 10**7
BATCH = 4096
STRETCH = 1 << 20
REPEATS = 7
QUICK_REPEATS = 3


def measure_keyed() -> dict[str, float]:
    """Join in the middle of an epoch of `SAMPLES`, and take a stretch of it."""
    import torch

    from springtide.data.cursor import Cursor
    from springtide.data.ledger import DatasetSum
    from springtide.data.loop import plan_loop
    from springtide.data.permutation import BLOCK_SIZE, keyed

    # The first use of torch's functions, and of modules, is not ours.
    keyed(100_000, 0, 0, torch.arange(BLOCK_SIZE))
    plan_loop(range(100_000), batch_size=BATCH, seed=1).global_ids(Cursor())
    before = _resident_bytes()
    plan = plan_loop(range(SAMPLES), batch_size=BATCH, seed=1)
    cursor = Cursor(position=SAMPLES // 2)
    began = time.perf_counter()
    plan.global_ids(cursor)
    first = time.perf_counter() - began
    grown = _peak_bytes() - before
    began = time.perf_counter()
    for _ in range(STRETCH // BATCH):
        cursor = plan.advance(cursor)
        plan.global_ids(cursor)
    following = (time.perf_counter() - began) / (STRETCH // BATCH)
    total = DatasetSum(SAMPLES)
    began = time.perf_counter()
    for step in range(100):
        total.advance(BATCH, SAMPLES - step * BATCH)
    hashed = (time.perf_counter() - began) / 100
    return {
        "seconds_for_1e9": first,
        "bytes": grown,
        "next_batch_seconds": following,
        "expected_hash_step_seconds": hashed,
    }


def measure_table() -> dict[str, float]:
    """Make the whole order of `PEER_SAMPLES` as RandomSampler does, and take one batch of it."""
    import torch

    torch.randperm(10)[:2].tolist()
    before = _resident_bytes()
    began = time.perf_counter()
    torch.randperm(PEER_SAMPLES)[PEER_SAMPLES // 2 :][:BATCH].clone()
    return {
        "peer_seconds_for_1e7": time.perf_counter() - began,
        "peer_bytes_for_1e7": _peak_bytes() - before,
    }


def _resident_bytes() -> int:
    """Return the bytes of memory of this process, from which `_peak_bytes` counts on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak_bytes() -> int:
    """Return the most that it was since `_resident_bytes`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")
    )
    return int(line.split()[1]) * 1024


def _in_a_process(what: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.epoch_order", "--measure", what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} repeats instead of {REPEATS}")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--measure", choices=("keyed", "table"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        print(json.dumps(measure_keyed() if options.measure == "keyed" else measure_table()))
        return
    rounds = []
    for number in range(QUICK_REPEATS if options.quick else REPEATS):
        rounds.append(_in_a_process("keyed") | _in_a_process("table"))
        print(f"{number + 1}: " + "  ".join(f"{name} {value:.6g}" for name, value in rounds[-1].items()))
    report = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    report["peer_seconds_for_1e9"] = report["peer_seconds_for_1e7"] * SAMPLES / PEER_SAMPLES
    report["ratio_to_peer"] = report["seconds_for_1e9"] / report["peer_seconds_for_1e9"]
    for name, value in report.items():
        print(f"{name}: {value:.6g}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
