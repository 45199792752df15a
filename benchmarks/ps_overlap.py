"""How much of the communication with a parameter server is hidden behind computation.

    python -m benchmarks.ps_overlap [--quick] [--json FILE]

One worker with one thread, one server, and between them a transport that is paced to a fixed rate (so that
communication is waiting, not CPU). The rate is chosen so that sending all gradients and then receiving all
values takes as long as forward and backward do. The ideal is the longer of the two. Synchronous training
cannot be ideal: values come after the last gradient, so that only the forward pass can hide them; the bound
below is what it can reach (backward, then the longer of forward and receiving).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, DEPTH, BATCH = 512, 12, 192
WARM_UP = 5
_ROOT = Path(__file__).resolve().parents[1]


def build() -> Any:
    """DEPTH square layers: 12.6 MB of float32."""
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def compute_seconds(steps: int) -> tuple[float, float]:
    """Medians of (forward and backward, forward alone) without any communication."""
    import torch

    torch.set_num_threads(1)
    model, x = build(), torch.randn(BATCH, WIDTH)
    whole, forward = [], []
    for _ in range(steps):
        model.zero_grad()
        started = time.perf_counter()
        loss = model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        ended = time.perf_counter()
        whole.append(ended - started)
        forward.append(middle - started)
    return statistics.median(whole[WARM_UP:]), statistics.median(forward[WARM_UP:])


def work(steps: int) -> None:
    """The worker: prints the seconds of its steps, each from its begin to the next one's, as JSON."""
    import torch

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)
    data = torch.randn(BATCH * 8, WIDTH)
    begins = []
    for batch in springtide.batches((data,), batch_size=BATCH, epochs=-(-steps // 8), seed=0):
        begins.append(time.perf_counter())
        with springtide.step():
            model(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    seconds = [later - earlier for earlier, later in itertools.pairwise(begins)]
    print(json.dumps(seconds[WARM_UP:]))


def run(pace: float, steps: int) -> list[float]:
    """Seconds of a job's steps at that pace (bytes per second in each direction)."""
    host = f"127.{random.randrange(20, 250)}.{random.randrange(250)}"
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "SPRINGTIDE_JOB": "overlap",
            "SPRINGTIDE_TOKEN": "benchmark",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_PS_PACE": str(pace),
            "SPRINGTIDE_COORDINATOR": f"{host}.1:7070",
            "SPRINGTIDE_SLOT": "0",
            "SPRINGTIDE_ATTEMPT": "0",
            "OMP_NUM_THREADS": "1",
        }
        roles = {
            "springtide_coordinator": {
                "SPRINGTIDE_BIND": f"{host}.1",
                "SPRINGTIDE_PORT": "7070",
                "SPRINGTIDE_INCARNATION": "1",
                "SPRINGTIDE_STATE_DIR": folder,
                "SPRINGTIDE_TARGET": "1",
                "SPRINGTIDE_MINIMUM": "1",
                "SPRINGTIDE_MAXIMUM": "1",
                "SPRINGTIDE_SERVERS": "1",
            },
            "springtide_ps": {
                "SPRINGTIDE_BIND": f"{host}.2",
                "SPRINGTIDE_POD_IP": f"{host}.2",
                "SPRINGTIDE_POD_NAME": "overlap-ps-0-0",
                "SPRINGTIDE_POD_UID": "server",
            },
            "benchmarks.ps_overlap": {
                "SPRINGTIDE_BIND": f"{host}.3",
                "SPRINGTIDE_POD_IP": f"{host}.3",
                "SPRINGTIDE_POD_NAME": "overlap-worker-0-0",
                "SPRINGTIDE_POD_UID": "worker",
                "SPRINGTIDE_STRATEGY": "ParameterServer",
                "SPRINGTIDE_TERMINATION_LOG": str(Path(folder) / "end"),
            },
        }
        processes = []
        try:
            for module, environment in roles.items():
                arguments = ["--worker", str(steps)] if module.startswith("benchmarks") else []
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *arguments],
                        env=common | environment,
                        cwd=_ROOT,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE if arguments else subprocess.DEVNULL,
                        text=True,
                    )
                )
            out, err = processes[-1].communicate(timeout=300)
            if processes[-1].returncode:
                raise RuntimeError(f"the worker ended with {processes[-1].returncode}:\n{err[-2000:]}")
            seconds: list[float] = json.loads(out.strip().splitlines()[-1])
            return seconds
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker)
        return
    steps = 60 if arguments.quick else 300
    compute, forward = compute_seconds(40)
    model_bytes = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
    communication = compute
    pace = 2 * model_bytes / communication
    paced = run(pace, steps)
    free = run(0, steps)
    after, _ = compute_seconds(40)
    ideal = max(compute, communication)
    bound = (compute - forward) + max(forward, communication / 2)
    step = statistics.median(paced)
    result = {
        "step_seconds": step,
        "compute_seconds": compute,
        "compute_seconds_afterwards": after,
        "communication_seconds": communication,
        "ratio_to_ideal": step / ideal,
        "synchronous_bound_ratio": bound / ideal,
        "exposed_communication_seconds": max(0.0, step - compute),
        "without_pacing": {"step_seconds": statistics.median(free)},
        "without_overlap_ratio": (compute + communication) / ideal,
        "bytes_per_second": pace,
        "consistency": "Synchronous",
        "steps": len(paced),
    }
    for name, value in result.items():
        print(f"{name:30} {value if isinstance(value, str | int | dict) else round(value, 4)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
