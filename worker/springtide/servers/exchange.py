"""The steps of one worker with parameters on servers: push, prepare, commit, fetch.

A step's gradients go to the servers during backward. `prepare` returns when all members' gradients are there;
then comes the step's side reduction, and who has its result has committed (`springtide_ps.rounds` says why
that is safe). The values come back in the order in which a forward pass needs them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from springtide.exchange.groups import Group, Work
from springtide.exchange.layout import Layout
from springtide.exchange.store import StreamStore
from springtide.servers.links import Links, ServerError
from springtide.servers.plan import Arrangement, LackError, PlannedChunk, arrange, place_fresh, plan_chunks
from springtide.servers.recipe import group_numbers, group_options, optimizer_name
from springtide_ps.chunk import Chunk, Recipe
from springtide_ps.client import Answer
from springtide_ps.frames import Kind

_ASK_SECONDS = 0.2
"""How long between two questions whether copies are there."""


class ServersLackState(Exception):
    """The servers of this generation do not hold the state that it begins from."""


MakeServers = Callable[[dict[str, torch.nn.Parameter], Layout, torch.optim.Optimizer, bool], "ServerExchange"]
"""(trained parameters by name, their layout, optimizer, whether the gradients' norm is wanted)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a generation's chunks are. token: its name. servers: address by id, those that leave included."""

    token: tuple[int, int, int]
    members: tuple[str, ...]
    servers: Mapping[str, str]
    leaving: frozenset[str]
    step: int


class ServerExchange:
    """Used from the script's thread; `over` from any."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        optimizer: torch.optim.Optimizer,
        *,
        me: str,
        token: str,
        replication: int,
        with_norm: bool,
        connect_seconds: float,
        answer_seconds: float,
    ) -> None:
        self._me, self._replication, self._with_norm = me, replication, with_norm
        self._optimizer, self._name = optimizer, optimizer_name(optimizer)
        self._names = list(parameters)
        self.links = Links(token, connect_seconds, answer_seconds)
        self._flats = _flatten(list(parameters.values()), layout)
        self.chunks = plan_chunks(layout, group_numbers(optimizer, dict(parameters)))
        self._chunks = {chunk.key: chunk for chunk in self.chunks}
        self._by_bucket: list[list[PlannedChunk]] = [[] for _ in layout.sizes]
        for chunk in self.chunks:
            self._by_bucket[chunk.bucket].append(chunk)
        self._of_parameter: dict[int, list[str]] = {}
        for chunk in self.chunks:
            for piece in chunk.pieces:
                self._of_parameter.setdefault(piece[0], []).append(chunk.key)
        self.lineage = ""
        self.recipe: Recipe | None = None
        self._place: Place | None = None
        self._homes: dict[str, list[str]] = {}
        self._clean: set[str] = {chunk.key for chunk in self.chunks}
        self._fetches: dict[str, Future[Answer]] = {}
        self._commits: list[Future[Answer]] = []
        self._counts: dict[str, int] = {}
        self._pushed = 0
        self.settled = True
        self._awaited: dict[str, set[str]] = {}
        self._asked: dict[str, Future[Answer]] | None = None
        self._ask_again = 0.0

    # ---- generations

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """Have the servers begin the generation, and learn where the chunks are.

        holds: this member has the state that it begins from. leader: rank of the member that speaks for all.
        fresh: nobody ever had a state before. Raise ServersLackState, RuntimeError.
        """
        self._place = place
        self._fetches, self._commits = {}, []
        self._awaited, self._asked, self._ask_again = {}, None, time.monotonic() + _ASK_SECONDS
        self.links.connect(place.servers)
        group.on_shut(lambda: self.links.over("the generation is over"))
        if not holds:
            self._clean = set()
        if group.rank != leader:
            told = json.loads(store.get(f"servers/{leader}"))
            if "lacks" in told:
                raise ServersLackState(told["lacks"])
            self.lineage, self.settled = told["lineage"], told["settled"]
            homes = [[told["ids"][number] for number in numbers] for numbers in told["homes"]]
            self._homes = {chunk.key: home for chunk, home in zip(self.chunks, homes, strict=True)}
            return
        if fresh:
            self.lineage = "-".join(str(number) for number in place.token)
        try:
            arrangement = self._arrange(place)
        except LackError as error:
            store.set(f"servers/{leader}", json.dumps({"lacks": str(error)}).encode())
            raise ServersLackState(str(error)) from None
        self._homes, self.settled = arrangement.homes, arrangement.settled
        for key, others in arrangement.fills.items():
            for other in others:
                self._awaited.setdefault(other, set()).add(key)
        ids = list(place.servers)
        numbers = {server: number for number, server in enumerate(ids)}
        told = {
            "lineage": self.lineage,
            "settled": self.settled,
            "ids": ids,
            "homes": [[numbers[server] for server in self._homes[chunk.key]] for chunk in self.chunks],
        }
        store.set(f"servers/{leader}", json.dumps(told).encode())

    def _arrange(self, place: Place) -> Arrangement:
        """As the leader: enter on all servers, see what they hold, make what is missing, say who copies."""
        about = {"me": self._me, "members": list(place.members), "s": place.step, "lineage": self.lineage}
        self._all(Kind.ENTER, about, "a generation begins")
        sizes = {chunk.key: chunk.nbytes for chunk in self.chunks}
        staying = [server for server in place.servers if server not in place.leaving]
        holders: dict[str, list[str]] = {key: [] for key in sizes}
        asked = {s: self._ask(s, Kind.INVENTORY, {}, any_size=True) for s in place.servers}
        for server, future in asked.items():
            answer = self._result(future, server, "what it holds")
            for key in _names_in(answer):
                holders.setdefault(key, []).append(server)
        if place.step == 0 and not all(holders[key] for key in sizes):
            arrangement = place_fresh(sizes, staying, self._replication)
            self._create(arrangement, place)
        else:
            arrangement = arrange(
                sizes,
                staying,
                {key: holders[key] for key in sizes},
                self._replication,
                place.leaving,
            )
        self._tell(arrangement, place)
        return arrangement

    def _create(self, arrangement: Arrangement, place: Place) -> None:
        waiting = []
        options = group_options(self._optimizer)
        for planned in self.chunks:
            chunk = Chunk(self._values(planned), planned.pieces, self._name, options)
            meta, payload = chunk.dump()
            about = {**meta, "k": planned.key, "s": place.step}
            for server in arrangement.homes[planned.key]:
                waiting.append((server, self._ask(server, Kind.LOAD, about, payload)))
        for server, future in waiting:
            self._result(future, server, "the initial values")

    def _tell(self, arrangement: Arrangement, place: Place) -> None:
        """Tell each server whom to send copies to."""
        orders: dict[str, dict[str, Any]] = {
            server: {"forward": {}, "fill": {}, "drop": []} for server in place.servers
        }
        for key, (first, *others) in arrangement.homes.items():
            if others:
                orders[first]["forward"][key] = [place.servers[other] for other in others]
            if fills := arrangement.fills.get(key):
                orders[first]["fill"][key] = [place.servers[other] for other in fills]
            for other in arrangement.drops.get(key, ()):
                orders[other]["drop"].append(key)
        asked = [
            (s, self._ask(s, Kind.ARRANGE, about)) for s, order in orders.items() for about in _cut(order)
        ]
        for server, future in asked:
            self._result(future, server, "where copies go")

    @property
    def in_use(self) -> set[str]:
        """The servers that this generation's chunks are on."""
        return {server for home in self._homes.values() for server in home}

    def copied(self) -> bool:
        """Whether the copies that this member has ordered are there, so that another generation can use them.

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
                self._asked = {
                    server: self._ask(server, Kind.INVENTORY, {}, any_size=True) for server in self._awaited
                }
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

    def resolve(self) -> None:
        """All members hold the state: let the servers make what is open of it, and fetch what is not here."""
        recipe = None if self.recipe is None else self.recipe.to_json()
        self._commits = [self._ask(server, Kind.RESOLVE, {"recipe": recipe}) for server in self.links]
        self._fetch([chunk for chunk in self.chunks if chunk.key not in self._clean], self._step)

    def state_dict(self) -> dict[str, Any]:
        """What a member must know to let the servers make an open step."""
        recipe = None if self.recipe is None else self.recipe.to_json()
        return {"lineage": self.lineage, "recipe": json.dumps(recipe)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        recipe = json.loads(state["recipe"])
        self.lineage = str(state["lineage"])
        self.recipe = None if recipe is None else Recipe.from_json(recipe)

    def close(self) -> None:
        self.links.close()

    # ---- a step

    def begin_step(self) -> None:
        self._pushed, self._counts = 0, {}

    def push(self, gradients: torch.Tensor) -> Work:
        """Send the next bucket's gradients (flat, in the layout's order) on their way."""
        step, place = self._step + 1, self._entered
        try:
            for chunk in self._by_bucket[self._pushed]:
                server = self._homes[chunk.key][0]
                part = gradients[chunk.start : chunk.stop]
                self.links[server].stage(place.token, step, self._me, chunk.key, part)
                self._counts[server] = self._counts.get(server, 0) + 1
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        self._pushed += 1
        return _PUSHED

    def prepare(self) -> float | None:
        """Wait until all members' gradients are on the servers; the norm of their sum if there is to be one.

        Raise ServerError.
        """
        self.settle()
        for future in self._commits:
            self.links.result(future, lambda: "the last step's commit")
        self._commits = []
        about = {"s": self._step + 1, "me": self._me, "norm": self._with_norm}
        asked = [
            (server, self._ask(server, Kind.PREPARE, {**about, "count": self._counts.get(server, 0)}))
            for server in self.links
        ]
        answers = [self._result(future, server, "the step's gradients") for server, future in asked]
        if not self._with_norm:
            return None
        return math.sqrt(math.fsum(float(answer.meta["square_norm"]) for answer in answers))

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """The step is committed: have the servers make it, and begin to fetch the values."""
        self.recipe = Recipe(scale, skip, group_options(self._optimizer), frozenset(unused))
        about = {"s": self._step + 1, "me": self._me, "recipe": self.recipe.to_json()}
        place = self._entered
        self._place = Place(place.token, place.members, place.servers, place.leaving, place.step + 1)
        self._clean = set()
        try:
            self._commits = [self._ask(server, Kind.COMMIT, about) for server in self.links]
            self._fetch(self.chunks, self._step)
        except ServerError as error:
            # The step stays committed: its values come with the next generation.
            self.links.over(str(error))

    def settle(self, parameters: Collection[int] | None = None) -> None:
        """Wait until the values of these parameters (None: all) are here. Raise ServerError."""
        if len(self._clean) == len(self.chunks):
            return
        keys: Sequence[str]
        if parameters is None:
            keys = [chunk.key for chunk in self.chunks]
        else:
            keys = [key for index in parameters for key in self._of_parameter.get(index, ())]
        for key in keys:
            if key not in self._clean:
                self._receive(key)
                self._clean.add(key)

    def _receive(self, key: str) -> None:
        """Wait for the values of a chunk; its other servers have them too, should the first one be lost."""
        future = self._fetches.pop(key, None)
        if future is None:
            raise ServerError(f"the values of chunk {key} are not here")
        first, *others = self._homes[key]
        try:
            self._result(future, first, "the step's values")
            return
        except ServerError as error:
            lost = error
        for other in others:
            try:
                self._fetch([self._chunks[key]], self._step, other)
                self._result(self._fetches.pop(key), other, "the step's values")
                return
            except ServerError as error:
                lost = error
        raise lost

    # ---- within

    @property
    def _entered(self) -> Place:
        if self._place is None:
            raise ServerError("no generation has begun")
        return self._place

    @property
    def _step(self) -> int:
        return self._entered.step

    def _values(self, chunk: PlannedChunk) -> torch.Tensor:
        return self._flats[chunk.bucket][chunk.start : chunk.stop]

    def _fetch(self, chunks: Collection[PlannedChunk], step: int, at: str | None = None) -> None:
        for chunk in chunks:
            server = at or self._homes[chunk.key][0]
            self._fetches[chunk.key] = self._ask(
                server, Kind.FETCH, {"k": chunk.key, "s": step}, out=self._values(chunk)
            )

    def _ask(
        self,
        server: str,
        kind: Kind,
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]:
        try:
            return self.links[server].ask_step(
                kind, self._entered.token, meta, payload, out, any_size=any_size
            )
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def _all(self, kind: Kind, meta: dict[str, Any], what: str) -> None:
        asked = [(server, self._ask(server, kind, meta)) for server in self.links]
        for server, future in asked:
            self._result(future, server, what)

    def _result(self, future: Future[Answer], server: str, what: str) -> Answer:
        return self.links.result(future, lambda: f"{what} at parameter server {self.links[server].address}")


class _Pushed:
    """A push has no answer of its own: `prepare` is its answer."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_PUSHED = _Pushed()


def _flatten(parameters: list[torch.nn.Parameter], layout: Layout) -> list[torch.Tensor]:
    """Move the parameters into flat memory of the layout, one tensor for each bucket."""
    flats = [torch.zeros(size, dtype=dtype) for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)]
    with torch.no_grad():
        for parameter, item, slot in zip(parameters, layout.fields, layout.slots, strict=True):
            view = flats[slot.bucket].narrow(0, slot.offset, item.numel).view(item.shape)
            view.copy_(parameter)
            parameter.data = view
    return flats


def _names_in(answer: Answer) -> set[str]:
    names = b"" if answer.payload is None else answer.payload.numpy().tobytes()
    return set(names.decode().split("\n")) if names else set()


def _cut(order: Mapping[str, Any], most: int = 500) -> list[dict[str, Any]]:
    """The order in parts that fit a frame."""
    parts: list[dict[str, Any]] = []
    for name, empty in (("forward", {}), ("fill", {}), ("drop", [])):
        items = list(order[name].items() if isinstance(empty, dict) else order[name])
        for start in range(0, len(items), most):
            some = items[start : start + most]
            parts.append({name: dict(some) if isinstance(empty, dict) else some})
    return parts
