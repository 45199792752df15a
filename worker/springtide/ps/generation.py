"""What one member does for all when a generation begins: it asks the servers what they hold, makes what a
fresh start needs, and says who gets copies of what."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from springtide.errors import SpringtideError
from springtide.ps.connections import Links, ServerError
from springtide.ps.sharding import Arrangement, LackError, PlannedChunk, arrange, place_fresh
from springtide.ps.tables import PlannedSlice
from springtide_ps.chunk import Chunk
from springtide_ps.client import Answer, RefusedError
from springtide_ps.frames import Kind
from springtide_ps.parts import loads
from springtide_ps.rounds import NoRoomError
from springtide_ps.slices import Slice

Planned = PlannedChunk | PlannedSlice

_ASK_SECONDS = 0.2
"""How long between two questions whether copies are there."""
_UNANSWERED_PARTS = 4
"""How many bytes may be on their way to servers: as many as in so many parts of a slice."""
_MOST_KEYS = 500
"""In one order: its JSON must fit a frame."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a generation's chunks are. token: its name. members: ids. servers: address by id, also of those
    that leave. step: after which it begins. bound: where members do not step together, how many steps the
    fastest may be ahead of the slowest; None: any number. skipped: steps before `step` that changed nothing.
    in_ranges: whether they do not step together; None: as in the generation before.
    """

    token: tuple[int, int, int]
    members: tuple[str, ...]
    servers: Mapping[str, str]
    leaving: frozenset[str]
    step: int
    bound: int | None = None
    skipped: int = 0
    in_ranges: bool | None = None


_ROOM_REMEDY = (
    "The model does not fit into the memory that the parameter servers may take: raise"
    " SPRINGTIDE_PS_MEMORY_BYTES in parameterServers.template, or parameterServers.replicas"
)


class Leader:
    """For one generation. All calls raise ServerError when a server does not do its part."""

    def __init__(self, links: Links, place: Place, replication: int) -> None:
        self._links, self._place, self._replication = links, place, replication
        self._awaited: dict[str, set[str]] = {}
        self._asked: dict[str, Future[Answer]] | None = None
        self._ask_again = 0.0
        self.failed: list[tuple[str, str]] = []
        """(chunk, what its server says) of steps that failed, so that the chunk is held there no more."""

    def arrange(
        self,
        chunks: Collection[Planned],
        member: str,
        lineage: str,
        make: Callable[[Planned], Chunk | Slice] | None,
    ) -> Arrangement:
        """Have the generation begin on all servers. make: makes the chunks of a fresh start; None otherwise.

        Raise LackError when a chunk is held by no server, SpringtideError when a new one has no room.
        """
        place = self._place
        about = {"me": member, "members": list(place.members), "s": place.step, "lineage": lineage}
        about |= self._kind_of_generation()
        self._all({server: [about] for server in place.servers}, Kind.ENTER, "a generation begins")
        sizes = {chunk.key: chunk.nbytes for chunk in chunks}
        staying = [server for server in place.servers if server not in place.leaving]
        if make is not None:
            arrangement = place_fresh(sizes, staying, self._replication)
            self._create(chunks, arrangement, make)
        else:
            holders = self._holders(sizes)
            try:
                arrangement = arrange(sizes, staying, holders, self._replication, place.leaving)
            except LackError as error:
                self.failed = [(key, told) for key, told in self.failed if not holders.get(key)]
                raise LackError("; ".join([str(error), *(told for _, told in self.failed)])) from None
        self._tell(arrangement)
        for key, others in arrangement.fills.items():
            for other in others:
                self._awaited.setdefault(other, set()).add(key)
        self._ask_again = time.monotonic() + _ASK_SECONDS
        return arrangement

    def _kind_of_generation(self) -> dict[str, Any]:
        """What servers are told besides."""
        return {}

    def _holders(self, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """Who can serve each chunk."""
        holders: dict[str, list[str]] = {key: [] for key in sizes}
        for server, future in self._inventory(self._place.servers).items():
            answer = self._links.answer(future, server, "what it holds")
            for key in _names_in(answer) & set(sizes):
                holders[key].append(server)
            where = f"at parameter server {self._links[server].address}"
            self.failed += [(key, f"{text} {where}") for key, text in answer.meta.get("lost", {}).items()]
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
        token = self._place.token
        return {s: self._links.ask(s, Kind.INVENTORY, token, {}, any_size=True) for s in servers}

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
                self._links.answer(future, server, "the initial values")
            except ServerError as error:
                said = future.exception() if future.done() else None
                if isinstance(said, RefusedError) and said.error == NoRoomError.__name__:
                    raise SpringtideError(f"{error}. {_ROOM_REMEDY}") from None
                raise
            return nbytes

        for planned in chunks:
            for meta, payload in loads(make(planned), self._links.part_bytes):
                about = {**meta, "k": planned.key, "s": self._place.step}
                for server in arrangement.homes[planned.key]:
                    while unanswered > _UNANSWERED_PARTS * self._links.part_bytes:
                        unanswered -= wait_for_one()
                    asked = self._links.ask(server, Kind.LOAD, self._place.token, about, payload)
                    waiting.append((server, asked, payload.nbytes))
                    unanswered += payload.nbytes
        while waiting:
            wait_for_one()

    def _tell(self, arrangement: Arrangement) -> None:
        """Tell each server whom to send copies to."""
        address = self._place.servers
        orders: dict[str, dict[str, Any]] = {s: {"forward": {}, "fill": {}, "drop": []} for s in address}
        for key, (first, *others) in arrangement.homes.items():
            if others:
                orders[first]["forward"][key] = [address[other] for other in others]
            if fills := arrangement.fills.get(key):
                orders[first]["fill"][key] = [address[other] for other in fills]
            for other in arrangement.drops.get(key, ()):
                orders[other]["drop"].append(key)
        self._all({s: _cut(order) for s, order in orders.items()}, Kind.ARRANGE, "where copies go")

    def _all(self, requests: Mapping[str, list[dict[str, Any]]], kind: Kind, what: str) -> None:
        asked = [
            (server, self._links.ask(server, kind, self._place.token, meta))
            for server, metas in requests.items()
            for meta in metas
        ]
        for server, future in asked:
            self._links.answer(future, server, what)


def _names_in(answer: Answer) -> set[str]:
    names = b"" if answer.payload is None else answer.payload.numpy().tobytes()
    return set(names.decode().split("\n")) if names else set()


def _cut(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The order in parts that fit a frame."""
    parts: list[dict[str, Any]] = []
    for name in ("forward", "fill"):
        items = list(order[name].items())
        parts += [{name: dict(items[at : at + _MOST_KEYS])} for at in range(0, len(items), _MOST_KEYS)]
    drop = order["drop"]
    return parts + [{"drop": drop[at : at + _MOST_KEYS]} for at in range(0, len(drop), _MOST_KEYS)]
