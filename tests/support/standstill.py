"""Stopped processes. SIGSTOP is a wish: a thread that runs on another core goes on until it hears of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_GONE = {"Z", "X"}


def stop(pid: int, seconds: float = 30.0) -> None:
    """SIGSTOP, and wait until no thread of the process runs any more, or it has ended.

    Raises ProcessLookupError where there is none, AssertionError when it does not stand still in time.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while not stands_still(pid):
        assert time.monotonic() < deadline, f"process {pid} runs {seconds:g} s after SIGSTOP: {states(pid)}"
        time.sleep(0.001)


def stands_still(pid: int) -> bool:
    """Whether all threads of the process are stopped, or none is left."""
    return set(states(pid)) <= {"T", "t", *_GONE}


def states(pid: int) -> list[str]:
    """Return the states of the process's threads, as /proc has them; empty where it has ended."""
    found = []
    threads = Path(f"/proc/{pid}/task")
    try:
        ids = os.listdir(threads)
    except (FileNotFoundError, ProcessLookupError):
        return []
    for thread in ids:
        try:
            found.append((threads / thread / "stat").read_text().rpartition(")")[2].split()[0])
        except (OSError, IndexError):
            continue  # it has just ended
    return found
