"""How long training stands still when a worker or the coordinator goes, and when a worker comes or leaves.

    python -m benchmarks.recovery [--quick] [--json FILE]

Three workers train a model of 26 MB on loopback. A gap is the longest time between two consecutive commits,
from the last one before the event to the first of the generation that it caused (of a coordinator that
dies: over the three seconds after). `heartbeat_limit_seconds` is how long after its last sign of life a
worker that hangs counts as lost, at most. Workers are forked from a process that has imported torch, as a
standby would have. `false_losses` is how many workers were taken for lost in FALSE_SECONDS in which none was,
while BUSY_LOOPS processes kept all cores busy.

The peers train the same model. torchrun (2 to 3 agents, one worker process killed, DDP) is cut at 60 s and
counted as 60 (10 with --quick). torchft (three replica groups of one process on gloo, one killed, one
stopped) is given its best join timeout of 0.1, 1 and 10 s for each kind of event.
`kill_ratio_to_torchft` compares gaps beyond one undisturbed step of the same run, `hang_ratio_to_torchft`
whole gaps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.support import phases
from benchmarks.support.zygote import Zygote

WORKERS = 3
WIDTH, DEPTH, BATCH = 1280, 4, 96
KINDS = ("kill_worker", "hang_worker", "leave", "join", "kill_coordinator")
QUIET_SECONDS = 3.0
CALM_STEPS = 10
"""Steps that tell how long one takes."""
LEARNED_SECONDS = 2.0
"""Seconds that workers train before one is stopped: the coordinator learns their heartbeats within 1.5 s."""
FALSE_SECONDS, BUSY_LOOPS = 60.0, 4
QUICK_CUT_SECONDS = 10.0
TOKEN = "benchmark"


def build() -> Any:
    """DEPTH square layers: 26 MB of float32."""
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 10))


# ---- our workers


def train() -> None:
    """The script of a worker, until it is killed."""
    import torch
    from torch.nn import functional as F

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)
    x, y = torch.randn(4096, WIDTH), torch.randint(10, (4096,))
    for inputs, labels in springtide.batches((x, y), batch_size=BATCH, epochs=10_000, seed=0):
        with springtide.step():
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


def zygote(script: Callable[[], None]) -> None:
    """Fork a worker, which runs the script, for each line of JSON (its environment and log); answer with its
    process id.
    """
    import torch
    import torch._dynamo  # the first optimizer of a process would import it

    import springtide  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.environ |= request["environment"]
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            script()
            raise SystemExit(0)
        print(pid, flush=True)


class Job:
    """One job: its coordinator, its workers, and the operator's part."""

    script = "benchmarks.recovery"
    """A module that with --zygote calls `zygote`."""

    def __init__(
        self,
        folder: Path,
        workers: int = WORKERS,
        environment: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: for logs and state.
            workers: how many.
            environment: of the workers, besides their own.
            zygote: that workers are forked from; None: one of its own.
        """
        from springtide_demo.commits import History

        self._folder = folder
        self.workers = workers
        self.standby = 0  # processes that wait beyond them
        self._environment = dict(environment or {})
        self._host = f"127.{random.randrange(20, 250)}.{random.randrange(250)}"
        self.history = History()
        self.reply: Any = None
        self.pids: dict[str, int] = {}
        self._numbers = itertools.count()
        self._offsets: dict[str, int] = {}
        self._closing = threading.Event()
        self._zygote, self._owns_zygote = zygote or Zygote(self.script), zygote is None
        self._coordinator = self._start_coordinator()
        for _ in range(workers):
            self.add()
        self._operator = threading.Thread(target=self._sync_for_ever, daemon=True)
        self._operator.start()

    def add(self, **environment: str) -> str:
        """Start a worker in a new pod, with more of an environment; return its name."""
        number = next(self._numbers)
        name = f"worker-{number}"
        environment = {
            **environment,
            "SPRINGTIDE_JOB": "recovery",
            "SPRINGTIDE_COORDINATOR": f"{self._host}.1:7070",
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_POD_NAME": name,
            "SPRINGTIDE_POD_UID": name,
            "SPRINGTIDE_POD_IP": f"{self._host}.{10 + number % 240}",
            "SPRINGTIDE_BIND": f"{self._host}.{10 + number % 240}",
            "SPRINGTIDE_SLOT": str(number),
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_STEP_LOG": str(self._folder / f"{name}.steps"),
            "SPRINGTIDE_TERMINATION_LOG": str(self._folder / f"{name}.end"),
            **self._environment,
        }
        self.pids[name] = self._zygote.fork(environment, self._folder / f"{name}.log")
        return name

    def signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def bury(self, name: str) -> None:
        """Wait until the process is gone, and tell the coordinator from then on."""
        pid = self.pids[name]
        self.until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")
        del self.pids[name]

    def kill_coordinator(self) -> None:
        self._coordinator.kill()
        self._coordinator.wait()
        self._coordinator = self._start_coordinator()

    def read(self) -> None:
        """Take in what the workers have committed."""
        from springtide_demo.commits import parse_line

        for path in self._folder.glob("*.steps"):
            with path.open() as file:
                file.seek(self._offsets.get(path.stem, 0))
                lines = file.readlines()
                whole = [line for line in lines if line.endswith("\n")]
                self._offsets[path.stem] = self._offsets.get(path.stem, 0) + sum(map(len, whole))
            self.history.add(parse_line(line, path.stem) for line in whole)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Raise TimeoutError with what was waited for, and the coordinator's last words."""
        deadline = time.monotonic() + seconds
        while True:
            self.read()
            if condition():
                return
            if time.monotonic() > deadline:
                log = (self._folder / "coordinator.log").read_text()[-1500:]
                raise TimeoutError(f"waited {seconds:g} s for {what}\n{log}")
            time.sleep(0.02)

    def until_calm(self, seconds: float = 0.0) -> None:
        """Wait until all workers have committed in one generation for ten steps, and for so many seconds."""
        began: dict[Any, float] = {}

        def calm() -> bool:
            last = self.history.curve()[-10:]
            if not last or len(self.history.active()) != self.workers:
                return False
            since = began.setdefault(last[-1].generation, time.monotonic())
            same = len({commit.generation for commit in last}) == 1
            return len(last) == 10 and same and time.monotonic() - since > seconds

        self.until(calm, "ten steps by all workers")

    def check(self) -> None:
        """Raise RuntimeError with a worker's last words when one has ended."""
        for name, pid in self.pids.items():
            if not Path(f"/proc/{pid}").exists():
                raise RuntimeError(f"{name} ended: {(self._folder / f'{name}.log').read_text()[-500:]}")

    def tally(self) -> Tally:
        """Return the steps dropped so far, by the workers' logs, and the ledger's repeated and lost
        samples.
        """
        logs = [path.read_text() for path in self._folder.glob("worker-*.log")]
        dropped = {step for text in logs for step in _DROPPED.findall(text)}
        data = self.reply.data
        return len(dropped), int(data.repeated), int(data.lost)

    def close(self) -> None:
        self._closing.set()
        self._operator.join(5)
        for name in self.pids:
            self.signal(name, signal.SIGKILL)
        self._coordinator.kill()
        self._coordinator.wait()
        if self._owns_zygote:
            self._zygote.close()

    def _start_coordinator(self) -> subprocess.Popen[bytes]:
        state = self._folder / "coordinator"
        state.mkdir(exist_ok=True)
        environment = os.environ | {
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_INCARNATION": "1",
            "SPRINGTIDE_STATE_DIR": str(state),
            "SPRINGTIDE_BIND": f"{self._host}.1",
            "SPRINGTIDE_PORT": "7070",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_TARGET": str(self.workers),
            "SPRINGTIDE_MINIMUM": "1",
            "SPRINGTIDE_MAXIMUM": str(self.workers + 1),
            **self.of_coordinator(),
        }
        command = [sys.executable, "-m", "springtide_coordinator"]
        with (self._folder / "coordinator.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _sync_for_ever(self) -> None:
        import grpc

        from springtide_protocol import coordinator_pb2_grpc as pb_grpc

        metadata = (("authorization", f"Bearer {TOKEN}"),)
        while not self._closing.is_set():
            with grpc.insecure_channel(f"{self._host}.1:7070") as channel:
                stub = pb_grpc.CoordinatorStub(channel)
                with contextlib.suppress(grpc.RpcError):
                    while not self._closing.wait(self.pause()):
                        self.reply = stub.Sync(self.request(), metadata=metadata, timeout=1.0)
            self._closing.wait(0.1)

    def pause(self) -> float:
        """Return the seconds until the operator looks at the job again: soon, since events would wake it."""
        return 0.1

    def request(self) -> Any:
        """Return the sync request that the operator would send."""
        from springtide_protocol import coordinator_pb2 as pb

        living = [pb.Pod(uid=name, name=name, started=True) for name in list(self.pids)]
        return pb.SyncRequest(
            target=self.workers,
            minimum=1,
            maximum=self.workers + 1,
            living=living,
            observed=True,
            standby=self.standby,
        )

    def of_coordinator(self) -> dict[str, str]:
        """More of the coordinator's environment."""
        return {}


Tally = tuple[int, int, int]  # steps that somebody dropped, samples repeated, samples lost
_DROPPED = re.compile(r"step (\d+) is dropped")


def strike(
    job: Job, kind: str, chooser: random.Random, point: float | None = None
) -> dict[str, tuple[float, Tally]]:
    """One event: its gap (and, where a worker is replaced, the joiner's) in seconds, and the tally then.

    Args:
        job: it happens to it.
        kind: of the event.
        chooser: of the worker, and of the point where that is not given.
        point: of a step, in [0, 1), at which it comes.
    """
    from springtide_demo.gaps import gap_after

    job.until_calm(LEARNED_SECONDS if kind == "hang_worker" else 0.0)
    victim = chooser.choice(sorted(job.history.active()))
    recent = job.history.curve()[-CALM_STEPS:]
    step = statistics.median(commit.step_seconds for commit in recent)
    wanted = chooser.random() if point is None else point
    time.sleep(phases.pause(wanted, recent[-1].unix_time, step, time.time()))
    job.read()
    before = job.history.newest()
    assert before is not None
    generation = before.generation
    at = time.time()

    def caused() -> bool:
        newest = job.history.newest()
        return newest is not None and newest.generation > generation

    if kind == "kill_coordinator":
        job.kill_coordinator()
        job.until(lambda: time.time() > at + QUIET_SECONDS, "three seconds without a coordinator")
        times = [
            commit.unix_time for commit in job.history.recent(QUIET_SECONDS + 2) if commit.unix_time > at - 1
        ]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return {kind: (max(gaps), job.tally())}
    job.signal(
        victim, {"kill_worker": signal.SIGKILL, "hang_worker": signal.SIGSTOP}.get(kind, signal.SIGTERM)
    )
    job.until(caused, f"a generation without {victim}")
    result = {kind: (gap_after(job.history.curve(), at, float("inf")).seconds, job.tally())}
    after = job.history.newest()
    assert after is not None
    generation = after.generation
    if kind == "hang_worker":
        job.signal(victim, signal.SIGCONT)
    else:
        job.bury(victim)
        job.add()
    job.until(caused, "the generation with a joiner")
    curve = job.history.curve()
    first = next(i for i, commit in enumerate(curve) if commit.generation > generation)
    if kind != "hang_worker":
        result["join"] = curve[first].unix_time - curve[first - 1].unix_time, job.tally()
    return result


def measure_ours(repeats: int, hangs: int, kills: int) -> tuple[dict[str, Any], float | None]:
    """Train, and disturb it.

    Args:
        repeats: leaving workers, and killed coordinators.
        hangs: workers that are stopped.
        kills: workers that are killed.

    Returns:
        The figures of each kind, and the median step in seconds. Nothing is tried after an event that does
        not end.
    """
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    counts = {kind: [0, 0, 0] for kind in KINDS}
    reason, step = "", None
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        try:
            before: Tally = (0, 0, 0)
            chooser = random.Random(0)
            events = {
                "kill_worker": kills,
                "hang_worker": hangs,
                "leave": repeats,
                "kill_coordinator": repeats,
            }
            for kind, count in events.items():
                for point in phases.spread(count, chooser):
                    for name, (seconds, after) in strike(job, kind, chooser, point).items():
                        seen[name].append(seconds)
                        for at in range(3):
                            counts[name][at] += after[at] - before[at]
                        before = after
                print(kind, figures(seen[kind], counts[kind]), flush=True)
            print("join", figures(seen["join"], counts["join"]), flush=True)
            job.until_calm()
            job.until(lambda: job.reply is not None and job.reply.data.total_seen > 0, "the ledger")
            for at in (1, 2):  # what the ledger found later belongs to the last event
                counts["kill_coordinator"][at] += job.tally()[at] - before[at]
        except TimeoutError as error:
            reason = str(error)
            print(f"cut short: {reason}", flush=True)
        finally:
            job.close()
        if curve := job.history.curve():
            step = statistics.median(commit.step_seconds for commit in curve)
    return {kind: figures(seen[kind], counts[kind], reason) for kind in KINDS}, step


def figures(seconds: list[float], counts: list[int], reason: str = "") -> dict[str, Any]:
    """Return the figures of one kind of disturbance.

    Args:
        seconds: the gaps measured.
        counts: steps redone, samples repeated, samples lost.
        reason: why there are no more repeats.
    """
    names = "gap_seconds_p50", "gap_seconds_max", "steps_redone", "samples_repeated", "samples_lost"
    values = (statistics.median(seconds), max(seconds), *counts) if seconds else (None,) * len(names)
    result: dict[str, Any] = dict(zip(names, values, strict=True)) | {"repeats": len(seconds)}
    return result | ({"reason": reason} if reason else {})


def measure_false_losses(seconds: float) -> tuple[int | None, str]:
    """Train while all cores are busy with something else.

    Args:
        seconds: of training.

    Returns:
        How often the job went on without a worker that was alive, and why that is not known; "": it is.
    """
    loops: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        try:
            job.until_calm()
            job.until(lambda: job.reply is not None, "an answer of the coordinator")
            before, end = job.reply.recoveries, time.monotonic() + seconds
            loops += [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
            job.until(lambda: time.monotonic() > end, "the end of the busy loops", 2 * seconds)
            job.check()
            return false_losses(before, job.reply.failures), ""
        except (TimeoutError, RuntimeError) as error:
            return None, str(error)
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
            job.close()


def false_losses(before: int, failures: Iterable[Any]) -> int:
    """Return how many losses came later. PURE.

    Args:
        before: recoveries until then.
        failures: the coordinator's newest recoveries from losses.
    """
    return sum(recovery.number > before for recovery in failures)


def report(
    ours: dict[str, Any], step: float | None, torchrun: dict[str, Any], torchft: dict[str, Any]
) -> dict[str, Any]:
    """Return what is written, but for false losses. PURE.

    Args:
        ours: figures by kind.
        step: median of ours, in seconds.
        torchrun: figures of a kill.
        torchft: as its module has them.
    """
    gap, theirs = ours["kill_worker"]["gap_seconds_p50"], torchrun["gap_seconds_p50"]
    from springtide_protocol.heartbeat import LIMIT as HEARTBEAT_LIMIT

    measured = any(torchft[kind]["gap_seconds_p50"] is not None for kind in ("kill_worker", "hang_worker"))

    def gaps(kind: str) -> tuple[float | None, float | None]:
        return ours[kind]["gap_seconds_p50"], torchft[kind]["gap_seconds_p50"]

    killed = [
        beyond_a_step(seconds, own)
        for seconds, own in zip(
            gaps("kill_worker"), (step, torchft["kill_worker"]["step_seconds"]), strict=True
        )
    ]
    return {
        "springtide": ours,
        "hang_worker": ours["hang_worker"],
        "heartbeat_limit_seconds": HEARTBEAT_LIMIT,
        "median_step_seconds": step,
        "torchrun": {"kill_worker": torchrun},
        **({"torchft": torchft} if measured else {"torchft": None, "torchft_reason": torchft["reason"]}),
        "ratio_to_torchrun": ratio(gap, theirs),
        "kill_ratio_to_torchft": ratio(*killed),
        "hang_ratio_to_torchft": ratio(*gaps("hang_worker")),
    }


def beyond_a_step(seconds: float | None, step: float | None) -> float | None:
    """Return by how much a gap is longer than a step; None if one of them is not known. PURE."""
    return None if seconds is None or step is None else max(0.0, seconds - step)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return ours over theirs; None where it says nothing. PURE."""
    return None if ours is None or not theirs else ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        zygote(train)
        return
    from benchmarks.peers import torchft as torchft_peer
    from benchmarks.peers.torchrun import CUT_SECONDS, measure_torchrun

    quick = arguments.quick
    ours, step = measure_ours(1 if quick else 20, hangs=2 if quick else 20, kills=4 if quick else 20)
    torchft = torchft_peer.measure(torchft_peer.QUICK_TRIES if quick else torchft_peer.TRIES)
    torchrun = measure_torchrun(1 if quick else 3, QUICK_CUT_SECONDS if quick else CUT_SECONDS)
    result = report(ours, step, torchrun, torchft)
    losses, reason = measure_false_losses(FALSE_SECONDS)
    result["false_losses"] = losses
    if reason:
        result["false_losses_reason"] = reason
    print(f"median step {step} s; torchrun {torchrun}")
    for key in ("ratio_to_torchrun", "kill_ratio_to_torchft", "hang_ratio_to_torchft", "false_losses"):
        print(key, result[key], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
