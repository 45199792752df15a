"""A process's lifeline ends when it is killed, whatever else of the process there still is."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from springtide_protocol import lifeline

SECONDS = 30.0

# A process with a connection besides its lifeline, which does what it is told by lines, and answers each.
PROCESS = """
import os, socket, sys, threading, time
from springtide_protocol import lifeline

def lifelines():
    return sum(thread.name == "springtide-lifeline" for thread in threading.enumerate())

def until(wanted):
    while lifelines() != wanted:
        time.sleep(0.01)

port = int(sys.argv[1])
other = socket.create_connection(("127.0.0.1", port))
other.sendall(b"o" * lifeline.KEY_BYTES)
for line in sys.stdin:
    word = line.strip()
    if word == "hold":
        lifeline.hold("127.0.0.1", port, b"k" * lifeline.KEY_BYTES)
        print("ok", flush=True)
    elif word.isdigit():
        until(int(word))
        print("ok", flush=True)
    elif word == "descriptors":
        print(*sorted(set(os.listdir("/proc/self/fd"))), flush=True)
    elif word == "fork":
        child = os.fork()
        if not child:
            time.sleep(3600)
        print(child, flush=True)
    elif word == "refuse":
        exec(open(sys.argv[2]).read())
        print("ok", flush=True)
    elif word == "say":
        other.sendall(b"alive")
        print("ok", flush=True)
"""

# A seccomp filter that refuses close_range as a container runtime's profile does that does not list it.
REFUSE = """
import ctypes

class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint)
    ]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]

LOAD, JUMP_IF_EQUAL, RETURN, EPERM, ALLOW, CLOSE_RANGE = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000, 436
rules = (Instruction * 4)(
    Instruction(LOAD, 0, 0, 0), Instruction(JUMP_IF_EQUAL, 0, 1, CLOSE_RANGE),
    Instruction(RETURN, 0, 0, EPERM), Instruction(RETURN, 0, 0, ALLOW),
)
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert prctl(22, 2, ctypes.byref(Program(4, rules)), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
"""


@dataclass
class Program:
    """A process that is told by lines, and the listener that it connects to."""

    process: subprocess.Popen[str]
    listener: socket.socket
    stack: ExitStack

    def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def accept(self) -> socket.socket:
        connection = self.stack.enter_context(self.listener.accept()[0])
        connection.settimeout(SECONDS)
        return connection


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    refuse = tmp_path / "refuse.py"
    refuse.write_text(REFUSE)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(SECONDS)
        command = [sys.executable, "-c", PROCESS, str(listener.getsockname()[1]), str(refuse)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.enter_context(process)
        stack.callback(process.kill)
        yield Program(process, listener, stack)


def said(connection: socket.socket) -> bytes:
    """Return the key that is said on a connection; empty when it ends before."""
    return connection.recv(lifeline.KEY_BYTES, socket.MSG_WAITALL)


def test_a_kill_ends_it_while_children_keep_the_rest(program: Program) -> None:
    other = program.accept()
    assert said(other)[:1] == b"o"
    program.tell("hold")
    line = program.accept()
    assert said(line) == b"k" * lifeline.KEY_BYTES
    program.tell("1")  # the connecting thread has ended: only the holding one has the connection
    child = int(program.tell("fork"))
    try:
        assert not select.select([line], [], [], 0.2)[0]
        program.process.kill()
        assert line.recv(1) == b""
        program.process.wait()
        assert not select.select([other], [], [], 0.2)[0], "the child has it still"
    finally:
        os.kill(child, signal.SIGKILL)
    assert other.recv(1) == b""


def test_the_processes_own_descriptors_stay(program: Program) -> None:
    other = program.accept()
    said(other)
    before = program.tell("descriptors")
    program.tell("hold")
    line = program.accept()
    said(line)
    program.tell("1")
    assert program.tell("descriptors") == before, "and the lifeline is not among them"
    program.tell("say")
    assert other.recv(5, socket.MSG_WAITALL) == b"alive"


def test_the_coordinator_may_end_it(program: Program) -> None:
    said(program.accept())
    program.tell("hold")
    first = program.accept()
    said(first)
    program.tell("hold")
    second = program.accept()
    said(second)
    program.tell("2")
    first.close()
    program.tell("1")
    assert not select.select([second], [], [], 0.2)[0]


def test_without_a_table_no_key_is_said(program: Program) -> None:
    other = program.accept()
    said(other)
    before = program.tell("descriptors")
    program.tell("refuse")
    program.tell("hold")
    assert said(program.accept()) == b""
    program.tell("0")
    assert program.tell("descriptors") == before
    program.tell("say")
    assert other.recv(5, socket.MSG_WAITALL) == b"alive"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_one_that_cannot_be_had_is_done_without(host: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "springtide.coordinator.client")
    lifeline.hold(host, 1, bytes(lifeline.KEY_BYTES))
    for thread in threading.enumerate():
        if thread.name == "springtide-lifeline":
            thread.join(SECONDS)
    assert f"no lifeline to {host} port 1" in caplog.text
