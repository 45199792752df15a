"""Embedding lookups and updates on one parameter server, beside torch.nn.EmbeddingBag in one process.

    python -m benchmarks.ps_embedding [--quick] [--json FILE]

A batch is 4096 x 26 ids, Zipf-distributed over a million, dim 16, Adagrad. Ours: look up through a socket,
sum the 26 rows of each sample, backward to the rows, push. The peer: EmbeddingBag with sparse gradients and
the same optimizer. The two take turns. Per server core: ids divided by the seconds that the server's
process computed; repeated ids travel once, and both figures count ids as the script sees them. `table_...`
are the table alone, in one process, every id of the batch given to it, repeated ones too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH, BAG, DIM, IDS = 4096, 26, 16, 1_000_000
TOKEN = "benchmark"
_ROOT = Path(__file__).resolve().parents[1]


def batches(count: int) -> list[Any]:
    """int64 [BATCH, BAG] tensors."""
    import numpy as np
    import torch

    generator = np.random.default_rng(0)
    return [torch.from_numpy(generator.zipf(1.2, (BATCH, BAG)) % IDS).long() for _ in range(count)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def measure_table(given: list[Any]) -> dict[str, float]:
    """The table of one server, without a server."""
    import torch

    from springtide_ps.params.embedding import Table, TableSpec

    table = Table(TableSpec(DIM, "adagrad", {"lr": 0.01}, scale=0.01))
    gradients = torch.full((BATCH * BAG, DIM), 0.01)
    flat = [batch.reshape(-1).numpy() for batch in given]
    for ids in flat:
        table.lookup(ids)
    looked = [timed(lambda ids=ids: table.lookup(ids))[0] for ids in flat]  # type: ignore[misc]
    pushed = [timed(lambda ids=ids: table.push(ids, gradients))[0] for ids in flat]  # type: ignore[misc]
    each = BATCH * BAG
    return {
        "table_lookups_per_second": each / statistics.median(looked),
        "table_updates_per_second": each / statistics.median(pushed),
    }


def measure_service(given: list[Any]) -> dict[str, float]:
    """A server in a process of its own, and the peer in this one, by turns."""
    import psutil
    import torch

    from benchmarks.ps_throughput import connected
    from benchmarks.support.ports import free_port
    from springtide import kv

    port = free_port()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "SPRINGTIDE_TOKEN": TOKEN,
        "SPRINGTIDE_BIND": "127.0.0.1",
        "SPRINGTIDE_PS_PORT": str(port),
        "SPRINGTIDE_METRICS_PORT": "0",
        "SPRINGTIDE_PS_THREADS": "1",
    }
    command = [sys.executable, "-m", "springtide_ps"]
    server = subprocess.Popen(command, env=environment, cwd=_ROOT, stderr=subprocess.DEVNULL)
    try:
        with connected(port):
            pass
        process = psutil.Process(server.pid)

        def computed() -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        local = torch.nn.EmbeddingBag(IDS, DIM, mode="sum", sparse=True)
        optimizer = torch.optim.Adagrad(local.parameters(), lr=0.01)
        target = torch.randn(BATCH, DIM)
        times: dict[str, list[float]] = {"lookup": [], "push": [], "ours": [], "local": []}
        cpu = {"lookup": 0.0, "push": 0.0}
        with kv.connect([f"127.0.0.1:{port}"], TOKEN) as store:
            table = store.table("t", DIM, optimizer="adagrad", lr=0.01, scale=0.01)
            for ids in given:
                table.lookup(ids)
            for ids in given:
                began, spent = time.perf_counter(), computed()
                rows = table.lookup(ids)
                times["lookup"].append(time.perf_counter() - began)
                cpu["lookup"] += computed() - spent
                rows.requires_grad_()
                (rows.sum(1) * target).sum().backward()
                assert rows.grad is not None
                middle, spent = time.perf_counter(), computed()
                table.push(ids, rows.grad).wait()
                ended = time.perf_counter()
                cpu["push"] += computed() - spent
                times["push"].append(ended - middle)
                times["ours"].append(ended - began)
                began = time.perf_counter()
                optimizer.zero_grad()
                (local(ids) * target).sum().backward()
                optimizer.step()
                times["local"].append(time.perf_counter() - began)
    finally:
        server.kill()
        server.wait()
    each = BATCH * BAG
    middle_of = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "lookups_per_second": each * len(given) / max(cpu["lookup"], 1e-9),
        "updates_per_second": each * len(given) / max(cpu["push"], 1e-9),
        "lookups_per_second_wall": each / middle_of["lookup"],
        "updates_per_second_wall": each / middle_of["push"],
        "local_ids_per_second": each / middle_of["local"],
        "ids_per_second": each / middle_of["ours"],
        "ratio_to_local": middle_of["local"] / middle_of["ours"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    import torch

    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    torch.set_num_threads(1)
    given = batches(30 if arguments.quick else 150)
    result = measure_table(given) | measure_service(given)
    for name, figure in result.items():
        print(f"{name:28} {figure / 1e6:8.2f} million" if figure > 1000 else f"{name:28} {figure:8.2f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
