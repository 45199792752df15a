"""Which signals reach a container's first process, as the kernel would have it for process 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
