"""Containers as local processes: each in a session of its own, watched through a pidfd, so that its death is
seen at once.

A container is here a process group (with the processes that escaped from it, found by their environment):
when the main process ends, the rest is killed. A container's first process is process 1 of a PID namespace,
to which the kernel delivers only what it catches or blocks: `terminate` follows that rule, since here it is
an ordinary process (see decision 43).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from springtide_local.kubelet.logs import ContainerLog, log_end
from springtide_local.kubelet.runtime import ExecResult, Exit, Launch, StartError
from springtide_local.strays import CONTAINER_VARIABLE, processes_of_session, processes_with

_CHUNK = 64 * 1024
_EXEC_OUTPUT = 10 * 1024
_SWITCHES = "voluntary_ctxt_switches"  # one more each time that it begins to wait
_HEARD = ("SigCgt", "SigBlk")
_DEAF_LOOKS = 3  # a process can be seen between two sleeps as if it were in one
_LOOK_SECONDS = 0.01  # until one that was awake is looked at again
_AWAKE_SECONDS = 0.005  # of computing: far more than it takes to come back from a wait


class Process:
    """A running container. All methods are for the event loop's thread.

    With `sweep`, what left the group is looked for also when the main process ended by itself.
    """

    def __init__(self, launch: Launch, popen: subprocess.Popen[bytes], output: int, sweep: bool) -> None:
        self.key = launch.key
        self.pid = popen.pid
        self._popen = popen
        self._log = launch.log
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._oom_kills = _oom_kills()
        self._killed_here = False
        self._sweep = sweep
        self.exited: asyncio.Future[Exit] = self._loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)
        self._loop.add_reader(output, self._on_output)

    @property
    def id(self) -> str:
        return f"process://{self.pid}"

    def terminate(self) -> None:
        """SIGTERM to the main process, unless the kernel would drop it on its way to process 1."""
        self._terminate(ran=cpu_seconds(self.pid), deaf=0, slept=sleeps(self.pid))

    def _terminate(self, ran: float, deaf: int, slept: str) -> None:
        """Look once, and again while that is not sure.

        Args:
            ran: seconds that it had computed when it was last known to come from a sleep.
            deaf: how often in a row it was seen not to hear.
            slept: how often it had begun to sleep by then.
        """
        if self.exited.done():
            return
        heard = hears(self.pid, signal.SIGTERM)
        if heard:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            return
        deaf = deaf + 1 if heard is False else 0
        if (now := sleeps(self.pid)) != slept:
            # Short waits, one after another, add up to much computing; only what is in one piece counts.
            ran, slept = cpu_seconds(self.pid), now
        if deaf < _DEAF_LOOKS and cpu_seconds(self.pid) - ran < _AWAKE_SECONDS:
            self._loop.call_later(_LOOK_SECONDS, self._terminate, ran, deaf, slept)

    def kill(self) -> None:
        self._killed_here = True
        self._signal_all(signal.SIGKILL)

    def freeze(self) -> None:
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_all(signal.SIGCONT)

    def pids(self) -> list[int]:
        if self.exited.done():
            return []
        return [*{*processes_of_session(self.pid), *processes_with(CONTAINER_VARIABLE, self.key)}]

    def _signal_all(self, number: signal.Signals) -> None:
        if self.exited.done():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
        self._loop.run_in_executor(None, signal_escaped, self.key, number)

    def _on_output(self) -> None:
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._log.write(data)
        else:
            self._loop.remove_reader(self._output)

    def _on_exit(self) -> None:
        at = time.time()
        self._loop.remove_reader(self._pidfd)
        # The leader is not reaped yet, so its number cannot have been given to another group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        status = self._popen.wait()
        os.close(self._pidfd)
        self._loop.remove_reader(self._output)
        _drain(self._output, self._log)
        os.close(self._output)
        self._log.close()
        number = -status if status < 0 else 0
        # An init process tells by its exit code what killed the process behind it.
        killed = number == signal.SIGKILL or status == 128 + signal.SIGKILL
        starved = killed and not self._killed_here and _oom_kills() > self._oom_kills
        self.exited.set_result(Exit(128 + number if number else status, number, at, starved))
        if self._sweep or self._killed_here:
            self._loop.run_in_executor(None, signal_escaped, self.key, signal.SIGKILL)


class ProcessRuntime:
    """The runtime port on local processes."""

    def start(self, launch: Launch) -> Process:
        popen, output = _spawn(launch)
        return Process(launch, popen, output, sweep=True)

    async def execute(self, launch: Launch, timeout: float) -> ExecResult:
        """Run a command beside a container and wait for it; nothing is left running.

        Args:
            launch: of the command; its log is removed.
            timeout: in seconds.

        Returns:
            Its exit code, None when the time was over, and the end of its output.

        Raises:
            StartError: it cannot be started.
        """
        popen, output = _spawn(launch)
        process = Process(launch, popen, output, sweep=False)
        try:
            async with asyncio.timeout(timeout):
                code: int | None = (await asyncio.shield(process.exited)).code
        except TimeoutError:
            code = None
        finally:
            if not process.exited.done():
                process.kill()
                await process.exited
        output_end = log_end(launch.log.path, lines=1000, limit_bytes=_EXEC_OUTPUT)
        launch.log.path.unlink()
        return ExecResult(code, output_end)


def _spawn(launch: Launch) -> tuple[subprocess.Popen[bytes], int]:
    program = launch.argv[0]
    found = (
        shutil.which(program, path=launch.env.get("PATH", os.defpath))
        if "/" not in program
        else str(launch.cwd / program)
    )
    if found is None:
        raise _start_error(f'exec: "{program}": executable file not found in $PATH')
    if not launch.cwd.is_dir():
        raise _start_error(f"mkdir {launch.cwd}: the working directory does not exist")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reading, False)
    try:
        popen = subprocess.Popen(
            launch.argv,
            executable=found,
            env={**launch.env, CONTAINER_VARIABLE: launch.key},
            cwd=launch.cwd,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        os.close(reading)
        launch.log.close()
        raise _start_error(f'exec: "{program}": {_reason(error)}') from error
    finally:
        os.close(writing)
    return popen, reading


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValueError):
        return str(error)
    names = {
        errno.ENOENT: "no such file or directory",
        errno.EACCES: "permission denied",
        errno.ENOEXEC: "exec format error",
        errno.E2BIG: "argument list too long",
    }
    return names.get(error.errno or 0, error.strerror or str(error))


def _start_error(cause: str) -> StartError:
    return StartError(
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
        "runc create failed: "
        f"unable to start container process: {cause}: unknown"
    )


def _drain(output: int, log: ContainerLog) -> None:
    with contextlib.suppress(BlockingIOError):
        # A process that escaped may still write: a pipe's worth is all that the container itself can have
        # left.
        for _ in range(32):
            data = os.read(output, _CHUNK)
            if not data:
                return
            log.write(data)


def signal_escaped(key: str, number: signal.Signals) -> None:
    """Signal the processes of a container that left its group.

    It reads all of /proc, which is slow: not for the event loop's thread.

    Args:
        key: of the container.
        number: of the signal.
    """
    for pid in processes_with(CONTAINER_VARIABLE, key):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def hears(pid: int, number: signal.Signals) -> bool | None:
    """Return whether a process would get a signal from outside if it were process 1 of a PID namespace.

    The kernel drops one that the process neither catches nor blocks, SIGKILL and SIGSTOP apart. A blocked one
    waits for `sigwait` and its like; while a process waits so, as `tini` does, it shows as not blocked: it is
    known by the call that it sleeps in. One that has just been woken from that call, and waits for a
    processor, cannot be told from one that computes and would not hear: then the answer is None.

    The program is loaded by the time its number is known, so that handlers of the process that started it are
    never taken for its own.

    Args:
        pid: of a child that has not been reaped, so that the number is still its own.
        number: the signal.
    """
    bit = 1 << (number - 1)
    first, before = _status(pid), _status(pid)
    waits = "sigtimedwait" in _waits_in(pid)
    after = _status(pid)
    if not after:
        return False  # it has ended
    if waits or any(int(status.get(mask, "0"), 16) & bit for status in (before, after) for mask in _HEARD):
        return True
    # One sleep all the time: one file tells a state and a count that belong to two moments.
    slept = not any(status.get("State", "").startswith("R") for status in (before, after))
    return False if slept and first.get(_SWITCHES) == after.get(_SWITCHES) else None


def cpu_seconds(pid: int) -> float:
    """How long the main thread of a process has computed so far; infinity once it has ended."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return math.inf


def sleeps(pid: int) -> str:
    """Return the count of how often the main thread of a process has begun to sleep; "" once it has ended."""
    return _status(pid).get(_SWITCHES, "")


def _status(pid: int) -> dict[str, str]:
    """The kernel's account of a process's main thread; empty once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _waits_in(pid: int) -> str:
    """The kernel's function in which a process waits; "" where the kernel does not tell."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


def _oom_kills() -> int:
    """How often the kernel has killed for lack of memory since it booted; 0 where it does not tell."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        return 0
    return 0
