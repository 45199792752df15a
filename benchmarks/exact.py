"""Exact mode: are the bits equal over sizes and schedules, and what does a step cost?

    python -m benchmarks.exact [--quick] [--json FILE]

Equality: the training script of exact mode's tests (augmentation, dropout, BatchNorm, autocast, clipping,
Adam) with 8 logical workers, at several sizes and through kills and joins; a schedule's hash is that of
parameters, buffers and optimizer state of all workers that finished. Cost: 2 workers and 8 logical workers
against the same model cut the same way (`batch.split(4)` on each of 2 workers) without exact sums, in jobs
that take turns; a step's time is the time between two commits, the slower worker's. Jobs run as in the tests:
the real coordinator and real worker processes on loopback, without Kubernetes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_SUPPORT = _ROOT / "tests" / "support"
sys.path[:0] = [str(_ROOT), str(_SUPPORT)]

LOGICAL_WORKERS = 8
WORKERS = 2
WARM_UP = 8
EXACT = {"SPRINGTIDE_LOGICAL_WORKERS": str(LOGICAL_WORKERS), "MKL_CBWR": "AVX2,STRICT"}
SCRIPT = _SUPPORT / "worker_exact_script.py"


class Processes:
    """Makes worker processes as a pod would: the environment is there before Python starts."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def fork(self, env: dict[str, str], argv: list[str], log: Path) -> int:
        roots = os.pathsep.join(str(_ROOT / root) for root in ("operator", "worker", "ps"))
        full = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": roots} | self._environment | env
        with log.open("ab") as file:
            child = subprocess.Popen([sys.executable, *argv], env=full, stdout=file, stderr=file)
        self._children[child.pid] = child
        return child.pid

    def code(self, pid: int) -> int | None:
        return self._children[pid].poll()


def train(model_name: str, steps: int, split: int) -> None:
    """One worker of a job that is timed."""
    import torch
    from torch.nn import functional as F

    import springtide
    from benchmarks.steady_state import build

    springtide.init()
    model, samples, labels, batch_size = build(model_name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    springtide.distribute(model, optimizer)
    order = torch.arange(steps * batch_size) % len(samples)
    data = (samples[order], labels[order])
    for batch in springtide.batches(data, batch_size=batch_size, epochs=1, seed=0, min_part=1):
        with springtide.step():
            for x, y in batch.split(split):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


def step_times(model_name: str, steps: int, exact: bool, folder: Path) -> tuple[list[float], int]:
    """(seconds of each step after the warm-up, steps that were done again) of one job."""
    from worker_cluster import WorkerCluster

    environment = {"SPRINGTIDE_BUCKET_MIB": "25"}
    options = {"model": model_name, "steps": steps + WARM_UP, "split": LOGICAL_WORKERS // WORKERS}
    if exact:
        options["split"] = 1
        environment |= EXACT
    cluster = WorkerCluster(
        Processes(environment),  # type: ignore[arg-type]
        folder,
        options,
        script=Path(__file__),
        environment=environment,
    )
    try:
        cluster.start(WORKERS)
        cluster.until_done(seconds=400)
        times = []
        for worker in cluster.workers:
            if worker.code != 0:
                raise RuntimeError(f"{worker.name} ended with {worker.code}\n{cluster.logs()}")
            moments = [commit["time"] for commit in worker.commits()]
            times.append([b - a for a, b in itertools.pairwise(moments)][WARM_UP - 1 :])
        again = cluster.workers[0].log().count("did not fit")
        return [max(pair) for pair in zip(*times, strict=True)], again
    finally:
        cluster.close()


def overhead(model_name: str, steps: int, rounds: int) -> dict[str, float]:
    """Each round is a job without and a job with exact sums, one right after the other.

    The ratio is the median over the rounds of the ratio of their median steps, so that a busy minute of the
    machine shows in both.
    """
    medians: dict[bool, list[float]] = {False: [], True: []}
    done_again = 0
    for _ in range(rounds):
        for exact in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                times, again = step_times(model_name, steps, exact, Path(folder))
            medians[exact].append(statistics.median(times))
            done_again += again
    ratios = [a / b for a, b in zip(medians[True], medians[False], strict=True)]
    return {
        "exact_step_seconds": statistics.median(medians[True]),
        "plain_step_seconds": statistics.median(medians[False]),
        "overhead_ratio": statistics.median(ratios),
        "overhead_ratio_least": min(ratios),
        "overhead_ratio_most": max(ratios),
        "steps": rounds * (steps + WARM_UP),
        "steps_done_again": done_again,
    }


def kills_and_joins(cluster: Any) -> list[Any]:
    first, second, third = cluster.start(3, faults={1: "backward:4:kill"})
    cluster.until(lambda: not second.running, "the first death")
    fourth = cluster.add(fault="reduced:*:kill")
    cluster.until(lambda: not fourth.running, "the second death")
    fifth, sixth = cluster.add(), cluster.add()
    cluster.until(lambda: bool(sixth.commits()), "the joiners")
    first.kill()
    cluster.until_done(seconds=200)
    return [third, fifth, sixth]


def scale_up_and_down(cluster: Any) -> list[Any]:
    (first,) = cluster.start(1)
    cluster.until_step(3)
    others = [cluster.add() for _ in range(4)]
    cluster.until(lambda: all(worker.commits() for worker in others), "five workers")
    for worker in (first, others[0], others[1]):
        worker.terminate()
    cluster.until_done(seconds=200)
    return others[2:]


def equality(steps: int) -> dict[str, str]:
    """Hash by schedule."""
    from worker_cluster import WorkerCluster, Zygote

    def of_size(size: int) -> Callable[[Any], list[Any]]:
        def run(cluster: Any) -> list[Any]:
            cluster.start(size)
            cluster.until_done(seconds=200)
            return list(cluster.workers)

        return run

    schedules: dict[str, tuple[Callable[[Any], list[Any]], float]] = {
        f"{size} workers": (of_size(size), 0.0) for size in (1, 2, 3, 5, 8)
    }
    schedules["3 workers, kills and joins"] = kills_and_joins, 0.01
    schedules["1 to 5 to 2 workers"] = scale_up_and_down, 0.01
    zygote = Zygote(**EXACT)
    hashes = {}
    try:
        for name, (run, pace) in schedules.items():
            with tempfile.TemporaryDirectory() as folder:
                options = {"samples": 211, "batch": 64, "epochs": steps // 4, "pace": pace}
                cluster = WorkerCluster(
                    zygote, Path(folder), options, script=SCRIPT, environment=EXACT, maximum=8
                )
                try:
                    results = [worker.result() for worker in run(cluster)]
                    if not all(results):
                        raise RuntimeError(f"{name}: a worker did not finish\n{cluster.logs()}")
                finally:
                    cluster.close()
            seen = {
                " ".join(result[key] for key in ("parameters", "buffers", "optimizer")) for result in results
            }
            hashes[name] = " | ".join(sorted(seen))
            print(f"{name:28} {hashes[name][:16]}", flush=True)
    finally:
        zygote.close()
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    from benchmarks.steady_state import MODELS

    began = time.monotonic()
    hashes = equality(24 if arguments.quick else 80)
    cases = {}
    for name in MODELS:
        case = cases[name] = overhead(name, 20 if arguments.quick else 40, 3 if arguments.quick else 7)
        print(
            f"{name:12} exact {case['exact_step_seconds'] * 1e3:7.1f} ms  without "
            f"{case['plain_step_seconds'] * 1e3:7.1f} ms  ratio {case['overhead_ratio']:.3f}  "
            f"({case['steps_done_again']} of {case['steps']} steps done again)",
            flush=True,
        )
    result = {
        "equal": len(set(hashes.values())) == 1,
        "hashes": hashes,
        "overhead_ratio": max(case["overhead_ratio"] for case in cases.values()),
        "cases": cases,
        "seconds": time.monotonic() - began,
    }
    print(f"equal {result['equal']}, overhead_ratio {result['overhead_ratio']:.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if not result["equal"]:
        raise SystemExit("the bits differ")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].startswith("{"):
        wanted = json.loads(sys.argv[2])
        train(wanted["model"], wanted["steps"], wanted["split"])
    else:
        main()
