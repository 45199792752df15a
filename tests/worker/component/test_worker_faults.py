"""Faults happen at their point, on whichever thread that is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import standstill

# Threads come to a point one after the other; each says so before and behind it.
SCRIPT = """
import threading
from springtide import faults
def run():
    print("before", flush=True)
    faults.reach("manifest", 1)
    print("behind", flush=True)
for _ in range(30):
    faults.arm("manifest:*:stop")
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
"""


SPINS = """
import threading
def spin():
    while True:
        pass
for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
print(flush=True)
spin()
"""


def test_thread_stopping_its_process_does_not_go_on_a_moment() -> None:
    child = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    said, rounds = "", 0
    try:
        while True:
            _, status = os.waitpid(child.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            rounds += 1
            os.set_blocking(child.stdout.fileno(), False)
            said += child.stdout.read() or ""
            assert said.split()[-1] == "before", f"round {rounds}"
            os.kill(child.pid, signal.SIGCONT)
        assert (rounds, status) == (30, 0)
    finally:
        child.kill()
        child.wait(30)
        child.stdout.close()


def test_a_stopped_process_stands_still_with_all_its_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", SPINS], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            for _ in range(20):
                standstill.stop(child.pid)
                assert set(standstill.states(child.pid)) == {"T"}
                os.kill(child.pid, signal.SIGCONT)
        finally:
            child.kill()
    assert standstill.stands_still(child.pid)
