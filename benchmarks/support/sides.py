"""Start jobs of ours and their peers side by side on one machine, and let them make steps by turns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.peers.torchrun import stop
from benchmarks.support.ports import free_port
from benchmarks.support.turns import Report, Turns, slowest
from benchmarks.support.zygote import Zygote

READY_SECONDS = 180.0
"""Limit for the processes of one side to come."""
RANK, PORT = "BENCHMARK_RANK", "BENCHMARK_PORT"
"""Variables of a forked process: its rank, and the port on which rank 0 is found."""
_ROOT = Path(__file__).resolve().parents[2]


class RunningJob(Protocol):
    """The processes of one side."""

    def check(self) -> None:
        """Raise RuntimeError when one of them has ended."""
        ...

    def close(self) -> None:
        """End them."""
        ...


class Command:
    """A side whose processes a module starts by itself."""

    def __init__(self, folder: Path, name: str, command: Sequence[str]) -> None:
        """Start it.

        Args:
            folder: For its log.
            name: Of the side.
            command: Module and arguments.
        """
        self._name, self._log = name, folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Raise RuntimeError when it has ended."""
        if (code := self._process.poll()) is not None:
            text = self._log.read_text().strip()
            raise RuntimeError(f"{self._name} ended with {code}: {text[-300:]}")

    def close(self) -> None:
        """End it."""
        stop([self._process])


class Forked:
    """A side whose processes find each other by themselves, forked from one that has imported torch."""

    def __init__(self, folder: Path, workers: int, zygote: Zygote, environment: Mapping[str, str]) -> None:
        """Start them.

        Args:
            folder: For their logs, with the side's name; it is made.
            workers: How many.
            zygote: That they are forked from.
            environment: Of them all; each gets RANK and PORT, too.
        """
        folder.mkdir()
        port = str(free_port())
        self._name = folder.name
        self._logs: dict[int, Path] = {}
        for rank in range(workers):
            log = folder / f"{rank}.log"
            pid = zygote.fork({**environment, RANK: str(rank), PORT: port}, log)
            self._logs[pid] = log

    def check(self) -> None:
        """Raise RuntimeError with the last words of one that has ended."""
        for pid, log in self._logs.items():
            if not Path(f"/proc/{pid}").exists():
                raise RuntimeError(f"a process of {self._name} ended: {log.read_text().strip()[-300:]}")

    def close(self) -> None:
        """End them."""
        for pid in self._logs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Turn:
    """The sizes of turns.

    Attributes:
        warm_up: Steps of the first one of each side, which do not count.
        steps: Of each later one, besides its first step, which does not count.
        rounds: Later turns of each side.
    """

    warm_up: int
    steps: int
    rounds: int


@dataclass(slots=True)
class Side:
    """The observations of one side.

    Attributes:
        turns: Seconds of each step that counts, by turn.
        first: Figures of each process after its first turn.
        last: Figures of each after its last one.
    """

    turns: list[list[float]] = field(default_factory=list)
    first: list[dict[str, float]] = field(default_factory=list)
    last: list[dict[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Return the seconds of each step that counts."""
        return [seconds for turn in self.turns for seconds in turn]


def ratios_by_turns(side: Side, other: Side) -> list[float]:
    """Return the time of one side's steps over that of the other's, by pair of turns. PURE.

    The machine is as noisy for both of a pair, which follow each other; it is not for two medians.

    Args:
        side: Its turns, as many as the other has.
        other: The other one.
    """
    pairs = zip(side.turns, other.turns, strict=True)
    return [sum(own) / sum(others) for own, others in pairs]


@contextlib.contextmanager
def running(
    folder: Path,
    workers: int,
    jobs: Mapping[str, Callable[[], RunningJob]],
    peers: Mapping[str, Callable[[], RunningJob]],
) -> Iterator[tuple[Turns, dict[str, str]]]:
    """Start all sides; yield their turns, and by peer the reason why it does not run ("": it does).

    Args:
        folder: For the socket `turns`, to which their processes connect.
        workers: Processes of each side.
        jobs: Each starts one of ours.
        peers: Each starts one of the others.

    Raises:
        RuntimeError: A job of ours ends.
        TimeoutError: Processes of ours do not come.
    """
    turns, reasons = Turns(folder / "turns"), dict.fromkeys(peers, "")
    others: dict[str, RunningJob] = {}
    started: list[Future[RunningJob]] = []
    try:
        for name, start in peers.items():
            others[name] = start()
        with ThreadPoolExecutor(len(jobs)) as pool:
            started += [pool.submit(start) for start in jobs.values()]
        for one, name in zip(started, jobs, strict=True):
            turns.until_there(name, workers, READY_SECONDS, one.result().check)
        for name, other in others.items():
            try:
                turns.until_there(name, workers, READY_SECONDS, other.check)
            except (RuntimeError, TimeoutError) as error:
                reasons[name] = str(error)
        yield turns, reasons
    finally:
        turns.close()
        for one in started:
            if one.exception() is None:
                one.result().close()
        for other in others.values():
            other.close()


def by_turns(
    take: Callable[[str, int, bool], list[Report]],
    names: Collection[str],
    reasons: dict[str, str],
    turn: Turn,
) -> dict[str, Side]:
    """Have all sides make steps, a few each in a row, in another order each time.

    Args:
        take: As `Turns.take`.
        names: Of all sides.
        reasons: By peer; it is left out when one is given for it. Where it fails, one is noted.
        turn: How many.

    Returns:
        The observations by side.

    Raises:
        RuntimeError: A side of ours fails.
    """
    sides = {name: Side() for name in names}

    def play(name: str, steps: int, look: bool) -> list[Report]:
        if reasons.get(name):
            return []
        try:
            return take(name, steps, look)
        except RuntimeError as error:
            if name not in reasons:
                raise
            reasons[name] = str(error)
            return []

    for name, side in sides.items():
        side.first = [report.figures for report in play(name, turn.warm_up, True)]
    order = list(sides)
    for number in range(turn.rounds):
        at = number % len(order)
        for name in order[at:] + order[:at]:
            reports = play(name, 1 + turn.steps, number == turn.rounds - 1)
            sides[name].turns.append(slowest(reports))
            sides[name].last = [report.figures for report in reports]
    return sides
