"""The cluster's outermost process: it starts the cluster as its child and outlives it, to leave no process
behind.

The process is a *subreaper*: a process that loses its parent anywhere below the cluster, also by being a
daemon of its own, becomes a child of this process. When the cluster ends, however it ends, all children are
killed until there are none. If this process is killed, the kernel tells the cluster, which then stops by
itself. Processes that both of them left (killed together) are found by its environment at the next start.

Run as `python -m springtide_local.reaper DATA_FOLDER`. Exit status: the cluster's; 75 when another cluster
uses the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from springtide_local.strays import CLUSTER_VARIABLE, children_of, processes_with

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
IN_USE = 75
_SWEEPS = 200
_LOCK_SECONDS = 0.2
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the folder for this process and its forks; None when another cluster has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            # Whoever asks whether a cluster runs holds the lock for a moment too.
            if time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.01)


def kill_cluster(cluster: str) -> int:
    """Kill every process that carries the cluster's mark, until none is left; how many there were. Raise
    TimeoutError naming the survivors.
    """
    seen: set[int] = set()
    for _ in range(_SWEEPS):
        found = processes_with(CLUSTER_VARIABLE, cluster)
        if not found:
            return len(seen)
        seen.update(found)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    raise TimeoutError(f"processes {found} of cluster {cluster} do not end although they were killed")


def clean_up_earlier(data: Path) -> None:
    """Remove what an earlier cluster in this folder left when it was killed together with its reaper."""
    identity = data / "cluster-id"
    if identity.exists():
        count = kill_cluster(identity.read_text().strip())
        if count:
            print(f"killed {count} processes that an earlier cluster had left", flush=True)
    shutil.rmtree(data / "run", ignore_errors=True)
    (data / "cluster.json").unlink(missing_ok=True)


def _kill_children() -> None:
    """Kill and reap until this process has no children. A killed child's children become ours, so this ends
    with nothing left.
    """
    while True:
        for pid in children_of(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _wait_for(cluster: int) -> int:
    """Reap orphans until the cluster itself ends; its exit status."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == cluster:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> int:
    data = Path(sys.argv[1])
    lock = take_lock(data / "lock")
    if lock is None:
        print(f"another cluster runs in {data}", flush=True)
        return IN_USE
    clean_up_earlier(data)
    identity = secrets.token_hex(8)
    (data / "cluster-id").write_text(identity)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getpid()
    cluster = os.fork()
    if cluster == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return 1
        from springtide_local.process import run_cluster

        return run_cluster(data, identity, parent)
    for number in _STOPPING:
        signal.signal(number, lambda number, frame: os.kill(cluster, signal.SIGTERM))
    status = _wait_for(cluster)
    for number in _STOPPING:
        signal.signal(number, signal.SIG_IGN)
    _kill_children()
    kill_cluster(identity)
    shutil.rmtree(data / "run", ignore_errors=True)
    (data / "cluster.json").unlink(missing_ok=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
