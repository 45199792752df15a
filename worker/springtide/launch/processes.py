"""Processes of this launcher: how they are made, told and buried. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from springtide.launch.output import Relay

_PR_SET_PDEATHSIG = 1
_OUTPUT_SECONDS = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


class CannotStart(Exception):
    """The command cannot be run; the message names it and says why."""


@dataclass(slots=True)
class Child:
    """One running process, leader of a session of its own."""

    rank: int
    popen: subprocess.Popen[bytes]
    relays: list[Relay] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def signal(self, number: int) -> None:
        """SIGKILL reaches everything it has started, any other signal itself alone."""
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def bury(self, code: int) -> str:
        """End the processes that this one left behind, and return the last lines of its error stream."""
        self.popen.returncode = code
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for relay in self.relays:
            relay.close(_OUTPUT_SECONDS)
        return self.relays[-1].tail if self.relays else ""


def spawn(
    rank: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    prefix: str = "",
    relayed: bool = False,
    cpus: frozenset[int] | None = None,
) -> Child:
    """Start a process. It is killed when the calling thread ends.

    Args:
        rank: its local rank.
        command: program and arguments.
        environment: all of it; nothing is inherited.
        prefix: before each line of its output; "": its output is not touched, unless relayed.
        relayed: its output passes through the launcher, so that its last lines are known.
        cpus: that it may run on; None: any.

    Returns:
        The running process.

    Raises:
        CannotStart: the system refuses, in its own words.
    """
    parent = os.getpid()

    def prepare() -> None:
        # Between fork and exec of a process with threads: system calls only.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(127)
        if cpus is not None:
            os.sched_setaffinity(0, cpus)

    pipe = subprocess.PIPE if prefix or relayed else None
    try:
        popen = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            preexec_fn=prepare,
        )
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CannotStart(f"cannot start {command[0]!r}: {reason}") from error
    child = Child(rank, popen)
    if pipe is not None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        mark = prefix.encode()
        child.relays = [
            Relay(popen.stdout, sys.stdout.fileno(), mark),  # type: ignore[arg-type]
            Relay(popen.stderr, sys.stderr.fileno(), mark),  # type: ignore[arg-type]
        ]
    return child


def reap() -> list[tuple[int, int]]:
    """(pid, code) of all processes that have ended by now; as process 1 also of orphans that became ours."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))
