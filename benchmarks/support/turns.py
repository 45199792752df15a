"""Have processes that train side by side make their steps by turns, so that all meet the same machine.

The benchmark listens on a socket of the file system; each process connects, says which side it is on, and
makes no step before it is asked for some. Between turns it waits, and costs nothing.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TURN_SECONDS = 120.0
"""Limit of one turn."""


@dataclass(frozen=True, slots=True)
class Report:
    """A process's answer to one turn.

    Attributes:
        seconds: Of each step, from its begin to the begin of the next one.
        figures: Of what the process looked at in the end; empty where it was not asked to.
    """

    seconds: list[float]
    figures: dict[str, float] = field(default_factory=dict)


class Player:
    """One process of a side."""

    def __init__(self, path: str, side: str, look: Callable[[], dict[str, float]]) -> None:
        """Connect.

        Args:
            path: Of the socket.
            side: Name of the set that this process belongs to.
            look: Returns the figures to report at the end of a turn.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(path)
            self._stream = connection.makefile("rw")
        self._look = look
        self._wanted, self._looks = 0, False
        self._seconds: list[float] = []
        self._began = 0.0
        self._say({"side": side})
        self._wait()

    def step_ended(self) -> None:
        """Take the time of the step that has ended; at the end of a turn, report and wait for the next."""
        now = time.perf_counter()
        self._seconds.append(now - self._began)
        self._began = now
        if len(self._seconds) == self._wanted:
            self._say({"seconds": self._seconds, "figures": self._look() if self._looks else {}})
            self._wait()

    def close(self) -> None:
        """Leave: the next turn of this side fails."""
        self._stream.close()

    def _say(self, message: dict[str, Any]) -> None:
        self._stream.write(json.dumps(message) + "\n")
        self._stream.flush()

    def _wait(self) -> None:
        line = self._stream.readline()
        if not line:
            raise SystemExit(0)  # the benchmark has ended
        asked = json.loads(line)
        self._wanted, self._looks, self._seconds = asked["steps"], asked["look"], []
        self._began = time.perf_counter()


class Turns:
    """The benchmark's end: knows all processes by side."""

    def __init__(self, path: Path) -> None:
        """Listen.

        Args:
            path: Of the socket; it must not exist.
        """
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        self._sides: dict[str, list[Any]] = {}

    def until_there(self, side: str, count: int, seconds: float, check: Callable[[], object]) -> None:
        """Wait until all processes of a side have connected.

        Args:
            side: Its name.
            count: Processes that it has.
            seconds: To wait, at most.
            check: Called again and again; raises when they cannot come any more.

        Raises:
            TimeoutError: Some did not come.
        """
        deadline = time.monotonic() + seconds
        self._server.settimeout(0.2)
        while len(self._sides.get(side, ())) < count:
            check()
            if time.monotonic() > deadline:
                there = len(self._sides.get(side, ()))
                raise TimeoutError(f"{there} of {count} processes of {side} came within {seconds:g} s")
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            connection.settimeout(TURN_SECONDS)
            with connection:
                stream = connection.makefile("rw")
            self._sides.setdefault(json.loads(stream.readline())["side"], []).append(stream)

    def take(self, side: str, steps: int, look: bool = False) -> list[Report]:
        """Have a side make steps, and return what its processes report.

        Args:
            side: Its name.
            steps: Of each process.
            look: Whether figures are wanted, too.

        Raises:
            RuntimeError: A process has ended, or does not answer in time.
        """
        reports = []
        try:
            for stream in self._sides[side]:
                stream.write(json.dumps({"steps": steps, "look": look}) + "\n")
                stream.flush()
            for stream in self._sides[side]:
                reports.append(Report(**json.loads(stream.readline())))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"a process of {side} ended, or made no {steps} steps: {error}") from None
        return reports

    def close(self) -> None:
        """Let all processes go: those that wait for a turn end."""
        self._server.close()
        for streams in self._sides.values():
            for stream in streams:
                stream.close()


def slowest(reports: Sequence[Report]) -> list[float]:
    """Return the seconds of each step of a turn but the first, of the process that took longest. PURE.

    The first step of a turn waits for nothing that the step before it left under way.
    """
    return [max(seconds) for seconds in zip(*(report.seconds for report in reports), strict=True)][1:]
