"""Pods whose container runs `springtide launch`: real launchers in the place of the cluster's zygote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forked_start import forked
from worker_cluster import PROGRAM, Worker

ROOTS = [str(Path(__file__).parents[2] / root) for root in ("protocol", "operator", "worker", "ps")]
LAUNCH = [sys.executable, "-m", "springtide.launch"]


class Launchers:
    """Starts launchers; `options` are those of the command line, before `--`. The coordinator needs none."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._made: dict[int, subprocess.Popen[bytes]] = {}

    def fork(self, env: dict[str, str], argv: list[str], log: Path) -> int:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(ROOTS),
            "OMP_NUM_THREADS": "1",
            "SPRINGTIDE_METRICS_PORT": "0",
            **env,
        }
        launcher = [] if argv[0] == str(PROGRAM) else [*LAUNCH, *self._options, "--"]
        with log.open("ab") as file, forked():
            made = subprocess.Popen(
                [*launcher, sys.executable, *argv],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._made[made.pid] = made
        return made.pid

    def code(self, pid: int) -> int | None:
        return self._made[pid].poll()

    def wait(self, pid: int, seconds: float) -> int:
        return self._made[pid].wait(seconds)


def launched(worker: Worker) -> dict[int, int]:
    """Process ids by local rank, as the launcher's log told last."""
    found = {}
    for line in worker.log().splitlines():
        if " runs as pid " in line:
            words = line.split()
            found[int(words[words.index("process") + 1])] = int(words[words.index("pid") + 1])
    return found


def alive(pid: int) -> bool:
    """Whether a process of this id exists; one that nobody has reaped counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def steps(worker: Worker, rank: int) -> int:
    """Steps that one process of a pod has committed, by its step log."""
    path = worker.folder / f"{worker.name}.steps.{rank}"
    return path.read_text().count("\n") if path.exists() else 0
