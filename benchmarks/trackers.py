"""The cost of an experiment tracker: the same steps with TensorBoard on and off, by turns in one process.

    python -m benchmarks.trackers [--quick] [--json FILE]

One process trains the perceptron of `benchmarks.steady_state`, and reports three values in each step.
Blocks of 1.5 s with the tracker and without it follow each other; a pair's figure is the time of a
step in the one over that in the other. The rest that the tracker's thread has to write when a block ends is
written before the next one begins. `tracker_ratio` is the median of the pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.steady_state import build

PAUSE_SECONDS = 0.6


def measure(pairs: int, block_seconds: float) -> dict[str, Any]:
    """Train so many pairs of blocks and return the figures.

    Args:
        pairs: of a block with the tracker and one without it.
        block_seconds: of each block.
    """
    import torch
    from torch.nn import functional as F

    import springtide
    from springtide import api
    from springtide.loggers import TensorBoard

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        springtide.init(loggers=[TensorBoard(folder)], config={"lr": 0.01})
        model, samples, labels, batch_size = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        springtide.distribute(model, optimizer)
        runtime = api.active_runtime
        assert runtime is not None
        accounting = runtime.accounting
        tracking = accounting.tracking
        steps, seconds = {True: 0, False: 0}, {True: list[float](), False: list[float]()}
        # Every other pair begins with the other one; the first pair warms up.
        schedule = [is_on for pair in range(pairs + 1) for is_on in (pair % 2 == 0, pair % 2 == 1)]
        times: list[float] = []
        block, began = 0, time.perf_counter()
        last = began
        for x, y in springtide.batches((samples, labels), batch_size=batch_size, epochs=1_000_000, seed=0):
            if time.perf_counter() - began > block_seconds:
                if block >= 2:
                    seconds[schedule[block]].append(statistics.fmean(times))
                    steps[schedule[block]] += len(times)
                block, times = block + 1, []
                if block == len(schedule):
                    break
                time.sleep(PAUSE_SECONDS)
                accounting.tracking = tracking if schedule[block] else None
                began = last = time.perf_counter()
            with springtide.step():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                springtide.report(loss=loss, scaled=loss * 2, rate=0.01)
                optimizer.step()
                optimizer.zero_grad()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        accounting.tracking = tracking
    return figures(seconds, steps)


def figures(seconds: dict[bool, list[float]], steps: dict[bool, int]) -> dict[str, Any]:
    """Return what is written of blocks with the tracker (True) and without it, in pairs.

    Args:
        seconds: of a step, the mean of each block.
        steps: that were made.
    """
    ratios = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
    return {
        "tracker_ratio": statistics.median(ratios),
        "step_seconds_on": statistics.median(seconds[True]),
        "step_seconds_off": statistics.median(seconds[False]),
        "pairs": len(ratios),
        "steps_on": steps[True],
        "steps_off": steps[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer blocks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    result = measure(10 if arguments.quick else 30, 1.5)
    print(
        f"step with TensorBoard {result['step_seconds_on'] * 1e3:.3f} ms, without "
        f"{result['step_seconds_off'] * 1e3:.3f} ms, ratio {result['tracker_ratio']:.4f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
