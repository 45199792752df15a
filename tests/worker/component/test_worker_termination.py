"""SIGTERM in a process that has imported the library, and has not begun or is a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from springtide.elastic import termination

IN_JOB = {"SPRINGTIDE_COORDINATOR": "127.0.0.1:1"}


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_sigterm_before_init_flushes_and_exits_143() -> None:
    """SIGTERM before `init()` flushes the output and ends with exit code 143.

    The process does not end by the signal itself, which process 1 would not die of.
    """
    script = """
import os, signal, springtide, sys
sys.stdout.write("half a line")
os.kill(os.getpid(), signal.SIGTERM)
print("not reached")
"""
    ended = run(script, **IN_JOB)
    assert (ended.returncode, ended.stdout) == (143, "half a line")


def test_sigterm_outside_of_a_job_is_left_alone() -> None:
    script = "import signal, springtide; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    assert run(script, SPRINGTIDE_COORDINATOR="").stdout == "True\n"


def test_handler_of_the_script_stays() -> None:
    script = """
import signal
handler = lambda *_: None
signal.signal(signal.SIGTERM, handler)
import springtide
print(signal.getsignal(signal.SIGTERM) is handler)
"""
    assert run(script, **IN_JOB).stdout == "True\n"


def test_forked_child_dies_of_the_signal_itself() -> None:
    """`multiprocessing` and data loaders end their children by SIGTERM, and look at how they died."""
    script = """
import os, signal, springtide
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(9)
while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
    os.kill(child, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    assert run(script, **IN_JOB).stdout.splitlines()[-1] == "15"


def test_spawned_child_dies_of_the_signal_itself() -> None:
    script = """
import multiprocessing
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(
        target=exec, args=("import os, signal, springtide; os.kill(os.getpid(), signal.SIGTERM)",)
    )
    child.start()
    child.join()
    print(child.exitcode)
"""
    assert run(script, **IN_JOB).stdout == "-15\n"


def test_stream_that_takes_nothing_does_not_hold_the_end_up() -> None:
    script = """
import os, signal, springtide, sys, time
class Stuck:
    def flush(self):
        time.sleep(600)
sys.stdout = Stuck()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert run(script, **IN_JOB).returncode == 143


@pytest.mark.parametrize(("handler", "replaceable"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_only_the_default_may_be_replaced(handler: signal.Handlers, replaceable: bool) -> None:
    assert termination.is_ours_or_default(handler) is replaceable
