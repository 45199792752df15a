"""Processes of tests: forked from one that has torch imported, and what can be done to each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import standstill
from forked_start import forked

from springtide.coordination import outcome

LONG_SECONDS = 0.5  # a wait that makes steps slow
START_SECONDS = 180.0  # of a zygote: on a machine with much to do its imports of 5 s take a minute
READY, FORMED = "(STANDBY: ready to train)", "springtide INFO generation "  # lines of a worker's log
ROOTS = [str(Path(__file__).parents[2] / root) for root in ("protocol", "operator", "worker", "ps")]
_ZYGOTE = Path(__file__).with_name("worker_zygote.py")


class Zygote:
    """Makes worker processes that have torch imported; one for all tests of a session.

    It is forked itself by the fork server where it is of this tree.
    """

    def __init__(self, **environment: str) -> None:
        """environment: what must be set before torch is imported."""
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(ROOTS),
            **environment,
        }
        ours = environment["PYTHONPATH"] == os.pathsep.join(ROOTS)
        with forked() if ours else contextlib.nullcontext():
            self._process = subprocess.Popen(
                [sys.executable, str(_ZYGOTE)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        self._changed = threading.Condition()
        self._made: list[int] = []
        self._codes: dict[int, int] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def fork(self, env: dict[str, str], argv: list[str], log: Path) -> int:
        assert self._process.stdin is not None
        with self._changed:
            before = len(self._made)
            self._process.stdin.write(json.dumps({"env": env, "argv": argv, "log": str(log)}) + "\n")
            self._process.stdin.flush()
            if not self._changed.wait_for(lambda: len(self._made) > before, START_SECONDS):
                raise TimeoutError(f"the zygote did not make a process in {START_SECONDS:g} s")
            return self._made[-1]

    def code(self, pid: int) -> int | None:
        """Exit code (negative: signal); None while it runs."""
        with self._changed:
            return self._codes.get(pid)

    def wait(self, pid: int, seconds: float) -> int:
        """The exit code, once it has ended. TimeoutError when it does not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self._codes, seconds):
                raise TimeoutError(f"process {pid} did not end in {seconds:.0f} s")
            return self._codes[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(START_SECONDS)
        self._reader.join(5)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._changed:
                if "code" in message:
                    self._codes[message["pid"]] = message["code"]
                else:
                    self._codes.pop(message["pid"], None)  # the number may have been another's
                    self._made.append(message["pid"])
                self._changed.notify_all()


class Forked:
    """A process forked by a zygote, with its exit code, signals and a wait."""

    __slots__ = ()
    pid: int
    zygote: Zygote

    @property
    def code(self) -> int | None:
        return self.zygote.code(self.pid)

    @property
    def running(self) -> bool:
        return self.code is None

    def signal(self, number: int) -> None:
        # It may end at this moment.
        with contextlib.suppress(ProcessLookupError):
            if self.running:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int:
        """Wait for the process's end, and return its exit code.

        Raises:
            TimeoutError: the process does not end in time.
        """
        return self.zygote.wait(self.pid, seconds)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may end at this moment
            if self.running:
                standstill.stop(self.pid)

    def wake(self) -> None:
        self.signal(signal.SIGCONT)


@dataclasses.dataclass(slots=True)
class Worker(Forked):
    """One worker process in its imagined pod."""

    name: str
    slot: int
    uid: str
    address: str
    pid: int
    folder: Path
    zygote: Zygote
    leave_by: float = 0.0
    terminated_at: float = 0.0
    woken_at: float = 0.0
    formed_before: int = 0  # in how many generations it was when it was woken

    def terminate(self) -> None:
        self.terminated_at = time.monotonic()
        self.signal(signal.SIGTERM)

    def wake(self) -> None:
        self.formed_before, self.woken_at = self.log().count(FORMED), time.monotonic()
        self.signal(signal.SIGCONT)

    def waited_for(self, now: float) -> bool:
        """Whether it is about to leave, or has long been about to join again."""
        if not self.running:
            return False
        joins = 0 < self.woken_at < now - LONG_SECONDS and self.log().count(FORMED) == self.formed_before
        return self.terminated_at > 0 or joins

    def commits(self) -> list[dict[str, Any]]:
        """Return the entries of the worker's step log so far."""
        path = self.folder / f"{self.name}.steps"
        if not path.exists():
            return []
        return [
            json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]

    def outcome(self) -> outcome.Outcome | None:
        path = self.folder / f"{self.name}.end"
        return outcome.parse(path.read_text()) if path.exists() else None

    def result(self) -> dict[str, Any] | None:
        path = self.folder / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def log(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text() if path.exists() else ""


@dataclasses.dataclass(slots=True)
class Coordinator(Forked):
    """The coordinator's process in its imagined pod."""

    pid: int
    zygote: Zygote


@dataclasses.dataclass(slots=True)
class ServerPod(Forked):
    """One parameter server's process in its imagined pod."""

    name: str
    slot: int
    uid: str
    pid: int
    path: Path
    zygote: Zygote
    leave_by: float = 0.0

    def log(self) -> str:
        return self.path.read_text() if self.path.exists() else ""
