"""Exact mode: are the bits equal over sizes and schedules, and what does a step cost?

    python -m benchmarks.exact [--quick] [--json FILE]

Equality: the training script of exact mode's tests (augmentation, dropout, BatchNorm, autocast, clipping,
Adam) with 8 logical workers, at several sizes and through kills and joins; a schedule's hash is that of
parameters, buffers and optimizer state of all workers that finished. Those jobs run as in the tests: the real
coordinator and real worker processes on loopback, without Kubernetes. Cost: 2 workers and 8 logical workers
against the same model cut the same way (`batch.split(4)` on each of 2 workers) without exact sums. The same
two processes are workers of both jobs and take a step of each in turn, so that both meet the same machine; a
step's time is the slower worker's. MKL's code paths and deterministic algorithms are exact mode's in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.support.ports import free_port

_ROOT = Path(__file__).resolve().parents[1]
_SUPPORT = _ROOT / "tests" / "support"
sys.path[:0] = [str(_ROOT), str(_SUPPORT)]

LOGICAL_WORKERS = 8
WORKERS = 2
WARM_UP = 8
EXACT = {"SPRINGTIDE_LOGICAL_WORKERS": str(LOGICAL_WORKERS), "MKL_CBWR": "AVX2,STRICT"}
SCRIPT = _SUPPORT / "worker_exact_script.py"


def train(model_name: str, steps: int, coordinators: list[str]) -> None:
    """One worker of two jobs, without and with exact sums, step by step in turn; prints their seconds."""
    import torch
    from torch.nn import functional as F

    from benchmarks.steady_state import build
    from springtide import api
    from springtide.elastic.runtime import Runtime
    from springtide.exact.settings import prepare
    from springtide.settings import read_settings

    settings = read_settings()
    torch.set_num_threads(1)
    prepare(settings)
    runtimes, models, optimizers, loops = [], [], [], []
    for coordinator, parts in zip(coordinators, (0, LOGICAL_WORKERS), strict=True):
        runtime = Runtime(replace(settings, coordinator=coordinator, logical_workers=parts))
        api.active_runtime = runtime
        runtime.begin()
        model, samples, labels, batch_size = build(model_name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        api.distribute(model, optimizer)
        order = torch.arange((steps + 1) * batch_size) % len(samples)
        data = (samples[order], labels[order])
        loops.append(api.batches(data, batch_size=batch_size, seed=0, min_part=1))
        runtimes.append(runtime)
        models.append(model)
        optimizers.append(optimizer)
    seconds: list[list[float]] = [[], []]
    bodies = 0
    for number in range(1, steps + 1):
        for which, runtime in enumerate(runtimes):
            api.active_runtime = runtime
            began = time.perf_counter()
            while runtime.position.cursor.step < number:
                batch = next(loops[which])
                bodies += which
                with api.step():
                    for x, y in batch.split(1 if which else LOGICAL_WORKERS // WORKERS):
                        F.cross_entropy(models[which](x), y).backward()
                    optimizers[which].step()
                    optimizers[which].zero_grad()
            seconds[which].append(time.perf_counter() - began)
    again = bodies / (LOGICAL_WORKERS // WORKERS) - steps
    print(json.dumps({"seconds": seconds, "again": again}), flush=True)
    # The loops are not at their end, so there is no outcome to wait for.
    os._exit(0)


def overhead(model_name: str, steps: int) -> dict[str, float]:
    """Median step of one model with and without exact sums; each pair of steps meets the same machine."""
    roots = os.pathsep.join(str(_ROOT / root) for root in ("protocol", "operator", "worker", "ps"))
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), roots]),
        "SPRINGTIDE_JOB": "exact",
        "SPRINGTIDE_NAMESPACE": "benchmark",
        "SPRINGTIDE_TOKEN": "benchmark",
        "SPRINGTIDE_METRICS_PORT": "0",
        "SPRINGTIDE_BIND": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **EXACT,
    }
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            ports = [free_port(), free_port()]
            for port in ports:
                environment = common | {
                    "SPRINGTIDE_PORT": str(port),
                    "SPRINGTIDE_INCARNATION": "1",
                    "SPRINGTIDE_STATE_DIR": str(Path(folder) / str(port)),
                    **{f"SPRINGTIDE_{name}": str(WORKERS) for name in ("TARGET", "MINIMUM", "MAXIMUM")},
                }
                (Path(folder) / str(port)).mkdir()
                command = [sys.executable, "-m", "springtide_coordinator"]
                processes.append(
                    subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, text=True)
                )
            addresses = [f"127.0.0.1:{port}" for port in ports]
            for rank in range(WORKERS):
                environment = common | {
                    "SPRINGTIDE_COORDINATOR": addresses[0],
                    "SPRINGTIDE_POD_NAME": f"exact-worker-{rank}-0",
                    "SPRINGTIDE_POD_UID": f"uid-{rank}",
                    "SPRINGTIDE_POD_IP": "127.0.0.1",
                    "SPRINGTIDE_SLOT": str(rank),
                }
                command = [sys.executable, "-m", "benchmarks.exact"]
                command += ["--worker", model_name, str(steps + WARM_UP), *addresses]
                pipe = subprocess.PIPE
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
                )
            results = []
            for worker in processes[-WORKERS:]:
                out, err = worker.communicate(timeout=600)
                if worker.returncode:
                    raise RuntimeError(
                        f"a worker of {model_name} ended with {worker.returncode}:\n{err[-2000:]}"
                    )
                results.append(json.loads(out.strip().splitlines()[-1]))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    plain, exact = (
        [max(pair) for pair in zip(*(result["seconds"][which] for result in results), strict=True)][WARM_UP:]
        for which in (0, 1)
    )
    return {
        "exact_step_seconds": statistics.median(exact),
        "plain_step_seconds": statistics.median(plain),
        "overhead_ratio": statistics.median(exact) / statistics.median(plain),
        "steps": steps + WARM_UP,
        "steps_done_again": results[0]["again"],
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


def of_size(size: int) -> Callable[[Any], list[Any]]:
    def run(cluster: Any) -> list[Any]:
        cluster.start(size)
        cluster.until_done(seconds=200)
        return list(cluster.workers)

    return run


def hash_of(zygote: Any, name: str, run: Callable[[Any], list[Any]], pace: float, steps: int) -> str:
    """Return the hash of the states at the end of one schedule; several, joined, where they differ.

    Raises:
        RuntimeError: a worker did not finish.
    """
    from worker_cluster import WorkerCluster

    with tempfile.TemporaryDirectory() as folder:
        options = {"samples": 211, "batch": 64, "epochs": steps // 4, "pace": pace}
        cluster = WorkerCluster(zygote, Path(folder), options, script=SCRIPT, environment=EXACT, maximum=8)
        try:
            results = [worker.result() for worker in run(cluster)]
            if not all(results):
                raise RuntimeError(f"{name}: a worker did not finish\n{cluster.logs()}")
        finally:
            cluster.close()
    seen = {" ".join(result[key] for key in ("parameters", "buffers", "optimizer")) for result in results}
    return " | ".join(sorted(seen))


def equality(steps: int) -> dict[str, str]:
    """Hash by schedule."""
    from worker_cluster import Zygote

    schedules: dict[str, tuple[Callable[[Any], list[Any]], float]] = {
        f"{size} workers": (of_size(size), 0.0) for size in (1, 2, 3, 5, 8)
    }
    schedules["3 workers, kills and joins"] = kills_and_joins, 0.01
    schedules["1 to 5 to 2 workers"] = scale_up_and_down, 0.01
    zygote = Zygote(**EXACT)
    hashes = {}
    try:
        for name, (run, pace) in schedules.items():
            hashes[name] = hash_of(zygote, name, run, pace, steps)
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
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, steps, *coordinators = arguments.worker
        train(name, int(steps), coordinators)
        return
    result = measure(24 if arguments.quick else 80, 30 if arguments.quick else 150)
    ratio = result["overhead_ratio"]
    print(f"equal {result['equal']}, overhead_ratio {ratio if ratio is None else round(ratio, 3)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def measure(equality_steps: int, overhead_steps: int) -> dict[str, Any]:
    """All that is written. Null with a reason for what did not run to its end."""
    from benchmarks.steady_state import MODELS

    began = time.monotonic()
    result: dict[str, Any] = {"equal": None, "hashes": {}, "overhead_ratio": None, "cases": {}}
    try:
        result["hashes"] = hashes = equality(equality_steps)
        result["equal"] = len(set(hashes.values())) == 1
        for name in MODELS:
            case = result["cases"][name] = overhead(name, overhead_steps)
            print(
                f"{name:12} exact {case['exact_step_seconds'] * 1e3:7.1f} ms  without "
                f"{case['plain_step_seconds'] * 1e3:7.1f} ms  ratio {case['overhead_ratio']:.3f}  "
                f"({case['steps_done_again']} of {case['steps']} steps done again)",
                flush=True,
            )
        result["overhead_ratio"] = max(case["overhead_ratio"] for case in result["cases"].values())
    except (RuntimeError, AssertionError, subprocess.TimeoutExpired) as error:
        result["reason"] = f"{type(error).__name__}: {error}"
        print(f"cut short: {result['reason']}", flush=True)
    return result | {"seconds": time.monotonic() - began}


if __name__ == "__main__":
    main()
