"""The port between the kubelet and whatever runs containers. `processes` runs local processes; another one
may only pretend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from springtide_local.kubelet.logs import ContainerLog


@dataclass(frozen=True)
class Launch:
    """A process to run. All paths are real ones. `key` is unique over all starts of all containers of this
    cluster.
    """

    key: str
    argv: Sequence[str]
    env: dict[str, str]
    cwd: Path
    log: ContainerLog


class Exit(NamedTuple):
    """`code` is 128 + signal for a killed process; `signal` is 0 when it ended by itself. `at` is in
    seconds since 1970.
    """

    code: int
    signal: int
    at: float
    out_of_memory: bool = False


class ExecResult(NamedTuple):
    """`code` is None when the time was up."""

    code: int | None
    output: str


class StartError(Exception):
    """The container could not be started; the message is what a container runtime would say."""


class RunningContainer(Protocol):
    @property
    def id(self) -> str:
        """`containerID` of the status, such as `process://4711`."""
        ...

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done as soon as the container's main process has ended and its output has been read."""
        ...

    def terminate(self) -> None:
        """SIGTERM to the main process, which gets it if process 1 of a PID namespace would."""
        ...

    def kill(self) -> None:
        """SIGKILL to all processes."""
        ...

    def freeze(self) -> None:
        """SIGSTOP to all processes."""
        ...

    def thaw(self) -> None:
        """SIGCONT to all processes."""
        ...

    def pids(self) -> list[int]:
        """Ids of all its processes. Slow (reads /proc): not for the event loop's thread."""
        ...


class Runtime(Protocol):
    def start(self, launch: Launch) -> RunningContainer:
        """Raise StartError."""
        ...

    async def execute(self, launch: Launch, timeout: float) -> ExecResult:
        """Run a command beside a container (probe, hook) and wait for it; nothing is left running.

        Args:
            launch: of the command.
            timeout: in seconds.

        Returns:
            Its exit code, None when the time was over, and the end of its output.

        Raises:
            StartError: it cannot be started.
        """
        ...
