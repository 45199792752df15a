"""One job with many processes: what a change of its members costs the coordinator.

    python -m benchmarks.coordinator_scale [--quick] [--json FILE] [--sizes 64,128]

The coordinator is the real process, and each member has a connection and a session of its own; many members
share a client process, and none of them has torch. A member says what a worker says: Hello, Parked, the
entries by which torch's gloo forms its group (gloo's own has 154 + 8 N bytes, as torch 2.13 writes it), and
Formed.

* `cpu_seconds_per_change`: by number of members, processor seconds (user and system) of the coordinator for
  one change, from the join or the kill of a member until all others have formed the next generation: the
  mean of joins and kills. `cpu_seconds_by_kind` has both.
* `growth_256_to_512`: how many times as much it costs at 512 members as at 256.
* `idle_cpu_fraction`: the coordinator's share of a core at the greatest number of members while nobody says
  anything and only the heartbeat goes on.
* `of_8000`: 1,000 pods of 8 processes, which no machine here can hold. `state_machine_seconds` are those of a
  join in the state machine alone, run with 8,000 members. `calculated_seconds` are those of the whole
  coordinator, by the line and the square through the figures at 256 and 512. `store_bytes` are those of the
  addresses that gloo's full mesh tells, and `store_limit` those that the coordinator keeps.
* `training_cpu_fraction`: the same while each member reports its times as workers do, rank 0 its commits ten
  times a second, and the operator asks once a second.

A size for which this machine has too few descriptors, or at which no generation forms, is null, and `reasons`
says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from springtide_coordinator.membership import Connected, Membership, Received, decide, take_in
from springtide_coordinator.membership import messages as say
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.heartbeat import LIMIT
from springtide_protocol.limits import MAX_STORE_BYTES
from springtide_protocol.lobby import raise_descriptor_limit
from springtide_protocol.names import Incarnation, StateName
from springtide_protocol.session_client import BACKOFF_FIRST, BACKOFF_LAST
from springtide_protocol.store_entries import unpack
from springtide_protocol.versions import OWN

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
SIZES = (64, 128, 256, 512)
LARGEST = 8000  # 1,000 pods of 8 processes
TOKEN = "scale"
CLIENTS = 2  # processes
CHANGES_HEARTBEAT = 20.0  # s
FORMATION_SECONDS = 40.0
SPARE_DESCRIPTORS = 256  # beyond one for each connection
JOIN_PAUSE_SECONDS = 0.005
TIMES_SECONDS = 1.0  # between two reports of a worker's times
SETTLE_SECONDS = 0.5  # until the last words of a change are taken in
FAMILIES = ("place", "listener", "0", "loops")
"""Kinds of entries that the members of a generation make for each other in the store; a key is one of these
and a rank.
"""
STEPS = (("place",), ("listener", "0"), ("loops",))
"""Which of them are awaited before the next ones are told."""


def gloo_value(member: int, size: int) -> bytes:
    """Return what torch's gloo writes for one member: its address, and a number for each connection.

    Args:
        member: of which the address differs from all others'.
        size: of the group.
    """
    address = b"\x02\x00" + (20000 + member).to_bytes(2, "big") + b"\x0a" + member.to_bytes(3, "big")
    head = (2).to_bytes(8, "little") + b"\x76\x6d\x88" + bytes(5) + address + bytes(120)
    head += os.urandom(6)
    numbers = b"".join(number.to_bytes(8, "little") for number in range(size))
    return head[:154].ljust(154, b"\xff") + numbers


# ---- the members' processes


@functools.lru_cache(64)
def keys_in(packed: bytes) -> tuple[str, ...]:
    """Return the keys of some entries. All members of this process get the same bytes: real ones do not share
    a processor, and what they do is not what is measured.
    """
    return tuple(key for key, _ in unpack(packed))


class Member:
    """One session that does what a worker does when a generation is made."""

    def __init__(self, number: int, address: str, heartbeat: float, formed: asyncio.Queue[int]) -> None:
        """Begin to connect.

        Args:
            number: of the member, from 0.
            address: of the coordinator, host:port.
            heartbeat: limit, in seconds.
            formed: gets the number of each generation that it has formed.
        """
        self._number, self._formed, self._options = number, formed, client_options(heartbeat)
        self._name = f"{number:032x}"
        self._address = address
        self._channel: Any = None
        self._call: Any = None
        self._welcomed = self._ending = False
        self._start: pb.Start | None = None
        self._rank = 0
        self._step = len(STEPS)
        self._seen: dict[str, set[str]] = {}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Connect until welcomed, as a worker does, and serve the stream. Raise RuntimeError if it breaks."""
        pause = BACKOFF_FIRST
        while True:
            self._channel = grpc.aio.insecure_channel(self._address, options=self._options)
            try:
                await self._session()
            except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
                if self._ending:
                    raise
                if isinstance(error, asyncio.CancelledError):  # so grpc says that the server cancels
                    raise RuntimeError(f"member {self._number}: its stream was cut") from error
                if self._welcomed or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise RuntimeError(f"member {self._number}: {error.details()}") from error
            await self._channel.close()
            await asyncio.sleep(pause * random.uniform(0.7, 1.0))
            pause = min(BACKOFF_LAST, 2 * pause)

    async def _session(self) -> None:
        stub = pb_grpc.CoordinatorStub(self._channel)
        self._call = stub.Session(metadata=token_metadata(TOKEN))
        hello = pb.Hello(speaks=speaks_to_proto(OWN), member=self._info(), standing=pb.STARTING)
        await self._call.write(pb.WorkerMessage(hello=hello))
        while (message := await self._call.read()) is not grpc.aio.EOF:
            await self._receive(message)
        raise RuntimeError(f"member {self._number}: the coordinator ended the stream")

    def _info(self) -> pb.Member:
        pod = f"resnet-worker-{self._number}-0"
        address = f"10.0.{self._number // 256}.{self._number % 256}"
        return pb.Member(id=self._name, pod_uid=self._name, pod_name=pod, address=address, slot=self._number)

    async def _receive(self, message: pb.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self._welcomed = True
                await self._park(pb.STANDBY)
            case "prepare":
                await self._park(pb.DROPPED)
            case "boundary":
                await self._park(pb.BOUNDARY)
            case "start":
                await self._begin(message.start)
            case "store_entries":
                entries = message.store_entries
                if self._start is not None and entries.generation == self._start.generation:
                    await self._take(keys_in(entries.packed))
            case "refused":
                raise RuntimeError(f"member {self._number}: {message.refused.reason}")

    async def _park(self, reason: pb.ParkReason) -> None:
        parked = pb.Parked(reason=reason, layout_hash="layout")
        if self._start is not None:
            parked.generation.CopyFrom(self._start.generation)
            parked.state.CopyFrom(self._start.state)
        await self._call.write(pb.WorkerMessage(parked=parked))

    async def _begin(self, start: pb.Start) -> None:
        self._start = start
        self._rank = next(rank for rank, member in enumerate(start.members) if member.id == self._name)
        self._seen = {family: set() for family in FAMILIES}
        self._step = 0
        await self._tell(STEPS[0])

    async def _tell(self, families: tuple[str, ...]) -> None:
        assert self._start is not None
        values = {
            "place": b'{"batch": 0, "done": [], "blocks": 0}',
            "listener": f"10.0.0.1:{20000 + self._number}".encode(),
            "0": gloo_value(self._number, len(self._start.members)),
            "loops": b"0",
        }
        for family in families:
            key = f"{family}/{self._rank}"
            entry = pb.StoreEntry(generation=self._start.generation, key=key, value=values[family])
            await self._call.write(pb.WorkerMessage(store_set=entry))
        await self._take([f"{family}/{self._rank}" for family in families])

    async def _take(self, keys: Iterable[str]) -> None:
        """Note entries; when all of a step are there, go on to the next, and say Formed after the last."""
        assert self._start is not None
        for key in keys:
            self._seen[key.rpartition("/")[0]].add(key)
        if self._step == len(STEPS):
            return
        size = len(self._start.members)
        if any(len(self._seen[family]) < size for family in STEPS[self._step]):
            return
        self._step += 1
        if self._step < len(STEPS):
            await self._tell(STEPS[self._step])
            return
        formed = pb.Formed(generation=self._start.generation)
        await self._call.write(pb.WorkerMessage(formed=formed))
        self._formed.put_nowait(self._start.generation.number)

    async def report(self, step: int, commits: bool) -> None:
        """Tell what a worker tells while it trains.

        Args:
            step: that was committed last.
            commits: tell of the commit, as rank 0 does; or of the member's own times.
        """
        assert self._start is not None
        if not commits:
            times = pb.Times(
                steps=5, step_seconds=0.2, data_seconds=0.01, compute_seconds=0.1, wait_seconds=0.05
            )
            await self._call.write(pb.WorkerMessage(times=times))
            return
        state = pb.StateName(generation=self._start.generation, step=step)
        commit = pb.Commit(state=state, unix_time=time.time(), step_seconds=0.1, samples=512)
        progress = pb.Progress(commits=[commit], data=pb.Data(seen=step), productive_seconds=0.1 * step)
        await self._call.write(pb.WorkerMessage(progress=progress))

    @property
    def rank(self) -> int:
        """Rank in the generation."""
        return self._rank

    async def end(self) -> None:
        """Break the stream without a word, as a kill does."""
        self._ending = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()

    def failed(self) -> BaseException | None:
        """Return the error that ended the session; None while it goes on."""
        return self._task.exception() if self._task.done() and not self._task.cancelled() else None


async def serve_members(address: str, heartbeat: float) -> None:
    """Do what the lines of standard input say, and say on standard output how many have formed a generation.

    Args:
        address: of the coordinator, host:port.
        heartbeat: limit, in seconds.
    """
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    formed: asyncio.Queue[int] = asyncio.Queue()
    members: dict[int, Member] = {}
    reporting: asyncio.Task[None] | None = None

    async def tell_formed() -> None:
        while True:
            some = [await formed.get()]
            await asyncio.sleep(0.02)
            while not formed.empty():
                some.append(formed.get_nowait())
            print(json.dumps({"formed": some}), flush=True)

    async def look_for_failures() -> None:
        while True:
            await asyncio.sleep(0.5)
            for member in members.values():
                if (error := member.failed()) is not None:
                    print(json.dumps({"failed": str(error) or repr(error)}), flush=True)
                    return

    background = [asyncio.create_task(tell_formed()), asyncio.create_task(look_for_failures())]
    while line := await reader.readline():
        order = json.loads(line)
        for number in order.get("join", ()):
            members[number] = Member(number, address, heartbeat, formed)
            await asyncio.sleep(JOIN_PAUSE_SECONDS)  # a machine's pods do not start in one moment either
        if (number := order.get("kill")) in members:
            await members.pop(number).end()
        if "report" in order:
            if reporting is not None:
                reporting.cancel()
                reporting = None
            if order["report"]:
                reporting = asyncio.create_task(report_for_ever(members, order["report"]))
    for task in background:
        task.cancel()


async def report_for_ever(members: dict[int, Member], every: float) -> None:
    """Report what training members do.

    Args:
        members: of this process.
        every: seconds between two reports of a member's times.
    """
    began = time.monotonic()
    turns, slices = 0, max(1, round(every / 0.1))
    while True:
        for number, member in list(members.items()):
            if member.rank == 0:
                await member.report(turns + 1, commits=True)
            if number // CLIENTS % slices == turns % slices:
                await member.report(turns + 1, commits=False)
        turns += 1
        await asyncio.sleep(max(0.0, began + 0.1 * turns - time.monotonic()))


# ---- the measuring process


class Job:
    """A coordinator's process and the processes of its members."""

    def __init__(self, folder: Path, heartbeat: float) -> None:
        """Make it; `start` begins it.

        Args:
            folder: for the coordinator's state.
            heartbeat: limit, in seconds.
        """
        self._folder, self._heartbeat = folder, heartbeat
        self._coordinator: asyncio.subprocess.Process | None = None
        self._clients: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._formed: dict[int, int] = {}  # members by number of the generation
        self._failed = ""
        self._said: list[str] = []  # the last lines of the coordinator's log
        self._changed = asyncio.Event()
        self.address = ""

    async def start(self, target: int) -> None:
        """Start all processes.

        Args:
            target: members with which the first generation begins.
        """
        environment = os.environ | {
            "SPRINGTIDE_JOB": "scale",
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_STATE_DIR": str(self._folder),
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_PORT": "0",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_TARGET": str(target),
            "SPRINGTIDE_MINIMUM": "1",
            "SPRINGTIDE_KEEPALIVE_SECONDS": str(self._heartbeat),
            "SPRINGTIDE_OPERATOR_SILENCE_SECONDS": "3600",
        }
        command = [sys.executable, "-m", "springtide_coordinator"]
        listening = asyncio.get_running_loop().create_future()
        self._coordinator = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE, limit=1 << 24
        )
        self._tasks.append(asyncio.create_task(self._read_coordinator(listening)))
        self.address = f"127.0.0.1:{await asyncio.wait_for(listening, 60)}"
        command = [sys.executable, "-m", "benchmarks.coordinator_scale", "--members-of", self.address]
        command += ["--heartbeat", str(self._heartbeat)]
        for _ in range(CLIENTS):
            client = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            self._clients.append(client)
            self._tasks.append(asyncio.create_task(self._read_client(client)))

    async def _read_coordinator(self, listening: asyncio.Future[str]) -> None:
        assert self._coordinator is not None
        assert self._coordinator.stderr is not None
        while line := await self._coordinator.stderr.readline():
            self._said = [*self._said[-2:], line.decode(errors="replace")[:300].strip()]
            if b" port=" in line and not listening.done():
                listening.set_result(line.split(b" port=")[1].split()[0].decode())
        if not listening.done():
            listening.set_exception(RuntimeError(f"the coordinator ended: {self._said}"))
        self._failed = self._failed or "the coordinator ended"
        self._changed.set()

    async def _read_client(self, client: asyncio.subprocess.Process) -> None:
        assert client.stdout is not None
        while line := await client.stdout.readline():
            told = json.loads(line)
            for number in told.get("formed", ()):
                self._formed[number] = self._formed.get(number, 0) + 1
            self._failed = self._failed or told.get("failed", "")
            self._changed.set()

    async def order(self, **order: Any) -> None:
        """Tell all processes of members what to do; each does what is of its members."""
        for index, client in enumerate(self._clients):
            mine = dict(order)
            if "join" in order:
                mine["join"] = [number for number in order["join"] if number % CLIENTS == index]
            assert client.stdin is not None
            client.stdin.write(json.dumps(mine).encode() + b"\n")
            await client.stdin.drain()

    async def change(self, size: int, **order: Any) -> float:
        """Change the members, and wait until a newer generation than all before has formed.

        Args:
            size: of that generation.
            order: to the processes of members.

        Returns:
            Processor seconds of the coordinator for it.

        Raises:
            RuntimeError: a process ended, or the generation has not formed in time.
        """
        cpu, before = self.cpu_seconds(), max(self._formed, default=0)
        await self.order(**order)
        deadline = time.monotonic() + FORMATION_SECONDS
        while not any(number > before and count >= size for number, count in self._formed.items()):
            left = deadline - time.monotonic()
            if self._failed or left <= 0:
                counts = ", ".join(f"{count} in {number}" for number, count in self._formed.items())
                why = self._failed or f"waited {FORMATION_SECONDS:.0f} s"
                raise RuntimeError(
                    f"{why} for a generation of {size}; have formed: {counts or 'none'};"
                    f" the coordinator's last words: {' | '.join(self._said)}"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left, 1.0))
            self._changed.clear()
        await asyncio.sleep(SETTLE_SECONDS)
        return self.cpu_seconds() - cpu

    def cpu_seconds(self) -> float:
        """Processor seconds of the coordinator so far, of the process and of the kernel for it."""
        assert self._coordinator is not None
        fields = Path(f"/proc/{self._coordinator.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> None:
        """End all processes."""
        for process in [*self._clients, *([self._coordinator] if self._coordinator else [])]:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def share_of_core(job: Job, seconds: float, asks: bool = False) -> float:
    """Return the coordinator's share of a core over a while.

    Args:
        job: in which nothing changes.
        seconds: of the measurement.
        asks: call Sync once a second, as the operator does.
    """
    cpu, began = job.cpu_seconds(), time.monotonic()
    async with grpc.aio.insecure_channel(job.address) as channel:
        stub = pb_grpc.CoordinatorStub(channel)
        while (left := began + seconds - time.monotonic()) > 0:
            if asks:
                await stub.Sync(pb.SyncRequest(minimum=1, observed=False), metadata=token_metadata(TOKEN))
            await asyncio.sleep(min(1.0, left))
    return (job.cpu_seconds() - cpu) / (time.monotonic() - began)


@contextlib.asynccontextmanager
async def running(size: int, heartbeat: float) -> AsyncIterator[Job]:
    """A job whose first generation has formed.

    Args:
        size: of the generation.
        heartbeat: limit, in seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), heartbeat)
        try:
            await job.start(size)
            await job.change(size, join=list(range(size)))
            yield job
        finally:
            await job.end()


async def measure_shares(size: int, seconds: float) -> dict[str, float | None]:
    """Return what the coordinator takes while its members do not change, of a core.

    Args:
        size: members.
        seconds: of each measurement.
    """
    async with running(size, LIMIT) as job:
        idle = await share_of_core(job, seconds)
        await job.order(report=TIMES_SECONDS)
        return {"idle": idle, "training": await share_of_core(job, seconds, asks=True)}


async def measure_changes(size: int, repeats: int) -> dict[str, float]:
    """Return what joins and kills cost with so many members.

    All members share this machine's cores, so that they may be silent for longer than is allowed when all of
    them form a generation: the heartbeat's limit is a longer one here.

    Args:
        size: members.
        repeats: joins, and as many kills.
    """
    costs: dict[str, list[float]] = {"join": [], "kill": []}
    async with running(size - 1, CHANGES_HEARTBEAT) as job:
        for number in range(size - 1, size - 1 + repeats):
            costs["join"].append(await job.change(size, join=[number]))
            costs["kill"].append(await job.change(size - 1, kill=number))
    return {kind: sum(found) / len(found) for kind, found in costs.items()}


async def measure(sizes: tuple[int, ...], repeats: int, idle_seconds: float) -> Object:
    """Return all figures.

    Args:
        sizes: numbers of members, the greatest last.
        repeats: joins, and as many kills, at each.
        idle_seconds: of the measurements without a change.
    """
    changes: dict[str, float | None] = {}
    kinds: dict[str, dict[str, float] | None] = {}
    reasons: dict[str, str] = {}
    shares: dict[str, float | None] = {"idle": None, "training": None}
    limit = raise_descriptor_limit()
    for size in sizes:
        changes[str(size)] = kinds[str(size)] = None
        try:
            if (needed := size + SPARE_DESCRIPTORS) > limit:
                raise RuntimeError(f"the coordinator needs {needed} descriptors, and the limit is {limit}")
            found = kinds[str(size)] = await measure_changes(size, repeats)
            changes[str(size)] = (found["join"] + found["kill"]) / 2
            print(
                f"{size} members: {found['join']:.2f} s of CPU for a join, {found['kill']:.2f} s for a kill"
            )
            if size == sizes[-1]:
                shares = await measure_shares(size, idle_seconds)
        except (RuntimeError, OSError, grpc.aio.AioRpcError, TimeoutError) as error:
            reasons[str(size)] = str(error) or type(error).__name__
    return report(changes, kinds, shares, reasons)


def state_machine_seconds(size: int) -> float:
    """Return the processor seconds that the state machine alone takes for a join.

    Args:
        size: members with the one that joins; in pods of 8.
    """
    m = Membership(Incarnation(1), started_at=0.0, target=size - 1, minimum=1)

    def come(number: int) -> None:
        info = say.MemberInfo(f"{number:032x}", f"uid-{number // 8}", "", number % 8, "", number // 8)
        take_in(m, Connected(number, say.Hello(info, say.Standing.STARTING)), 1.0)
        take_in(m, Received(number, say.Parked(say.ParkReason.STANDBY, layout_hash="layout")), 1.0)

    def form() -> None:
        assert m.current is not None
        for number in range(len(m.current.ids)):
            take_in(m, Received(number, say.Formed(m.current.name)), 1.0)
        decide(m, 1.0)

    for number in range(size - 1):
        come(number)
    decide(m, 1.0)
    form()
    began = time.process_time()
    m.target = size
    come(size - 1)
    decide(m, 1.0)
    assert m.current is not None
    old, state = m.current.name, StateName(m.current.name, 1)
    for number in range(size - 1):
        parked = say.Parked(say.ParkReason.BOUNDARY, old, state, "layout")
        take_in(m, Received(number, parked), 1.0)
    decide(m, 1.0)
    form()
    if len(m.current.ids) != size or not m.current.complete:
        raise RuntimeError(f"no generation of {size} has formed")
    return time.process_time() - began


def calculated_seconds(half: float, whole: float, size: int) -> float:
    """Return the processor seconds of a change in a job too large to be run.

    Args:
        half: those at 256 members.
        whole: those at 512.
        size: members.
    """
    square = max(0.0, (whole - 2 * half) / (512**2 - 2 * 256**2))
    line = (whole - square * 512**2) / 512
    return line * size + square * size**2


def report(
    changes: dict[str, float | None],
    kinds: dict[str, dict[str, float] | None],
    shares: dict[str, float | None],
    reasons: dict[str, str],
) -> Object:
    """Return the figures under their keys.

    Args:
        changes: processor seconds by number of members.
        kinds: the same for each kind of change.
        shares: of a core, while nothing changes.
        reasons: why a size has no figure.
    """
    half, whole = changes.get("256"), changes.get("512")
    return {
        "cpu_seconds_per_change": changes,
        "cpu_seconds_by_kind": kinds,
        "growth_256_to_512": whole / half if whole is not None and half else None,
        "of_8000": {
            "state_machine_seconds": state_machine_seconds(LARGEST),
            "calculated_seconds": calculated_seconds(half, whole, LARGEST) if half and whole else None,
            "store_bytes": LARGEST * len(gloo_value(0, LARGEST)),
            "store_limit": MAX_STORE_BYTES,
        },
        "idle_cpu_fraction": shares["idle"],
        "training_cpu_fraction": shares["training"],
        "reasons": reasons,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one join and one kill at each size, not three")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="other numbers of members")
    parser.add_argument("--members-of", help=argparse.SUPPRESS)
    parser.add_argument("--heartbeat", type=float, default=LIMIT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.members_of:
        raise_descriptor_limit()
        asyncio.run(serve_members(arguments.members_of, arguments.heartbeat))
        return
    sizes = tuple(sorted(int(size) for size in arguments.sizes.split(",")))
    quick = arguments.quick
    result = asyncio.run(measure(sizes, 1 if quick else 3, 10.0 if quick else 30.0))
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
