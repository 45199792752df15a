"""Finding processes by the marks in their environment, whatever session or parent they have."""

from __future__ import annotations

import os
from collections.abc import Iterator

CLUSTER_VARIABLE = "SPRINGTIDE_LOCAL_CLUSTER"
CONTAINER_VARIABLE = "SPRINGTIDE_LOCAL_CONTAINER"
INIT_MARK = b"# The init process of Springtide"  # with which the operator's program begins


def processes_with(variable: str, value: str) -> list[int]:
    """Return ids of our user's living processes (not zombies, not this one) by a mark in their environment.

    Args:
        variable: of the environment that the process began with.
        value: that it has there.
    """
    mark = f"\0{variable}={value}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = b"\0" + file.read() + b"\0"
        except OSError:
            # Gone meanwhile, or another user's.
            continue
        if mark in environment:
            found.append(int(name))
    return found


def processes_of_session(leader: int) -> list[int]:
    """Ids of the processes in the session that this process leads, zombies included."""
    return [pid for pid, fields in _stats() if int(fields[3]) == leader]


def children_of(parent: int) -> list[int]:
    """Ids of the processes whose parent that is, zombies included."""
    return [pid for pid, fields in _stats() if int(fields[1]) == parent]


def program_of(pid: int) -> int:
    """Return the process of the command that a container's init process runs; `pid` itself if it is none."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            is_init = any(word.startswith(INIT_MARK) for word in file.read().split(b"\0"))
    except OSError:
        return pid
    return min(children_of(pid), default=pid) if is_init else pid


def _stats() -> Iterator[tuple[int, list[bytes]]]:
    """Yield each process's number and its fields of `/proc/PID/stat` after the command: state, parent, group,
    session, ...
    """
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command stands in parentheses and may hold any character.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        yield int(name), fields
