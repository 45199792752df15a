"""Leaks of a test: threads that would keep the interpreter alive, and child processes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_THREADS = Path("/proc/self/task")

# Kept for the life of the interpreter by multiprocessing itself.
_KEPT_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def blocking_threads() -> set[threading.Thread]:
    """Return the living threads that are not daemons, without the calling one."""
    return {
        t
        for t in threading.enumerate()
        if t.is_alive() and not t.daemon and t is not threading.current_thread()
    }


def children(known: Collection[int] = ()) -> dict[int, str]:
    """Return the direct child processes (pid -> command line) that have not ended.

    Args:
        known: ids of some that are left out; to look at a process takes longer than many a test.
    """
    found: dict[int, str] = {}
    for pid in child_ids() - {*known}:
        try:
            child = psutil.Process(pid)
            # One that is about to begin its program has no command line yet; nor has one that has ended.
            command = " ".join(child.cmdline()) or child.name()
            if child.status() == psutil.STATUS_ZOMBIE:
                continue
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        if not any(kept in command for kept in _KEPT_CHILDREN):
            found[child.pid] = command
    return found


def child_ids() -> set[int]:
    """Return the ids of the direct child processes of whichever thread, with those that have just ended.

    The kernel's own lists, where it has them: to look at all processes of the machine, as psutil does, takes
    longer than most tests. A list that is read while a child ends may miss another one (proc(5)), so two
    readings have to agree.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    try:
        ids = _read_child_ids()
        while (again := _read_child_ids()) != ids:
            ids = again
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return {child.pid for child in psutil.Process().children()}
    return ids


def _read_child_ids() -> set[int]:
    """Raise FileNotFoundError where the kernel keeps no such lists."""
    ids: set[int] = set()
    for thread in os.listdir(_THREADS):
        try:
            ids.update(int(pid) for pid in (_THREADS / thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            if (_THREADS / thread).exists():
                raise
    return ids


def leaked(
    threads_before: set[threading.Thread], children_before: Collection[int], patience: float = 15.0
) -> list[str]:
    """Return a line for all that lives now, did not before, and is still there after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        lines = [f"thread {thread.name!r}" for thread in blocking_threads() - threads_before]
        lines += [f"process {pid}: {command}" for pid, command in children(children_before).items()]
        if not lines or time.monotonic() >= deadline:
            return lines
        time.sleep(0.02)
