"""How much later a job with long steps is after the death of a worker in the middle of one.

    python -m benchmarks.salvage [--quick] [--json FILE]

Three workers train a model of 26 MB on loopback, in steps of two seconds made of eight micro-batches; a
device that takes its time for each sample is imitated by a pause, since the cores are few. One worker is
killed at a random point of a step, again and again. `extra_seconds_per_kill` is the gap between the commits
around a kill beyond a step of all workers. The others need part / (n - 1) for the samples of the dead worker,
here a second, which is the limit: `extra_over_limit` is how often that, when 0.15 s of recovery are taken
off. `gradients` is the same with `shard: Gradients`, and `servers` with parameters on two servers.
`whole_step` is the same job with `SPRINGTIDE_SALVAGE=Never`, whose survivors begin the step anew;
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
from benchmarks.ps_failover import ServerJob
from benchmarks.recovery import WIDTH, Job, build, zygote
from benchmarks.support.zygote import Zygote

WORKERS, MICRO_BATCHES = 3, 8
BATCH = 96
STEP_SECONDS = 2.0
RECOVERY_SECONDS = 0.15
CALM_STEPS = 3
LIMIT_SECONDS = STEP_SECONDS / (WORKERS - 1)
SERVERS = 2
QUICK_CALM_SECONDS = 45.0
"""Longest wait for undisturbed steps of torchft with --quick."""


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


class LongStepsOnServers(ServerJob):
    """The same with parameters on servers."""

    script = "benchmarks.salvage"


def start(folder: Path, zygote: Zygote, place: str, mode: str) -> Job:
    """Start a job of this benchmark.

    Args:
        folder: for logs and state.
        zygote: that workers are forked from.
        place: where sums are: workers, gradients (in shards), or servers.
        mode: of SPRINGTIDE_SALVAGE.
    """
    environment = {"SPRINGTIDE_SALVAGE": mode}
    if place == "servers":
        environment["SPRINGTIDE_REPLICATION"] = "1"
        return LongStepsOnServers(folder, SERVERS, environment, WORKERS, zygote)
    if place == "gradients":
        environment["SPRINGTIDE_SHARD"] = "Gradients"
    return LongSteps(folder, WORKERS, environment, zygote)


def await_calm(job: Job) -> None:
    """Wait until all workers have committed some steps of one generation. Raise TimeoutError."""

    def calm() -> bool:
        last = job.history.curve()[-CALM_STEPS:]
        same = len({commit.generation for commit in last}) == 1
        return len(last) == CALM_STEPS and same and len(job.history.active()) == job.workers

    job.until(calm, f"{CALM_STEPS} steps by all workers")


def extra_seconds(job: Job, chooser: random.Random) -> float:
    """Kill one worker at a random point of a step; return how much longer the gap is than a step."""
    from springtide_demo.gaps import gap_after

    await_calm(job)
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
    return gap - usual


def seen(job: Job) -> int:
    """Return how many samples have been counted so far."""
    return 0 if job.reply is None else int(job.reply.data.total_seen)


def measure(zygote: Zygote, kills: int, mode: str, place: str = "workers") -> dict[str, Any]:
    """Return the figures of one job.

    Args:
        zygote: that workers are forked from.
        kills: how many workers die, one after another.
        mode: of SPRINGTIDE_SALVAGE.
        place: where sums are; see `start`.
    """
    extra: list[float] = []
    reason, chooser = "", random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        job = start(Path(folder), zygote, place, mode)
        try:
            for number in range(kills):
                if number:
                    job.add()
                extra.append(extra_seconds(job, chooser))
                print(f"{place}, {mode}: {extra[-1]:.3f} s beyond a step", flush=True)
            before = seen(job)
            job.until(lambda: seen(job) > before, "the ledger")
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


def peer(observed: Seen) -> dict[str, Any]:
    """Return what is written of torchft.

    Args:
        observed: the observations of it.
    """
    gaps, step = observed.gaps.get("kill_worker", []), observed.step
    middle = statistics.median(gaps) - step if gaps and step is not None else None
    result: dict[str, Any] = {"torchft_extra_seconds_per_kill": middle, "torchft_kills": len(gaps)}
    return result | ({"torchft_reason": observed.reason} if observed.reason else {})


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
    quick = arguments.quick
    with Zygote(LongSteps.script) as processes:
        ours = measure(processes, 4 if quick else 20, "Auto")
        elsewhere = {
            place: measure(processes, 1 if quick else 10, "Auto", place) for place in ("gradients", "servers")
        }
        whole_step = measure(processes, 2 if quick else 10, "Never")
    result = {
        **ours,
        "step_seconds": STEP_SECONDS,
        "limit_seconds": LIMIT_SECONDS,
        **elsewhere,
        "whole_step": whole_step,
        **peer(
            measure_kills(1, STEP_SECONDS, QUICK_CALM_SECONDS) if quick else measure_kills(10, STEP_SECONDS)
        ),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
