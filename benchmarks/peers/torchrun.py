"""The peer of benchmarks.recovery: DistributedDataParallel under torchrun, one worker process killed.

Three agents on one machine (2 to 3 nodes of one process), which restart the processes by themselves.
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
from pathlib import Path
from typing import Any

import psutil

WORKERS = 3
CUT_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parents[2]


def train_ddp(folder: Path) -> None:
    """The same training by DistributedDataParallel; appends the time of each step of each process."""
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
        while True:
            x, y = torch.randn(part, WIDTH), torch.randint(10, (part,))
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{time.time()}\n")


def torchrun_gap() -> float:
    """Seconds from the last step before one worker process is killed to the next step of anybody; at most
    CUT_SECONDS. Raise TimeoutError when training does not begin.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=2:{WORKERS}", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=10"),
            *("--monitor-interval=0.1", "-m", "benchmarks.peers.torchrun", name),
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
            deadline = time.monotonic() + 60

            def steps() -> dict[str, list[float]]:
                texts = {path.name: path.read_text() for path in folder.glob("steps-*")}
                return {key: [float(line) for line in text.split("\n")[:-1]] for key, text in texts.items()}

            while sum(len(times) >= 10 for times in steps().values()) < WORKERS:
                if time.monotonic() > deadline:
                    raise TimeoutError("torchrun made no ten steps with three workers in 60 s")
                time.sleep(0.1)
            victim = max(steps())
            os.kill(int(victim.partition("-")[2]), signal.SIGKILL)
            killed = time.time()
            while time.time() < killed + CUT_SECONDS:
                everything = sorted(time for times in steps().values() for time in times)
                # Steps that were under way may still end.
                if everything[-1] > killed + 0.5 or len(steps()) > WORKERS:
                    later = [at for at in everything if at > killed]
                    if later:
                        last = max(at for at in everything if at <= killed)
                        return max(b - a for a, b in itertools.pairwise([last, *later]))
                time.sleep(0.1)
            return CUT_SECONDS
        finally:
            stop(agents)


def measure_torchrun(tries: int) -> dict[str, Any]:
    """Null with a reason when it does not run."""
    gaps = []
    try:
        for _ in range(tries):
            gaps.append(torchrun_gap())
    except (TimeoutError, OSError) as error:
        return {"gap_seconds_p50": None, "censored": None, "reason": str(error)}
    return {"gap_seconds_p50": statistics.median(gaps), "censored": sum(gap >= CUT_SECONDS for gap in gaps)}


def stop(agents: list[subprocess.Popen[bytes]]) -> None:
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
