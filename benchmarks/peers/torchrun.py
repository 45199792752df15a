"""The peer of benchmarks.recovery: DistributedDataParallel under torchrun, one worker process killed.

Three agents on one machine (2 to 3 nodes of one process), which restart the processes by themselves. Other
scripts can be run and killed likewise (`kill_one`).
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

WORKERS = 3
BEGIN_SECONDS, CUT_SECONDS = 120.0, 60.0
"""Limits of what comes before a kill, and of what is waited for after one."""
_ROOT = Path(__file__).resolve().parents[2]


def train_ddp(folder: Path) -> None:
    """The same training by DistributedDataParallel; appends a line for each step of each process."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.recovery import BATCH, WIDTH, build

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    part = BATCH // dist.get_world_size()
    with (folder / f"steps-{os.getpid()}").open("a", buffering=1) as log:
        for step in itertools.count(1):
            x, y = torch.randn(part, WIDTH), torch.randint(10, (part,))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{time.time()} {step}\n")


Steps = list[tuple[float, int]]
"""(unix time, number) of the steps that one process has made."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The end of one process of three, and what followed.

    Attributes:
        gap_seconds: From the last step before it to the first of a process started after it, or the longest
            pause in between.
        steps_lost: Steps that were made and have to be made again; None when nothing followed.
        steps_made: Steps that were made before.
    """

    gap_seconds: float
    steps_lost: int | None
    steps_made: int


def after_kill(before: Steps, after: Steps, killed: float) -> Kill:
    """Return what a kill has cost. PURE.

    Args:
        before: Steps of all processes that were there.
        after: Steps of those that came later; at least one.
        killed: Unix time of the kill.
    """
    last = max(at for at, _ in before if at <= killed)
    late = [at for at, _ in before if at > killed]  # steps that were under way
    first_at, first = min(after)
    times = sorted([last, *late, first_at])
    newest = max(step for _, step in before)
    return Kill(max(b - a for a, b in itertools.pairwise(times)), max(0, newest - first + 1), newest)


def kill_one(module: str, ready: int, arguments: Sequence[str] = (), cut: float = CUT_SECONDS) -> Kill:
    """Train under torchrun and kill one worker process.

    Args:
        module: Trains; called with a folder, in which each process appends `UNIX_TIME STEP` for each step to
            `steps-PID`.
        ready: Steps of each process before the kill.
        arguments: More of the module.
        cut: Seconds after the kill that are waited for a step, at most, and are then its gap.

    Raises:
        TimeoutError: Training does not begin.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=2:{WORKERS}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=10"),
            *("--monitor-interval=0.1", "-m", module, name, *arguments),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        agents = [
            subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for _ in range(WORKERS)
        ]
        try:
            deadline = time.monotonic() + BEGIN_SECONDS

            def steps() -> dict[str, Steps]:
                found: dict[str, Steps] = {}
                for path in folder.glob("steps-*"):
                    lines = [line.split() for line in path.read_text().split("\n")[:-1]]
                    found[path.name] = [(float(at), int(step)) for at, step in lines]
                return found

            while sum(len(own) >= ready for own in steps().values()) < WORKERS:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"torchrun made no {ready} steps with three workers in {BEGIN_SECONDS:g} s"
                    )
                time.sleep(0.02)
            there = set(steps())
            os.kill(int(max(there).partition("-")[2]), signal.SIGKILL)
            killed = time.time()
            while time.time() < killed + cut:
                now = steps()
                if after := [step for key, own in now.items() if key not in there for step in own]:
                    before = [step for key, own in now.items() if key in there for step in own]
                    return after_kill(before, after, killed)
                time.sleep(0.1)
            return Kill(cut, None, max(step for own in steps().values() for _, step in own))
        finally:
            stop(agents)


def measure_torchrun(tries: int, cut: float = CUT_SECONDS) -> dict[str, Any]:
    """Return the figures of benchmarks.recovery; null with a reason when it does not run.

    Args:
        tries: Kills, each in a run of its own.
        cut: Seconds that are waited for a step after a kill, at most, and are then its gap.
    """
    gaps = []
    try:
        for _ in range(tries):
            gaps.append(kill_one("benchmarks.peers.torchrun", ready=10, cut=cut).gap_seconds)
    except (TimeoutError, OSError) as error:
        return {"gap_seconds_p50": None, "censored": None, "reason": str(error)}
    return {"gap_seconds_p50": statistics.median(gaps), "censored": sum(gap >= cut for gap in gaps)}


def stop(agents: Sequence[subprocess.Popen[Any]]) -> None:
    """Kill the agents and whatever they have started, in whichever sessions."""
    living = [psutil.Process(agent.pid) for agent in agents if agent.poll() is None]
    for process in living:
        process.suspend()  # so that it starts nothing more
    for process in [child for agent in living for child in agent.children(recursive=True)] + living:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it has ended by itself
    for agent in agents:
        agent.wait()


if __name__ == "__main__":
    train_ddp(Path(sys.argv[1]))
