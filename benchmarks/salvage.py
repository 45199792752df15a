"""How much later a job with long steps is after the death of a worker in the middle of one.

    python -m benchmarks.salvage [--quick] [--json FILE]

Three workers train a model of 26 MB on loopback, in steps of two seconds made of eight micro-batches; a
device that takes its time for each sample is imitated by a pause, since the cores are few. One worker is
killed at a random point of a step, again and again. `extra_seconds_per_kill` is the gap between the commits
around a kill beyond a step of all workers. The others need part / (n - 1) for the samples of the dead worker,
here a second, which is the limit: `extra_over_limit` is how often that, when 0.15 s of recovery are taken
off. `whole_step` is the same job with `SPRINGTIDE_SALVAGE=Never`, whose survivors begin the step anew;
`torchft_extra_seconds_per_kill` is torchft's, whose survivors drop the step, and its samples with it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.torchft import Seen, measure_kills
from benchmarks.recovery import WIDTH, Job, build, zygote

WORKERS, MICRO_BATCHES = 3, 8
BATCH = 96
STEP_SECONDS = 2.0
RECOVERY_SECONDS = 0.15
CALM_STEPS = 3
LIMIT_SECONDS = STEP_SECONDS / (WORKERS - 1)


def train() -> None:
    """The script of a worker, until it is killed."""
    import torch
    from torch.nn import functional as F

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)
    x, y = torch.randn(4096, WIDTH), torch.randint(10, (4096,))
    each = STEP_SECONDS * WORKERS / BATCH
    for batch in springtide.batches((x, y), batch_size=BATCH, epochs=10_000, seed=0):
        with springtide.step():
            for micro in batch.split(MICRO_BATCHES):
                began = time.perf_counter()
                inputs, labels = micro
                F.cross_entropy(model(inputs), labels).backward()
                time.sleep(max(0.0, each * micro.samples - (time.perf_counter() - began)))
            optimizer.step()
            optimizer.zero_grad()


class LongSteps(Job):
    """A job whose workers run this benchmark's script."""

    script = "benchmarks.salvage"

    def until_calm(self, seconds: float = 0.0) -> None:
        """Three workers commit, for some steps of one generation."""

        def calm() -> bool:
            last = self.history.curve()[-CALM_STEPS:]
            same = len({commit.generation for commit in last}) == 1
            return len(last) == CALM_STEPS and same and len(self.history.active()) == self.workers

        self.until(calm, f"{CALM_STEPS} steps by all workers")


def extra_seconds(job: Job, chooser: random.Random) -> float:
    """Kill one worker at a random point of a step; return how much longer the gap is than a step."""
    from springtide_demo.gaps import gap_after

    job.until_calm()
    usual = statistics.median(commit.step_seconds for commit in job.history.curve()[-CALM_STEPS:])
    before = job.history.newest()
    assert before is not None
    time.sleep(chooser.uniform(0.05, 0.95) * STEP_SECONDS)
    victim = chooser.choice(sorted(job.history.active()))
    at = time.time()
    job.signal(victim, signal.SIGKILL)

    def gone_on() -> bool:
        newest = job.history.newest()
        return newest is not None and newest.generation > before.generation

    job.until(gone_on, f"a step without {victim}")
    gap: float = gap_after(job.history.curve(), at, float("inf")).seconds
    job.bury(victim)
    job.add()
    return gap - usual


def measure(kills: int, mode: str) -> dict[str, Any]:
    """Return the figures of one job.

    Args:
        kills: how many workers die, one after another.
        mode: of SPRINGTIDE_SALVAGE.
    """
    extra: list[float] = []
    reason, chooser = "", random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        job = LongSteps(Path(folder), WORKERS, {"SPRINGTIDE_SALVAGE": mode})
        try:
            for _ in range(kills):
                extra.append(extra_seconds(job, chooser))
                print(f"{mode}: {extra[-1]:.3f} s beyond a step", flush=True)
            job.until_calm()
            job.until(lambda: job.reply is not None and job.reply.data.total_seen > 0, "the ledger")
            _, repeated, lost = job.tally()
        except TimeoutError as error:
            reason, repeated, lost = str(error), None, None
            print(f"cut short: {reason}", flush=True)
        finally:
            job.close()
    return figures(extra, repeated, lost, reason)


def figures(extra: list[float], repeated: int | None, lost: int | None, reason: str = "") -> dict[str, Any]:
    """Return what is written of one job.

    Args:
        extra: seconds beyond a step, by kill.
        repeated: samples, by the ledger; None: not known.
        lost: likewise.
        reason: why there are no more kills.
    """
    middle = statistics.median(extra) if extra else None
    return {
        "extra_seconds_per_kill": middle,
        "extra_seconds_max": max(extra, default=None),
        "extra_over_limit": None if middle is None else (middle - RECOVERY_SECONDS) / LIMIT_SECONDS,
        "samples_lost": lost,
        "samples_repeated": repeated,
        "kills": len(extra),
        **({"reason": reason} if reason else {}),
    }


def peer(seen: Seen) -> dict[str, Any]:
    """Return what is written of torchft.

    Args:
        seen: the observations of it.
    """
    gaps, step = seen.gaps.get("kill_worker", []), seen.step
    middle = statistics.median(gaps) - step if gaps and step is not None else None
    result: dict[str, Any] = {"torchft_extra_seconds_per_kill": middle, "torchft_kills": len(gaps)}
    return result | ({"torchft_reason": seen.reason} if seen.reason else {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        zygote(train)
        return
    ours = measure(4 if arguments.quick else 20, "Auto")
    whole_step = measure(2 if arguments.quick else 10, "Never")
    result = {
        **ours,
        "step_seconds": STEP_SECONDS,
        "limit_seconds": LIMIT_SECONDS,
        "whole_step": whole_step,
        **peer(measure_kills(2 if arguments.quick else 10, STEP_SECONDS)),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
