"""How much of the communication with a parameter server is hidden behind computation.

    python -m benchmarks.ps_overlap [--quick] [--json FILE]

One worker with one thread, one server, and between them a transport that is paced to a fixed rate (so that
communication is waiting, not CPU). The rate is chosen so that sending all gradients and then receiving all
values takes as long as forward and backward do. The ideal is the longer of the two.
`bound_without_early_values` is what a step can reach whose values come after the last gradient, so that only
the forward pass hides them (backward, then the longer of forward and receiving);
`ratio_without_early_values` is what it does reach. `waiting_seconds` is the part of a step in which the
worker's thread did not run, and `computing_seconds` the part in which it did: longer than `compute_seconds`
where the other cores' work (the server's, and copies) slows this one down. `asynchronous` has the figures of
a worker that waits for no other one: its values come early, too.
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

WIDTH, DEPTH, BATCH = 512, 12, 768
WARM_UP = 5
BLOCK = 8
"""Steps between two looks at what computation alone takes at this moment."""
_ROOT = Path(__file__).resolve().parents[1]


def build(width: int = WIDTH) -> Any:
    """DEPTH square layers: 12.6 MB of float32."""
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def compute(model: Any, x: Any, steps: int) -> list[tuple[float, float]]:
    """Seconds of (forward and backward, forward alone) without any communication."""
    seconds = []
    for _ in range(steps):
        model.zero_grad()
        started = time.perf_counter()
        loss = model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        seconds.append((time.perf_counter() - started, middle - started))
    return seconds


def first_look() -> float:
    """Median seconds of forward and backward, to choose the pace by."""
    import torch

    torch.set_num_threads(1)
    seconds = compute(build(), torch.randn(BATCH, WIDTH), 25)
    return statistics.median(whole for whole, _ in seconds[WARM_UP:])


def work(steps: int, width: int) -> None:
    """The worker: prints, block by block, the seconds of its steps and of computation alone, as JSON."""
    import torch

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    model = build(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)
    data, alone = torch.randn(BATCH * 8, width), build(width)
    blocks: list[dict[str, Any]] = []
    begins: list[tuple[float, float]] = []  # of steps, by the clock and in time that this thread has run
    for batch in springtide.batches((data,), batch_size=BATCH, epochs=-(-steps // 8), seed=0):
        begins.append((time.perf_counter(), time.thread_time()))
        if len(begins) > BLOCK:
            model.state_dict()  # waits for the values, so that nothing is hidden behind what follows
            pairs = list(itertools.pairwise(begins))[1:]
            took, ran = ([later[i] - earlier[i] for earlier, later in pairs] for i in (0, 1))
            blocks.append({"steps": took, "ran": ran, "compute": compute(alone, data[:BATCH], 3)[1:]})
            begins = []
        with springtide.step():
            model(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    print(json.dumps(blocks[1:]))


def run(
    pace: float, steps: int, early: bool = True, consistency: str = "Synchronous", width: int = WIDTH
) -> list[dict[str, Any]]:
    """Run a job of one worker, and return its measurements.

    Args:
        pace: limit of the connection to the servers, in bytes per second in each direction.
    """
    host = f"127.{random.randrange(20, 250)}.{random.randrange(250)}"
    with tempfile.TemporaryDirectory() as folder:
        common = os.environ | {
            "SPRINGTIDE_JOB": "overlap",
            "SPRINGTIDE_TOKEN": "benchmark",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_PS_PACE": str(pace),
            "SPRINGTIDE_CONSISTENCY": consistency,
            "SPRINGTIDE_EARLY_VALUES": str(int(early)),
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
                arguments = ["--worker", str(steps), str(width)] if module.startswith("benchmarks") else []
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
            blocks: list[dict[str, Any]] = json.loads(out.strip().splitlines()[-1])
            return blocks
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def ideals(block: dict[str, Any], communication: float) -> tuple[float, float]:
    """Seconds of computing alone, and the ideal step, around the steps of a block."""
    whole = statistics.median(pair[0] for pair in block["compute"])
    return whole, max(whole, communication)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(*arguments.worker)
        return
    steps = 72 if arguments.quick else 800
    model_bytes = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
    communication = first_look()
    pace = 2 * model_bytes / communication
    ratios, bounds, took, ran, alone = [], [], [], [], []
    for block in run(pace, steps):
        whole, ideal = ideals(block, communication)
        step = statistics.median(block["steps"])
        forward = statistics.median(pair[1] for pair in block["compute"])
        ratios.append(step / ideal)
        bounds.append((whole - forward + max(forward, communication / 2)) / ideal)
        took.append(step)
        ran.append(statistics.median(block["ran"]))
        alone.append(whole)
    late = [
        statistics.median(block["steps"]) / ideals(block, communication)[1]
        for block in run(pace, steps // 2, early=False)
    ]
    loose, loose_ratios = [], []
    for block in run(pace, steps, consistency="Asynchronous"):
        whole, ideal = ideals(block, communication)
        loose.append((statistics.median(block["steps"]), whole))
        loose_ratios.append(loose[-1][0] / ideal)
    loose_step, loose_alone = (statistics.median(column) for column in zip(*loose, strict=True))
    free = [statistics.median(block["steps"]) for block in run(0, steps // 2)]
    step, whole = statistics.median(took), statistics.median(alone)
    result: dict[str, Any] = {
        "ratio_to_ideal": statistics.median(ratios),
        "ratio_without_early_values": statistics.median(late),
        "bound_without_early_values": statistics.median(bounds),
        "step_seconds": step,
        "compute_seconds": whole,
        "communication_seconds": communication,
        "exposed_communication_seconds": max(0.0, step - whole),
        "waiting_seconds": statistics.median(whole - part for whole, part in zip(took, ran, strict=True)),
        "computing_seconds": statistics.median(ran),
        "without_overlap_ratio": (whole + communication) / max(whole, communication),
        "step_seconds_without_pacing": statistics.median(free),
        "bytes_per_second": pace,
        "consistency": "Synchronous",
        "asynchronous": {
            "ratio_to_ideal": statistics.median(loose_ratios),
            "step_seconds": loose_step,
            "compute_seconds": loose_alone,
            "exposed_communication_seconds": max(0.0, loose_step - loose_alone),
        },
        "blocks": len(ratios),
    }
    asynchronous: dict[str, float] = result["asynchronous"]
    for name, value in {**result, **{f"asynchronous.{n}": v for n, v in asynchronous.items()}}.items():
        if not isinstance(value, dict):
            print(f"{name:42} {round(value, 4) if isinstance(value, float) else value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
