"""The real coordinator as a process, and real sessions that record what they are told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.heartbeat import LIMIT as HEARTBEAT_LIMIT
from springtide_protocol.session_client import SessionClient
from springtide_protocol.versions import OWN

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a-token"
# `python -m springtide_coordinator`, but a broken stream may come back within another time.
_WITH_GRACE = """
import asyncio, os, sys
from dataclasses import replace
from springtide_coordinator import logs
from springtide_coordinator.service import serve
from springtide_coordinator.settings import read_options
logs.set_up(job="digits", namespace="tests")
options = read_options(os.environ)
settings = replace(options.membership, grace=float(sys.argv[1]))
asyncio.run(serve(replace(options, membership=settings)))
"""


def until(condition: Callable[[], bool], what: str, timeout: float = 40.0) -> float:
    """Wait for a condition; return the seconds it took. Fails with `what` after `timeout` seconds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout:
            raise AssertionError(f"not within {timeout:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


class CoordinatorProcess:
    """`python -m springtide_coordinator`; the port stays the same over restarts.

    grace: seconds within which a broken stream may come back; None: as always.
    """

    def __init__(self, state_dir: Path, grace: float | None = None, **env: str) -> None:
        self._program = ["-m", "springtide_coordinator"]
        if grace is not None:
            self._program = ["-c", _WITH_GRACE, str(grace)]
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "operator"),
            "SPRINGTIDE_JOB": "digits",
            "SPRINGTIDE_NAMESPACE": "tests",
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_STATE_DIR": str(state_dir),
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_PORT": "0",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_TARGET": "1",
            "SPRINGTIDE_MINIMUM": "1",
            **env,
        }
        self.log: list[str] = []
        self.metrics_port = 0
        self.start_seconds = 0.0
        self.start()

    def start(self) -> None:
        began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, *self._program], env=self.env, stderr=subprocess.PIPE, text=True
        )
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(60):
            raise AssertionError(f"the coordinator does not listen: {self.log}")
        self.start_seconds = time.monotonic() - began

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r" port=(\d+)", line):
                self.env["SPRINGTIDE_PORT"] = match[1]
                self._listening.set()
            if match := re.search(r"metrics_port=(\d+)", line):
                self.metrics_port = int(match[1])
        self.process.stderr.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.env['SPRINGTIDE_PORT']}"

    def kill(self, how: int = signal.SIGKILL) -> int:
        """End it and wait; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Member:
    """A worker process as far as the coordinator sees it: it forms what it is told to start."""

    def __init__(
        self,
        address: str,
        name: str,
        *,
        token: str = TOKEN,
        slot: int = 0,
        keepalive: float = HEARTBEAT_LIMIT,
        authority: str = "",
    ) -> None:
        self.hello = pb.Hello(
            protocol_version=OWN.oldest,
            speaks=speaks_to_proto(OWN),
            member=pb.Member(id=name, pod_uid=name, pod_name=name, address="127.0.0.1", slot=slot),
            standing=pb.STARTING,
        )
        self.messages: list[pb.CoordinatorMessage] = []
        self.forms = True
        self.broken: list[str] = []
        self.client = SessionClient(
            address,
            token,
            lambda: self.hello,
            self._on_message,
            on_disconnected=self.broken.append,
            keepalive=keepalive,
            authority=authority,
        )
        self.client.start()

    def _on_message(self, message: pb.CoordinatorMessage) -> None:
        self.messages.append(message)
        if message.WhichOneof("message") == "start":
            start = message.start
            self.hello.standing = pb.ACTIVE
            self.hello.generation.CopyFrom(start.generation)
            del self.hello.members[:]
            self.hello.members.extend(start.members)
            self.hello.state.CopyFrom(start.state)
            del self.hello.servers[:]
            self.hello.servers.extend(start.servers)
            if self.forms:
                self.form()
        # What is on which servers is told again.
        serves = self.hello.standing == pb.ACTIVE and self.hello.servers and self.forms
        if message.WhichOneof("message") == "welcome" and serves:
            self.form()

    def form(self) -> None:
        self.client.send(pb.WorkerMessage(formed=pb.Formed(generation=self.hello.generation)))

    def park(self, reason: pb.ParkReason = pb.STANDBY, largest_group: int = 0) -> None:
        self.hello.standing = pb.PARKED
        parked = pb.Parked(reason=reason, layout_hash="layout", largest_group=largest_group)
        if self.hello.HasField("generation"):
            parked.generation.CopyFrom(self.hello.generation)
            parked.state.CopyFrom(self.hello.state)
        self.client.send(pb.WorkerMessage(parked=parked))

    def commit(self, step: int, samples: int = 64, seconds: float = 0.1) -> None:
        """Report a commit of `step` in the present generation."""
        self.hello.state.CopyFrom(pb.StateName(generation=self.hello.generation, step=step))
        commit = pb.Commit(
            state=self.hello.state,
            unix_time=time.time(),
            step_seconds=seconds,
            samples=samples,
            values={"loss": 1 / step},
        )
        progress = pb.Progress(commits=[commit], productive_seconds=step * seconds, data=pb.Data(seen=step))
        self.client.send(pb.WorkerMessage(progress=progress))

    def all(self, kind: str) -> list[pb.CoordinatorMessage]:
        return [message for message in self.messages if message.WhichOneof("message") == kind]

    def wait(self, kind: str, count: int = 1, timeout: float = 40.0) -> pb.CoordinatorMessage:
        """Wait until `count` messages of the kind have come; returns the last."""
        until(
            lambda: len(self.all(kind)) >= count,
            f"{self.hello.member.id} gets {kind} no. {count}, but {self.messages}",
            timeout,
        )
        return self.all(kind)[-1]

    def close(self) -> None:
        self.client.close()
