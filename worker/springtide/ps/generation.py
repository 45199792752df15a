"""A generation on servers: where it begins, where its shards are, and what one member does for all.

That one asks the servers what they hold, makes what a fresh start needs, and says who gets copies of what.
Used from the script's thread; `Connections.over`, which ends waits, comes from any.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from springtide.comm.process_group import Group
from springtide.comm.store import StreamStore
from springtide.errors import SpringtideError
from springtide.ps.applied_batches import Rescue, with_newest
from springtide.ps.connections import Connections, ServerError
from springtide.ps.sharding import Arrangement, LackError, PlannedChunk, Sharding, arrange, place_fresh
from springtide.ps.tables import PlannedSlice
from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.load_parts import loads
from springtide_ps.server.step_protocol import NoRoomError
from springtide_ps.wire.client import Answer, RefusedError
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import KEEPS_APPLIED_BATCHES_KEY, RUN_ID_KEY

Planned = PlannedChunk | PlannedSlice

_ASK_SECONDS = 0.2
"""How long between two questions whether copies are there."""
_UNANSWERED_PARTS = 4
"""How many bytes may be on their way to servers: as many as in so many parts of a slice."""
_MOST_KEYS = 500
"""Keys in one order: its JSON must fit a frame."""


@dataclass(frozen=True, slots=True)
class GenerationStart:
    """Say where a generation on servers begins.

    token: its name. members: ids. servers: address by id, also of those that leave. step: after which it
    begins. bound: where members do not step together, how many steps the fastest may be ahead of the slowest;
    None: any number. skipped: steps before `step` that changed nothing. in_batches: whether they do not step
    together; None: the generation before decides. traceparent: the span of the change of members, for
    servers; "" where nobody records it.
    """

    token: tuple[int, int, int]
    members: tuple[str, ...]
    servers: Mapping[str, str]
    leaving: frozenset[str]
    step: int
    bound: int | None = None
    skipped: int = 0
    in_batches: bool | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Meeting:
    """How members agree when a generation begins.

    group, store: of the generation. leader: rank of the member that speaks to the servers for all. holds:
    this member has the state that the generation begins from. fresh: nobody has a state, and training begins
    from the leader's parameters and optimizer.
    """

    group: Group
    store: StreamStore
    leader: int
    holds: bool
    fresh: bool

    @property
    def leads(self) -> bool:
        """Whether this member is the leader."""
        return self.group.rank == self.leader


class ServersLackState(Exception):
    """The servers of this generation do not hold the state that it begins from.

    failed: which steps have failed there, if that is why.
    """

    def __init__(self, message: str, failed: str = "") -> None:
        super().__init__(message)
        self.failed = failed


_ROOM_REMEDY = (
    "The model does not fit into the memory that the parameter servers may take: raise"
    " SPRINGTIDE_PS_MEMORY_BYTES in parameterServers.template, or parameterServers.replicas"
)


class GenerationLeader:
    """Speak to the servers for all members of one generation. All calls raise ServerError.

    rescue: of chunks that no server holds (`applied_batches.Rescue`), where members do not step together;
    called once for each generation that is not fresh, also when nothing is lost.
    """

    def __init__(
        self,
        connections: Connections,
        start: GenerationStart,
        replication: int,
        rescue: Rescue | None = None,
    ) -> None:
        self._connections, self._start, self._replication, self._rescue = (
            connections,
            start,
            replication,
            rescue,
        )
        self._awaited: dict[str, set[str]] = {}
        self._asked: dict[str, Future[Answer]] | None = None
        self._ask_again = 0.0
        self.failed: list[tuple[str, str]] = []
        """(chunk, what its server says) of steps that failed, so that the chunk is held there no more."""

    def arrange(
        self,
        chunks: Collection[Planned],
        member: str,
        run_id: str,
        make: Callable[[Planned], Chunk | Slice] | None,
    ) -> Arrangement:
        """Have the generation begin on all servers.

        Args:
            chunks: All chunks and slices.
            member: This one's id.
            run_id: Of the state's history.
            make: Makes the shards of a fresh start; None: the servers hold them.

        Returns:
            Where each of them is.

        Raises:
            LackError: A chunk is held by no server.
            SpringtideError: A new chunk has no room.
        """
        start = self._start
        about = {"me": member, "members": list(start.members), "s": start.step, RUN_ID_KEY: run_id}
        if self._rescue is not None:
            about |= {KEEPS_APPLIED_BATCHES_KEY: True, "skipped": start.skipped}
        if start.traceparent:
            about["trace"] = start.traceparent
        self._all({server: [about] for server in start.servers}, Kind.ENTER, "a generation begins")
        sizes = {chunk.key: chunk.nbytes for chunk in chunks}
        staying = [server for server in start.servers if server not in start.leaving]
        if make is not None:
            arrangement = place_fresh(sizes, staying, self._replication)
            self._create(chunks, arrangement, make)
        else:
            holders = self._holders(sizes)
            try:
                arrangement = arrange(sizes, staying, holders, self._replication, start.leaving)
            except LackError as error:
                self.failed = [(key, told) for key, told in self.failed if not holders.get(key)]
                raise LackError("; ".join([str(error), *(told for _, told in self.failed)])) from None
        self._announce(arrangement)
        for key, others in arrangement.fills.items():
            for other in others:
                self._awaited.setdefault(other, set()).add(key)
        self._ask_again = time.monotonic() + _ASK_SECONDS
        return arrangement

    def _holders(self, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """Return the servers that can serve each chunk."""
        holders: dict[str, list[str]] = {key: [] for key in sizes}
        for server, future in self._inventory(self._start.servers).items():
            answer = self._connections.answer(future, server, "what it holds")
            for key in _names_in(answer) & set(sizes):
                holders[key].append(server)
            where = f"at parameter server {self._connections[server].address}"
            self.failed += [(key, f"{text} {where}") for key, text in answer.meta.get("lost", {}).items()]
        if self._rescue is None:
            return holders
        holders = with_newest(holders, self._connections, self._start.token)
        loads = {
            server: sum(sizes[key] for key, names in holders.items() if server in names)
            for server in self._start.servers
            if server not in self._start.leaving
        }
        for key, server in self._rescue([key for key in sizes if not holders[key]], loads).items():
            holders[key] = [server]
        return holders

    def copied(self) -> bool:
        """Whether the copies that were ordered are there, so that another generation can use them.

        Asks now and then, and does not wait.
        """
        if not self._awaited:
            return False
        if self._asked is None:
            now = time.monotonic()
            if now < self._ask_again:
                return False
            self._ask_again = now + _ASK_SECONDS
            try:
                self._asked = self._inventory(self._awaited)
            except ServerError:
                return False
        if not all(future.done() for future in self._asked.values()):
            return False
        asked, self._asked = self._asked, None
        for server, future in asked.items():
            if future.exception() is None:
                self._awaited[server] -= _names_in(future.result())
        self._awaited = {server: keys for server, keys in self._awaited.items() if keys}
        return not self._awaited

    def _inventory(self, servers: Iterable[str]) -> dict[str, Future[Answer]]:
        token = self._start.token
        return {s: self._connections.ask(s, Kind.INVENTORY, token, {}, any_size=True) for s in servers}

    def _create(
        self,
        chunks: Collection[Planned],
        arrangement: Arrangement,
        make: Callable[[Planned], Chunk | Slice],
    ) -> None:
        waiting = deque[tuple[str, Future[Answer], int]]()
        unanswered = 0

        def wait_for_one() -> int:
            server, future, nbytes = waiting.popleft()
            try:
                self._connections.answer(future, server, "the initial values")
            except ServerError as error:
                said = future.exception() if future.done() else None
                if isinstance(said, RefusedError) and said.error == NoRoomError.__name__:
                    raise SpringtideError(f"{error}. {_ROOM_REMEDY}") from None
                raise
            return nbytes

        for planned in chunks:
            for meta, payload in loads(make(planned), self._connections.part_bytes):
                about = {**meta, "k": planned.key, "s": self._start.step}
                for server in arrangement.homes[planned.key]:
                    while unanswered > _UNANSWERED_PARTS * self._connections.part_bytes:
                        unanswered -= wait_for_one()
                    asked = self._connections.ask(server, Kind.LOAD, self._start.token, about, payload)
                    waiting.append((server, asked, payload.nbytes))
                    unanswered += payload.nbytes
        while waiting:
            wait_for_one()

    def _announce(self, arrangement: Arrangement) -> None:
        """Tell each server whom to send copies to."""
        address = self._start.servers
        orders: dict[str, dict[str, Any]] = {s: {"forward": {}, "fill": {}, "drop": []} for s in address}
        for key, (first, *others) in arrangement.homes.items():
            if others:
                orders[first]["forward"][key] = [address[other] for other in others]
            if fills := arrangement.fills.get(key):
                orders[first]["fill"][key] = [address[other] for other in fills]
            for other in arrangement.drops.get(key, ()):
                orders[other]["drop"].append(key)
        self._all({s: _split(order) for s, order in orders.items()}, Kind.ARRANGE, "where copies go")

    def _all(self, requests: Mapping[str, list[dict[str, Any]]], kind: Kind, what: str) -> None:
        asked = [
            (server, self._connections.ask(server, kind, self._start.token, meta))
            for server, metas in requests.items()
            for meta in metas
        ]
        for server, future in asked:
            self._connections.answer(future, server, what)


class Generation:
    """The present generation as one worker sees it: where its shards are, and its name on requests.

    planned: all chunks and slices, in an order that is the same at all workers. me: this worker's name.
    """

    def __init__(
        self, connections: Connections, planned: Sequence[Planned], sharding: Sharding, me: str
    ) -> None:
        self._connections, self._planned, self._sharding, self._me = connections, planned, sharding, me
        self._start: GenerationStart | None = None
        self._leader: GenerationLeader | None = None
        self.homes: dict[str, list[str]] = {}
        """Servers of each shard by its key, first the one that workers speak to."""
        self.run_id = ""
        self.settled = True

    @property
    def begun(self) -> bool:
        """Whether there has been a generation."""
        return self._start is not None

    @property
    def start(self) -> GenerationStart:
        """Return where the present generation began. Raise ServerError before the first."""
        if self._start is None:
            raise ServerError("no generation has begun")
        return self._start

    @property
    def step(self) -> int:
        """The last step that this worker has committed; 0 where members do not step together."""
        return self.start.step

    @property
    def in_use(self) -> set[str]:
        """The servers that this generation's shards are on."""
        return {server for home in self.homes.values() for server in home}

    @property
    def copies(self) -> int:
        """How many servers hold each shard, at least."""
        return min((len(home) for home in self.homes.values()), default=0)

    def open(self, start: GenerationStart) -> None:
        """Be in this generation; its homes follow with `lead` or `follow`."""
        self._start, self._leader = start, None

    def lead(
        self, meeting: Meeting, leader: GenerationLeader, make: Callable[[Planned], Chunk | Slice]
    ) -> None:
        """Have the generation begin on all servers, and tell the other members.

        Args:
            meeting: Where they hear it.
            leader: Speaks to the servers.
            make: Makes the shards of a fresh start.

        Raises:
            ServersLackState: A shard is on no server.
            RuntimeError: A server or the store fails.
        """
        start = self.start
        if meeting.fresh:
            self.run_id = "-".join(str(number) for number in start.token)
        self._leader = leader
        told: dict[str, Any]
        try:
            arrangement = leader.arrange(
                self._planned, self._me, self.run_id, make if meeting.fresh else None
            )
        except LackError as error:
            failed = "; ".join(f"{self._sharding.describe(key)}: {text}" for key, text in leader.failed)
            told = {"lacks": str(error), "failed": failed}
            meeting.store.set(f"servers/{meeting.leader}", json.dumps(told).encode())
            raise ServersLackState(str(error), failed) from None
        self.homes, self.settled = arrangement.homes, arrangement.settled
        ids = list(start.servers)
        numbers = {server: number for number, server in enumerate(ids)}
        told = {
            "run id": self.run_id,
            "step": start.step,
            "settled": self.settled,
            "ids": ids,
            "homes": [[numbers[server] for server in self.homes[planned.key]] for planned in self._planned],
        }
        meeting.store.set(f"servers/{meeting.leader}", json.dumps(told).encode())
        self._rely_on_others_than_leavers()

    def follow(self, meeting: Meeting) -> None:
        """Learn from the leader where the shards are. Raise ServersLackState, RuntimeError."""
        told = json.loads(meeting.store.get(f"servers/{meeting.leader}"))
        if "lacks" in told:
            raise ServersLackState(told["lacks"], told["failed"])
        self.run_id, self.settled = told["run id"], told["settled"]
        self._start = replace(self.start, step=told["step"])
        homes = [[told["ids"][number] for number in numbers] for numbers in told["homes"]]
        self.homes = {planned.key: home for planned, home in zip(self._planned, homes, strict=True)}
        self._rely_on_others_than_leavers()

    def _rely_on_others_than_leavers(self) -> None:
        """Servers that leave, and hold nothing that is used, may end at any moment."""
        start = self.start
        self._connections.rely_on(self.in_use | (start.servers.keys() - start.leaving))

    def advance(self) -> None:
        """Count a step that this worker has committed."""
        self._start = replace(self.start, step=self.start.step + 1)

    def copied(self) -> bool:
        """Whether the copies that this member has ordered are there, so that another generation can use them.

        Asks now and then, and does not wait.
        """
        return self._leader is not None and self._leader.copied()


def _names_in(answer: Answer) -> set[str]:
    names = b"" if answer.payload is None else answer.payload.numpy().tobytes()
    return set(names.decode().split("\n")) if names else set()


def _split(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cut an order into parts that fit a frame."""
    parts: list[dict[str, Any]] = []
    for name in ("forward", "fill"):
        items = list(order[name].items())
        parts += [{name: dict(items[at : at + _MOST_KEYS])} for at in range(0, len(items), _MOST_KEYS)]
    drop = order["drop"]
    return parts + [{"drop": drop[at : at + _MOST_KEYS]} for at in range(0, len(drop), _MOST_KEYS)]
