"""Which signals reach a container's first process, as the kernel would have it for process 1."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from springtide_local.kubelet.logs import ContainerLog
from springtide_local.kubelet.processes import Process, ProcessRuntime, hears
from springtide_local.kubelet.runtime import Launch

CASES = {
    "signal.signal(signal.SIGTERM, lambda *_: None)": True,
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])": True,  # sigwait takes it
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)": False,
    "signal.signal(signal.SIGTERM, signal.SIG_DFL)": False,
    "signal.signal(signal.SIGHUP, lambda *_: None)": False,
}


@pytest.mark.parametrize(("does", "heard"), CASES.items())
def test_what_a_program_does_decides_what_it_hears(does: str, heard: bool) -> None:
    script = f"import signal; {does}; print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == b"up\n"
        assert _hears(program.pid) is heard
        program.kill()


def _hears(pid: int) -> bool:
    """Return whether it hears SIGTERM, once it sleeps."""
    deadline = time.monotonic() + 20
    while (heard := hears(pid, signal.SIGTERM)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return heard


def test_program_that_waits_for_the_signal_hears_it() -> None:
    """Wait for the signal as `tini` does, so that it is not among those that are blocked meanwhile."""
    script = "import signal; s = {signal.SIGTERM}; signal.pthread_sigmask(0, s); print(signal.sigwait(s))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as program:
        deadline = time.monotonic() + 20
        while not hears(program.pid, signal.SIGTERM) or not _waits(program.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert hears(program.pid, signal.SIGTERM)
        program.terminate()
        assert program.communicate()[0] == b"15\n"


def _waits(pid: int) -> bool:
    return "sigtimedwait" in Path(f"/proc/{pid}/wchan").read_text()


WAKES = (
    "import signal; s = {signal.SIGTERM}; signal.pthread_sigmask(0, s); print('up', flush=True)\n"
    "while signal.sigtimedwait(s, 0.0002) is None: pass\n"
)
COMPUTES = "print('up', flush=True)\nwhile True: pass\n"


async def _started(tmp_path: Path, code: str) -> Process:
    key = uuid.uuid4().hex
    log = ContainerLog(tmp_path / key)
    process = ProcessRuntime().start(
        Launch(key, [sys.executable, "-c", code], dict(os.environ), tmp_path, log)
    )
    deadline = time.monotonic() + 20
    while b"up" not in log.path.read_bytes():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return process


def test_waits_that_end_again_and_again_lose_no_signal(tmp_path: Path) -> None:
    """Come back from a wait and begin the next one between two looks at the process."""

    async def main() -> None:
        for _ in range(10):
            process = await _started(tmp_path, WAKES)
            process.terminate()
            async with asyncio.timeout(20):
                assert (await process.exited).code == 0

    asyncio.run(main())


def test_program_that_computes_hears_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        process = await _started(tmp_path, COMPUTES)
        process.terminate()
        await asyncio.sleep(0.5)
        assert not process.exited.done()
        process.kill()
        assert (await process.exited).signal == signal.SIGKILL

    asyncio.run(main())


def test_handlers_of_the_parent_are_not_the_childs() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert hears(os.getpid(), signal.SIGTERM)
        with subprocess.Popen(["sleep", "60"]) as program:
            assert not _hears(program.pid)
            program.kill()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ended_process_hears_nothing() -> None:
    program = subprocess.Popen(["true"])
    program.wait()
    assert not hears(program.pid, signal.SIGTERM)
