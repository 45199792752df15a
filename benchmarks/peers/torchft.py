"""The peer of benchmarks.recovery, salvage and uneven: torchft, three replica groups of one process.

    python -m benchmarks.peers.torchft --zygote         forks a replica for each line of its input
    python -m benchmarks.peers.torchft --turns SOCKET   three replicas that make steps by turns

A lighthouse, and in each process a manager, DistributedDataParallel of torchft on gloo and its optimizer, as
its own examples have it. The lighthouse's limit for heartbeats is its default, 5 s, and so is that of a
collective here, whose default of 60 s would have everybody wait that long for a process that hangs. It is
installed with the extra `peers`; without it there are reasons instead of figures.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support import phases
from benchmarks.support.zygote import Zygote

WORKERS = 3
QUICK_TRIES = {
    0.1: {"kill_worker": 3, "hang_worker": 3},
    1.0: {"kill_worker": 1},
    10.0: {"kill_worker": 1},
}
TRIES = {
    0.1: {"kill_worker": 9, "hang_worker": 9},
    1.0: {"kill_worker": 5, "hang_worker": 5},
    10.0: {"kill_worker": 3, "hang_worker": 3},
}
"""Events by join timeout and kind: for so many seconds a lighthouse waits for processes that are alive but
have not asked for a quorum. Most are with the shortest one, which is the fastest after both kinds. Gaps have
two values: of twelve replicas that were stopped, three cost 0.2 to 0.3 s and the others 5.2 s.
"""
FEWEST = 3
"""Events whose median may be the best one."""
FORGET_SECONDS = 5.5
"""Time between two events. A lighthouse counts a replica that is gone for 5 s, and goes on with more than
half of those that it counts: two events within that time would cost it the rest of it.
"""
LIMIT_SECONDS = 5.0
"""How long a collective may take."""
CUT_SECONDS = 30.0
"""Longest wait for a step after an event, in seconds; the gap of an event without one."""
CALM_STEPS = 6
"""Steps of all before an event."""
CALM_SECONDS = 60.0
"""Longest wait for those."""
MISSING = "torchft is not installed: pip install 'springtide[peers]'"
_LIGHTHOUSE, _STEPS, _NAME = "BENCHMARK_LIGHTHOUSE", "BENCHMARK_STEPS", "BENCHMARK_REPLICA"
_HOLD = "BENCHMARK_HOLD"
"""Seconds that a step takes at least before its backward; unset: none."""


class Step(NamedTuple):
    """A committed step, as one replica saw it.

    Attributes:
        unix_time: When it was over.
        number: Its own.
        members: Replicas that took part.
    """

    unix_time: float
    number: int
    members: int


# ---- a replica


def start(module: Any, lighthouse: str, name: str) -> tuple[Any, Any, Callable[[], tuple[int, int]]]:
    """Join the other replicas with a model.

    Args:
        module: The model.
        lighthouse: Address of the lighthouse.
        name: Of this replica, with its number at the end.

    Returns:
        The model and its optimizer as torchft wraps them, and what says (committed steps, members).
    """
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    distributed: Any = torch.distributed
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    limit = timedelta(seconds=LIMIT_SECONDS)

    def load(state: Mapping[str, Any]) -> None:
        module.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=1,
        timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
    )

    def made() -> tuple[int, int]:
        held = store  # its server lives as long as this does
        return manager.current_step(), manager.num_participants() if held else 0

    return DistributedDataParallel(manager, module), Optimizer(manager, plain), made


def train() -> None:
    """Train until killed; append a line for each committed step."""
    import torch
    from torch.nn import functional as F

    from benchmarks.recovery import BATCH, WIDTH, build

    torch.set_num_threads(1)
    model, optimizer, made = start(build(), os.environ[_LIGHTHOUSE], os.environ[_NAME])
    part, committed, hold = BATCH // WORKERS, 0, float(os.environ.get(_HOLD, "0"))
    with open(os.environ[_STEPS], "a", buffering=1) as log:
        while True:
            x, y = torch.randn(part, WIDTH), torch.randint(10, (part,))
            optimizer.zero_grad()
            time.sleep(hold)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            number, members = made()
            if number > committed:
                log.write(f"{time.time()} {number} {members}\n")
            committed = number


def train_by_turns(rank: int, path: str, lighthouse: str) -> None:
    """Make steps as the benchmark asks for them.

    Args:
        rank: Of this process.
        path: Of the socket of turns.
        lighthouse: Its address.

    Raises:
        RuntimeError: Others are missing in a step that counts.
    """
    import torch
    from torch.nn import functional as F

    from benchmarks.support.turns import Player
    from benchmarks.uneven import BATCH, TORCHFT, WARM_UP, build, hold, samples

    torch.set_num_threads(1)
    model, optimizer, made = start(build()[0], lighthouse, f"replica_{rank}")
    inputs, labels = samples()
    part, at = BATCH // WORKERS, rank * (BATCH // WORKERS)
    player = Player(path, TORCHFT, dict)
    for step in itertools.count(1):
        ids = torch.arange(at, at + part) % len(inputs)
        before, _ = made()
        optimizer.zero_grad()
        began = time.perf_counter()
        loss = F.cross_entropy(model(inputs[ids]), labels[ids])
        hold(began, part, rank, True)
        loss.backward()
        optimizer.step()
        at += BATCH
        now, members = made()
        if step > WARM_UP and (now == before or members != WORKERS):
            raise RuntimeError(f"step {step} has {members} of {WORKERS} replicas, or was not committed")
        player.step_ended()


# ---- replicas


@contextlib.contextmanager
def running_lighthouse(join_timeout: float, log: Path) -> Iterator[str]:
    """Run a lighthouse; yield its address.

    Args:
        join_timeout: In seconds.
        log: For its words.

    Raises:
        FileNotFoundError: It is not installed.
    """
    from benchmarks.support.ports import free_port

    if importlib.util.find_spec("torchft") is None:
        raise FileNotFoundError(MISSING)
    port = free_port()
    command = [
        *(str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"),
        *("--min_replicas", "1", "--join_timeout_ms", str(round(join_timeout * 1000))),
    ]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Replicas:
    """Three replicas that train, each of them a process."""

    def __init__(self, folder: Path, lighthouse: str, zygote: Zygote, hold: float = 0.0) -> None:
        """Start them.

        Args:
            folder: For logs.
            lighthouse: Its address.
            zygote: That they are forked from.
            hold: Seconds that a step takes at least before its backward.
        """
        self._folder, self._lighthouse, self._zygote, self._hold = folder, lighthouse, zygote, hold
        self._pids: dict[str, int] = {}
        self._newest = -1
        for _ in range(WORKERS):
            self.add()

    def add(self) -> None:
        """Start another one."""
        self._newest += 1
        name = f"replica_{self._newest}"
        environment = {
            _LIGHTHOUSE: self._lighthouse,
            _STEPS: str(self._folder / f"{name}.steps"),
            _NAME: name,
            _HOLD: str(self._hold),
        }
        self._pids[name] = self._zygote.fork(environment, self._folder / f"{name}.log")

    def strike(self, number: int) -> float:
        """Send a signal to the newest one; return when, in unix seconds.

        Args:
            number: Of the signal.
        """
        at = time.time()
        os.kill(self._pids[f"replica_{self._newest}"], number)
        return at

    def steps(self) -> list[Step]:
        """Return all that was committed."""
        lines = [
            line.split()
            for path in self._folder.glob("*.steps")
            for line in path.read_text().split("\n")[:-1]
        ]
        return curve(Step(float(at), int(number), int(members)) for at, number, members in lines)

    def until(self, condition: Callable[[list[Step]], bool], what: str, seconds: float) -> list[Step]:
        """Wait; return all steps.

        Args:
            condition: Of all steps.
            what: Is waited for.
            seconds: At most.

        Raises:
            TimeoutError: It does not come.
        """
        deadline = time.monotonic() + seconds
        while not condition(found := self.steps()):
            if time.monotonic() > deadline:
                logs = " ".join(path.read_text()[-300:] for path in self._folder.glob("*.log"))
                raise TimeoutError(f"waited {seconds:g} s for {what} of torchft: {logs[-600:]}")
            time.sleep(0.02)
        return found

    def until_calm(self, seconds: float) -> None:
        """Wait until all make steps; for so many seconds at most. Raise TimeoutError."""

        def calm(steps: list[Step]) -> bool:
            last = steps[-CALM_STEPS:]
            return len(last) == CALM_STEPS and all(step.members == WORKERS for step in last)

        self.until(calm, f"{CALM_STEPS} steps of three replicas", seconds)

    def close(self) -> None:
        """Kill all."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def curve(steps: Iterable[Step]) -> list[Step]:
    """Return each step once, as the first one that ended it saw it, in their order. PURE."""
    first: dict[int, Step] = {}
    for step in sorted(steps, reverse=True):
        first[step.number] = step
    return [first[number] for number in sorted(first)]


def pause(steps: Sequence[Step], at: float) -> float | None:
    """Return the longest time between two steps, up to the second one without the lost replica. PURE.

    In one step without somebody, which was under way, it may have been another replica.

    Args:
        steps: One after the other.
        at: Unix time of the loss.

    Returns:
        Seconds; None if there is no such step yet.
    """
    last = max((index for index, step in enumerate(steps) if step.unix_time <= at), default=None)
    if last is None:
        return None
    without = [index for index in range(last + 1, len(steps)) if steps[index].members < WORKERS]
    if len(without) < 2:
        return None
    times = [step.unix_time for step in steps[last : without[1] + 1]]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


# ---- figures


@dataclass(slots=True)
class Seen:
    """The observations with one join timeout.

    Attributes:
        gaps: In seconds, by kind of event.
        step: Median of undisturbed steps, in seconds.
        reason: Why there is nothing more; "": there is all.
    """

    gaps: dict[str, list[float]] = field(default_factory=dict)
    step: float | None = None
    reason: str = ""


EVENTS = {"kill_worker": signal.SIGKILL, "hang_worker": signal.SIGSTOP}


def observe(
    join_timeout: float,
    tries: Mapping[str, int],
    zygote: Zygote,
    hold: float = 0.0,
    calm_seconds: float = CALM_SECONDS,
) -> Seen:
    """Train, and have a replica killed and another one hang.

    Args:
        join_timeout: In seconds.
        tries: Number of events by kind.
        zygote: That replicas are forked from.
        hold: Seconds that a step takes at least before its backward; events come at any point of that.
        calm_seconds: Longest wait for undisturbed steps before an event.
    """
    seen = Seen()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with running_lighthouse(join_timeout, folder / "lighthouse") as lighthouse:
                replicas = Replicas(folder, lighthouse, zygote, hold)
                try:
                    _observe(replicas, tries, seen, hold, calm_seconds)
                finally:
                    replicas.close()
    except (TimeoutError, RuntimeError, OSError) as error:
        seen.reason = str(error)
    return seen


def _observe(
    replicas: Replicas,
    tries: Mapping[str, int],
    seen: Seen,
    hold: float,
    calm_seconds: float,
) -> None:
    chooser = random.Random(0)
    turns = range(max(tries.values()))
    events = [(kind, EVENTS[kind]) for turn in turns for kind, count in tries.items() if turn < count]
    points = {kind: phases.spread(count, chooser) for kind, count in tries.items()}
    at = float("-inf")
    for number, (kind, event) in enumerate(events):
        if number:
            replicas.add()
        time.sleep(max(0.0, at + FORGET_SECONDS - time.time()))
        replicas.until_calm(calm_seconds)
        if seen.step is None:
            times = [step.unix_time for step in replicas.steps()[-CALM_STEPS:]]
            seen.step = statistics.median(later - earlier for earlier, later in itertools.pairwise(times))
        # With a hold, a step's waiting alone: what it computes is short beside that.
        newest = replicas.steps()[-1].unix_time
        time.sleep(phases.pause(points[kind].pop(), newest, hold or seen.step, time.time()))
        at = replicas.strike(event)
        gap = CUT_SECONDS
        with contextlib.suppress(TimeoutError):
            steps = replicas.until(lambda found, at=at: pause(found, at) is not None, kind, CUT_SECONDS)  # type: ignore[misc]
            gap = pause(steps, at) or CUT_SECONDS
        seen.gaps.setdefault(kind, []).append(gap)
        if event == signal.SIGSTOP:
            replicas.strike(signal.SIGKILL)


def figures(seen: Mapping[float, Seen]) -> dict[str, Any]:
    """Return what is written: of each kind of event the best over join timeouts. PURE.

    A median of fewer than FEWEST gaps is written, but is not the best one where there are others.

    Args:
        seen: By join timeout.
    """
    result: dict[str, Any] = {}
    for kind in EVENTS:
        gaps = {timeout: own.gaps[kind] for timeout, own in seen.items() if own.gaps.get(kind)}
        medians = {timeout: statistics.median(seconds) for timeout, seconds in gaps.items()}
        fewest = min(FEWEST, max(map(len, gaps.values()), default=0))
        enough = [timeout for timeout, seconds in gaps.items() if len(seconds) >= fewest]
        best = min(enough, key=medians.__getitem__, default=None)
        result[kind] = {
            "gap_seconds_p50": None if best is None else medians[best],
            "join_timeout_seconds": best,
            "step_seconds": None if best is None else seen[best].step,
            "by_join_timeout": {f"{timeout:g}": gap for timeout, gap in medians.items()},
        }
    steps = [own.step for own in seen.values() if own.step is not None]
    result["median_step_seconds"] = statistics.median(steps) if steps else None
    reasons = {timeout: own.reason for timeout, own in seen.items() if own.reason}
    if reasons:
        distinct = dict.fromkeys(reasons.values())
        result["reason"] = "; ".join(distinct)
    return result


def measure(tries: Mapping[float, Mapping[str, int]]) -> dict[str, Any]:
    """Return the figures of benchmarks.recovery; null with a reason where there are none.

    Args:
        tries: Number of events by join timeout and kind.
    """
    if importlib.util.find_spec("torchft") is None:
        return figures({timeout: Seen(reason=MISSING) for timeout in tries})
    seen = {}
    with Zygote("benchmarks.peers.torchft") as zygote:
        for timeout, count in tries.items():
            seen[timeout] = observe(timeout, count, zygote)
            print(f"torchft, join timeout {timeout:g} s: {seen[timeout]}", flush=True)
    return figures(seen)


def measure_kills(tries: int, hold: float, calm_seconds: float = CALM_SECONDS) -> Seen:
    """Return the observations of kills in long steps, with a join timeout of 0.1 s, the quickest one.

    Args:
        tries: Kills.
        hold: Seconds that a step takes at least before its backward.
        calm_seconds: Longest wait for undisturbed steps before a kill.
    """
    if importlib.util.find_spec("torchft") is None:
        return Seen(reason=MISSING)
    with Zygote("benchmarks.peers.torchft") as zygote:
        return observe(0.1, {"kill_worker": tries}, zygote, hold, calm_seconds)


# ---- processes


def fork_all(path: str) -> None:
    """Fork the replicas of a side, and wait for their end.

    Args:
        path: Of the socket of turns.
    """
    with tempfile.TemporaryDirectory() as name, running_lighthouse(1.0, Path(name) / "log") as lighthouse:
        import torchft  # noqa: F401

        pids = []
        for rank in range(WORKERS):
            pid = os.fork()
            if pid == 0:
                train_by_turns(rank, path, lighthouse)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        raise SystemExit(max(map(abs, codes)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", metavar="SOCKET", help="make steps by turns")
    parser.add_argument("--zygote", action="store_true", help="fork replicas")
    arguments = parser.parse_args()
    if arguments.turns:
        fork_all(arguments.turns)
    elif arguments.zygote:
        import torchft  # noqa: F401

        from benchmarks.recovery import zygote

        zygote(train)


if __name__ == "__main__":
    main()
