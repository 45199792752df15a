"""Which signals reach a container's first process, as the kernel would have it for process 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from springtide_local.kubelet.processes import hears

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
        assert hears(program.pid, signal.SIGTERM) is heard
        program.kill()


def test_program_that_waits_for_the_signal_hears_it() -> None:
    """As `tini` does. While it waits, the signal is not among those that are blocked."""
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


def test_handlers_of_the_parent_are_not_the_childs() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert hears(os.getpid(), signal.SIGTERM)
        with subprocess.Popen(["sleep", "60"]) as program:
            assert not hears(program.pid, signal.SIGTERM)
            program.kill()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ended_process_hears_nothing() -> None:
    program = subprocess.Popen(["true"])
    program.wait()
    assert not hears(program.pid, signal.SIGTERM)
