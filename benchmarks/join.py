"""How long the others stand still when a worker joins a job whose state is large.

    python -m benchmarks.join [--quick] [--json FILE]

Three workers train on loopback, with SGD without momentum, a model whose state is 64 MiB, then one
of 1 GiB, and with AdamW one of 768 MiB, of which a step moves a third.
Again and again a fourth one joins, trains with them for some steps, and leaves. `gap_over_step` is the
longest pause between two commits, from the moment when the joiner's process is started until it has committed
JOINED_STEPS steps with the others, divided by the median step of the three before; of several joins the
median.
Steps of four workers on the same cores take longer, and so do those during the joiner's start:
`stop_over_step` is the pause between the last commit of the three and the first of the four, less the median
of the next steps of the four, divided by the same. `seconds_to_full_size` is how long it takes from the
joiner's start to its first commit.

Then a fourth one stands by, and one of the three is killed (kill -9) at a random moment:
`with_standby.seconds_to_full_size` is how long it takes from there until a step is committed by three again,
of several kills the median, and `limit_seconds` is two steps and half a second. At the top stand those of the
size that is nearest to its limit, or furthest beyond: `with_standby_seconds_to_full_size` and
`with_standby_step_seconds`. Workers are
forked from a process that has imported torch; what else a joiner needs (its model, and its first body) is
within the time that is looked at, on the cores that the others train on.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import recovery

WORKERS = 3
DEPTH, BATCH = 16, 24
WIDTHS = {"64MiB": 1024, "1GiB": 4096, "768MiB AdamW": 2048}
"""Width of the square layers of a model, by the size of its state, and the optimizer if it is not SGD."""
KILLS = ("64MiB", "1GiB")
"""Sizes at which workers are killed, too."""
CALM_STEPS, JOINED_STEPS = 4, 3
LIMIT_STEPS, LIMIT_SECONDS = 2.0, 0.5
"""Limit of the time from a worker's kill until a standby trains in its place: so many steps, and seconds."""
SPREAD_STEPS = 1.5
NAMES = ("gap_seconds", "step_seconds", "seconds_to_full_size")
_WIDTH, _OPTIMIZER = "BENCHMARK_WIDTH", "BENCHMARK_OPTIMIZER"


# ---- a worker


def train() -> None:
    """The script of a worker, until it is killed or leaves."""
    import os

    import torch

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    width = int(os.environ[_WIDTH])
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(DEPTH)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 / width)  # random numbers take longer than all the rest of a start
    # The decay changes every bit pattern in each step, so that a joiner has nothing of it beforehand.
    if os.environ.get(_OPTIMIZER) == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=1e-2)
    model, optimizer = springtide.distribute(model, optimizer)
    x = torch.randn(4096, width)
    for (inputs,) in springtide.batches((x,), batch_size=BATCH, epochs=10_000, seed=0):
        with springtide.step():
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


# ---- the job


class Job(recovery.Job):
    """A job of three workers, to which another one comes at times."""

    script = "benchmarks.join"

    def until_members(self, count: int, seconds: float) -> None:
        """Wait until so many workers have committed some steps of one generation."""

        def calm() -> bool:
            last = self.history.curve()[-CALM_STEPS:]
            same = len({commit.generation for commit in last}) == 1
            return len(last) == CALM_STEPS and same and len(self.history.active()) == count

        self.until(calm, f"{CALM_STEPS} steps by {count} workers", seconds)

    def until_standby(self, name: str, seconds: float) -> None:
        """Wait until a worker waits, ready to train, and the coordinator knows it."""
        from springtide_protocol import coordinator_pb2 as pb

        def ready() -> bool:
            told = [] if self.reply is None else self.reply.members
            return any(one.member.pod_name == name and one.standing == pb.PARKED for one in told)

        self.until(ready, f"{name} to stand by", seconds)

    def committed_by(self, name: str) -> list[float]:
        """Return the times of a worker's commits, in unix seconds."""
        path = self._folder / f"{name}.steps"
        lines = path.read_text().splitlines() if path.exists() else []
        return [float(json.loads(line)["time"]) for line in lines if line.endswith("}")]


@dataclass(slots=True)
class Seen:
    """Seconds, of each join: the longest pause, the usual step before, and until the joiner trained."""

    gaps: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)  # the pause at the join beyond a step of all four
    steps: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)
    stood_in: list[float] = field(default_factory=list)  # from a kill until a standby trained
    stood_in_steps: list[float] = field(default_factory=list)  # the usual step before that


def longest_pause(times: Sequence[float], begin: float, end: float) -> float:
    """Return the longest time between two commits of which the later one lies in begin..end.

    Args:
        times: of commits, ascending.
        begin: of what is looked at; the commit before it counts as the first.
        end: of what is looked at.

    Raises:
        ValueError: there is no such pair.
    """
    found = [later - earlier for earlier, later in pairwise(times) if begin < later <= end]
    if not found:
        raise ValueError("no two commits around the join")
    return max(found)


def stop_before(times: Sequence[float], first: int) -> float:
    """Return by how many seconds the first commit of a generation came later than after a usual step of it.

    Args:
        times: of commits, ascending; at least two are of the generation, and one is not.
        first: number of its first one.

    Raises:
        ValueError: there are not so many.
    """
    if first < 1 or len(times) < first + 2:
        raise ValueError("too few commits around the join")
    steps = [later - earlier for earlier, later in pairwise(times[first:])]
    return times[first] - times[first - 1] - statistics.median(steps)


def join(job: Job, seen: Seen, limit: float) -> None:
    """Have a worker join, train and leave; note what the others have seen of it.

    Args:
        job: of three workers.
        seen: is added to.
        limit: seconds to wait for each phase.
    """
    job.until_members(WORKERS, limit)
    calm = [commit.unix_time for commit in job.history.curve()[-CALM_STEPS:]]
    at = time.time()
    job.workers = WORKERS + 1
    name = job.add()
    job.until(
        lambda: len(job.committed_by(name)) >= JOINED_STEPS, f"{JOINED_STEPS} steps of the joiner", limit
    )
    own = job.committed_by(name)
    times = [commit.unix_time for commit in job.history.curve()]
    seen.steps.append(statistics.median(later - earlier for earlier, later in pairwise(calm)))
    seen.gaps.append(longest_pause(times, at, own[JOINED_STEPS - 1]))
    newest = job.history.curve()[-1].generation
    together = sum(commit.generation == newest for commit in job.history.curve())
    seen.stops.append(stop_before(times, len(times) - together))
    seen.full.append(own[0] - at)
    print(
        f"pause {seen.gaps[-1]:.3f} s, stop {seen.stops[-1]:.3f} s, step {seen.steps[-1]:.3f} s, "
        f"joined {seen.full[-1]:.1f} s",
        flush=True,
    )
    job.workers = WORKERS
    job.signal(name, signal.SIGTERM)
    job.bury(name)


def replace(job: Job, seen: Seen, limit: float, chooser: random.Random) -> None:
    """Kill a worker while another one stands by; note how soon three train again.

    Args:
        job: of three workers.
        seen: is added to.
        limit: seconds to wait for each phase.
        chooser: of the worker and the moment.
    """
    name = job.add()
    job.until_standby(name, limit)
    job.until_members(WORKERS, limit)
    calm = [commit.unix_time for commit in job.history.curve()[-CALM_STEPS:]]
    step = statistics.median(later - earlier for earlier, later in pairwise(calm))
    time.sleep(chooser.uniform(0.0, SPREAD_STEPS) * step)
    victim = chooser.choice(sorted(job.history.active()))
    at = time.time()
    job.signal(victim, signal.SIGKILL)
    job.until(lambda: bool(job.committed_by(name)), "a step of the standby", limit)
    job.bury(victim)
    seen.stood_in.append(job.committed_by(name)[0] - at)
    seen.stood_in_steps.append(step)
    print(f"killed: three again after {seen.stood_in[-1]:.3f} s, step {step:.3f} s", flush=True)


def measure(size: str, repeats: int) -> dict[str, Any]:
    """Return what is seen of some joins to a job with a state of this size, and of some kills; nulls with a
    reason where nothing is.
    """
    seen, reason = Seen(), ""
    with tempfile.TemporaryDirectory() as folder:
        optimizer = size.partition(" ")[2] or "SGD"
        job = Job(Path(folder), WORKERS, {_WIDTH: str(WIDTHS[size]), _OPTIMIZER: optimizer})
        try:
            for _ in range(repeats):
                join(job, seen, 90.0)
            job.until_members(WORKERS, 90.0)
            job.standby, chooser = 1, random.Random(repeats)
            for _ in range((repeats + 1) // 2 if size in KILLS else 0):
                replace(job, seen, 90.0, chooser)
        except (TimeoutError, RuntimeError, OSError, ValueError) as error:
            reason = str(error)[:500]
            logs = [path.read_text()[-800:] for path in sorted(Path(folder).glob("worker-*.log"))]
            print(f"{size}: cut short: {error}", *logs, sep="\n", flush=True)
        finally:
            job.close()
    return figures(seen, reason)


def figures(seen: Seen, reason: str = "") -> dict[str, Any]:
    """Return what is written of some joins.

    Args:
        seen: of them.
        reason: why there are not more.
    """
    told: dict[str, Any] = {"with_standby": stood_in(seen)} | ({"reason": reason} if reason else {})
    if not seen.gaps:
        return dict.fromkeys(("gap_over_step", "stop_over_step", *NAMES)) | {"joins": 0} | told
    ratios = [gap / step for gap, step in zip(seen.gaps, seen.steps, strict=True)]
    stops = [stop / step for stop, step in zip(seen.stops, seen.steps, strict=True)]
    values = map(statistics.median, (seen.gaps, seen.steps, seen.full))
    return {
        "gap_over_step": statistics.median(ratios),
        **dict(zip(NAMES, values, strict=True)),
        "gap_over_step_max": max(ratios),
        "stop_over_step": statistics.median(stops),
        "stop_over_step_max": max(stops),
        "joins": len(ratios),
        **told,
    }


def stood_in(seen: Seen) -> dict[str, Any]:
    """Return what is written of kills with a standby; nulls without any.

    Args:
        seen: of them.
    """
    if not seen.stood_in:
        return dict.fromkeys(("seconds_to_full_size", "step_seconds", "limit_seconds")) | {"kills": 0}
    seconds, step = statistics.median(seen.stood_in), statistics.median(seen.stood_in_steps)
    return {
        "seconds_to_full_size": seconds,
        "step_seconds": step,
        "limit_seconds": LIMIT_STEPS * step + LIMIT_SECONDS,
        "seconds_to_full_size_max": max(seen.stood_in),
        "kills": len(seen.stood_in),
    }


def report(by_size: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures as they are written: `gap_over_step` by size first, and of kills with a standby
    those of the size that is nearest to its limit, or furthest beyond.
    """
    known = [item["with_standby"] for item in by_size.values() if item["with_standby"]["kills"]]
    worst: dict[str, Any] = max(
        known, key=lambda one: one["seconds_to_full_size"] / one["limit_seconds"], default={}
    )
    return {
        "gap_over_step": {size: item["gap_over_step"] for size, item in by_size.items()},
        "stop_over_step": {size: item["stop_over_step"] for size, item in by_size.items()},
        "with_standby_seconds_to_full_size": worst.get("seconds_to_full_size"),
        "with_standby_step_seconds": worst.get("step_seconds"),
        **by_size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer joins")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", choices=list(WIDTHS), help="one size")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        recovery.zygote(train)
        return
    few, many = {"64MiB": 4, "1GiB": 1, "768MiB AdamW": 1}, {"64MiB": 9, "1GiB": 3, "768MiB AdamW": 9}
    repeats = few if arguments.quick else many
    sizes = [arguments.only] if arguments.only else list(WIDTHS)
    result = report({size: measure(size, repeats[size]) for size in sizes})
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
