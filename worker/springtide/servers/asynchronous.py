"""The exchange of one worker that does not step together with the others (BoundedStaleness, Asynchronous).

A body works on a whole global batch of its own, a *range*. Its gradients leave during backward (`offering`).
At optimizer.step() each chunk, and each slice of a table (`range_rows`), is pushed, with its range and the
options of the script's optimizer, and the answer brings that chunk's newest values, for which the next
forward pass waits layer by layer: the next range is asked for before they are here. A push without an
answer is kept and sent again in the next generation, so nothing is computed twice for a new token; a server
that has the range answers without applying it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Final

import torch

from springtide import faults
from springtide.exchange.groups import Group
from springtide.exchange.store import StreamStore
from springtide.ps.books import Offer, books_of
from springtide.ps.compression import Pushed, RangeWire
from springtide.ps.connections import ServerError
from springtide.ps.early_push import Offering, Outgoing
from springtide.ps.generation import Place
from springtide.ps.lease import Audit, Lease
from springtide.ps.row_gradients import Rows, slices_by_table
from springtide.ps.sharding import PlannedChunk
from springtide.ps.tables import PlannedSlice
from springtide.servers.exchange import ServerExchange
from springtide.servers.range_rounds import RangeRounds
from springtide.servers.rescued import RescuedChunks
from springtide.servers.row_pushes import RowPushes
from springtide_ps.chunk import Chunk, Recipe, square_norm
from springtide_ps.client import Answer, RefusedError
from springtide_ps.frames import Kind
from springtide_ps.leases import starting_clocks
from springtide_ps.ranges import Book, RangeSet
from springtide_ps.selected import Selected
from springtide_ps.slices import Slice

log = logging.getLogger("springtide")

_LATE_SECONDS: Final = 10.0


class AsynchronousExchange(RangeRounds, RescuedChunks, RowPushes, ServerExchange):
    """As `ServerExchange`, from which it has chunks, places and waits. `interrupt` is for any thread."""

    asynchronous = True

    def __init__(self, *args: Any, wire: RangeWire | None = None, **named: Any) -> None:
        self._owing = wire or RangeWire()
        super().__init__(*args, wire=self._owing, **named)
        self._offering = Offering(self._me)
        self._restored = self._skipped = 0
        self._clock: int | None = None
        self._leased = 0
        self._window = (0, 0)
        self._next_lease: Future[Answer] | None = None
        self._sent: int | None = None
        self._recipe = Recipe(1.0, True, ())
        self._skipping: frozenset[int] = frozenset()
        self._ahead_of_end, self._sums = set(), (1.0, ())
        self._gradients: dict[str, torch.Tensor] = {}
        self._outgoing: dict[str, Outgoing] = {}
        self._slices = {planned.key: planned for planned in self.tables.slices}
        self._slices_of = slices_by_table(self.tables)
        self._again: set[str] = set()
        self._pending: set[str] = set()
        self._done: list[int] = []
        self._pulled: dict[str, Offer] = {}
        self._based: dict[str, int] = {}  # updates in the values that a push was computed on
        self._late: list[tuple[str, tuple[Future[Answer], str]]] = []  # asked for in a generation that ended
        self._stop: Future[None] = Future()
        self._meeting: tuple[StreamStore, int, int] | None = None  # store, rank, leader
        self._behind: list[int] = []

    # ---- generations

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        """As in `ServerExchange`; then send again what has no answer yet."""
        self._stop, self._next_lease, self._behind = Future(), None, []
        self._meeting = (store, group.rank, leader)
        self._memory.drop()
        self._offering.forget()
        self._restored, self._skipped = place.step, place.skipped
        self.links.connect(place.servers)
        self._late += self._fetches.items()
        if fresh or group.rank != leader:
            self._await_late()  # the leader does when it has told the servers, which end what waits there
        if fresh:
            self._clock, self._sent, self._pending, self._pulled, self._based = 0, None, set(), {}, {}
            self._owing.forget()
            if group.rank == leader:
                store.set(f"lost/{leader}", b"{}")
        # The servers count ranges, not steps.
        super().begin_generation(
            replace(place, step=0), group, store, holds=holds, leader=leader, fresh=fresh
        )
        again = sorted(self._pending)
        self._again |= self._pending
        self._send(again)
        for key in again:
            self._receive(key, to_the_end=False)
        self._count()  # the ranges are opened from books that have it
        self._done = []
        store.set(f"clock/{group.rank}", json.dumps(self._clock).encode())

    def _await_late(self) -> None:
        """What the last generation still answers must not land after this one's values."""
        late, self._late = self._late, []
        wait([future for _, (future, _) in late], _LATE_SECONDS)
        for key, (future, _) in late:
            error = future.exception() if future.done() else TimeoutError()
            if error is None:
                if not future.result().meta.get("whole"):
                    self._take(key, future.result())
            elif key in self._pulled and self._lands(key) and not isinstance(error, RefusedError):
                self._pulled[key] = replace(self._pulled[key], torn=True)
        if self._sent is None:
            self._pending = set()  # of a body that was left: whoever takes its range over pushes it

    def _lands(self, key: str) -> bool:
        """Whether what is asked for of a chunk lands where its values are."""
        return True

    def _new_chunk(self, planned: PlannedChunk | PlannedSlice) -> Chunk | Slice:
        chunk = super()._new_chunk(planned)
        before = RangeSet([(0, self._restored)]) if self._restored else RangeSet()
        chunk.book = Book(before, self._restored, self._skipped)
        return chunk

    def resolve(self) -> None:
        """All members are here, and have sent again what had no answer: let the ranges be given out."""
        assert self._meeting is not None
        store, rank, leader = self._meeting
        members = self._entered.members
        clocks = self._clocks([json.loads(store.get(f"clock/{number}")) for number in range(len(members))])
        if rank == leader:
            finished: RangeSet | None = None
            for book in self._books().values():
                finished = book.ranges if finished is None else finished.intersection(book.ranges)
            ranges = RangeSet() if finished is None else finished
            about = {"ranges": ranges.to_json(), "clocks": clocks, "bound": self._entered.bound}
            self.links.answer(self._ask(self._desk, Kind.OPEN, about), self._desk, "the ranges' begin")
        self._versions = [parameter._version for parameter in self._parameters]
        self.refresh()

    def _clocks(self, reported: Sequence[int | None]) -> dict[str, int]:
        """By who takes ranges: the steps that it begins with. reported: by rank, None of a joiner."""
        clocks = starting_clocks(dict(zip(self._entered.members, reported, strict=True)))
        self._clock = clocks[self._me]
        return clocks

    def fetch_again(self) -> None:
        self.optimizers.forget(self._parameters)
        self._versions = [parameter._version for parameter in self._parameters]
        self.refresh()

    # ---- ranges

    @property
    def team(self) -> Group | None:
        """Those who work on each range together; None: this worker does so alone."""
        return None

    def part(self) -> None:
        """All members of the team have heard that they stop now: cut none off from what it waits for."""

    def lease(self, first: int, stop: int, stopping: bool = False) -> Lease:
        """A range of first..stop-1 to work on.

        If there is one at once, what was pushed may still be on its way; else that is answered before.
        stopping: this member was asked to stop. Raise RuntimeError when the generation is over.
        """
        if stopping:
            self.settle()
            return Lease(None)
        future, self._next_lease = self._next_lease, None
        if future is None or self._window != (first, stop):
            self._window = (first, stop)
            self.settle()
            future = self._ask_range()
            faults.reach("leasing", first + 1)
        elif not self.links.comes_before(future, [asked for asked, _ in self._fetches.values()]):
            # Others may wait for this one's last range, as it does for theirs.
            self.settle()
            faults.reach("leasing", first + 1)
        if not self.links.first_of(future, self._stop):
            return Lease(None)
        said = self.links.answer(future, self._desk, "a range to work on").meta
        finished, waited = int(said["finished"]), bool(said["waited"])
        if waited or "range" not in said:
            self.settle()
        if "range" not in said:
            return Lease(None, True, finished, waited)
        self._leased = int(said["range"])
        return Lease(self._leased, False, finished, waited)

    def _ask_range(self, sent: Sequence[int] = ()) -> Future[Answer]:
        """sent: ranges that are still on their way."""
        first, stop = self._window
        about = {"me": self._me, "first": first, "stop": stop, "sent": list(sent)}
        return self._ask(self._desk, Kind.LEASE, about)

    def interrupt(self) -> None:
        """Wait for a range no longer: this member is asked to stop. Any thread."""
        if not self._stop.done():
            self._stop.set_result(None)

    def refresh(self) -> None:
        """Begin to fetch the newest values of all chunks; nothing may be on its way. Rows are always new."""
        self._memory.mark()
        self._clean = set()
        self._pull(self.chunks)

    def _pull(self, chunks: Collection[PlannedChunk]) -> None:
        for chunk in chunks:
            server = self._homes[chunk.key][0]
            about = {"k": chunk.key, "rank": self._ranks[chunk.key]}
            asked = self._ask(server, Kind.PULL_CHUNK, about, out=self._values(chunk))
            self._fetches[chunk.key] = (asked, server)

    def audit(self, first: int, stop: int) -> Audit:
        """What the chunks say of the ranges first..stop-1. Raise ServerError."""
        lost: set[int] = set()
        repeated = skipped = 0
        for book in self._books().values():
            lost |= set(book.ranges.missing(first, stop))
            repeated = max(repeated, book.applied - len(book.ranges))
            skipped = max(skipped, book.skipped)
        return Audit(repeated, sorted(lost), skipped)

    def staleness(self) -> float | None:
        """Updates of others between the pull that the last push was computed on and the push: the mean over
        the chunks; None when no push was answered since the last call.
        """
        behind, self._behind = self._behind, []
        return sum(behind) / len(behind) if behind else None

    # ---- a step

    def begin_step(self) -> None:
        super().begin_step()
        self._offering.begin()

    def push(self, gradients: torch.Tensor) -> Pushed:
        """Send the next bucket's gradients (flat, in the layout's order) on their way.

        They are to be applied when the body commits: only then the norm and the options are known. Raise
        ServerError.
        """
        self.make_way()
        chunks = self._by_bucket[self._pushed]

        def offer(gradients: torch.Tensor) -> None:
            for chunk in chunks:
                if chunk.key in self._ahead_of_end:
                    continue  # it has the range
                gradient = gradients[chunk.start : chunk.stop]
                outgoing = self.wire.outgoing(chunk, gradient)
                self._gradients[chunk.key], self._outgoing[chunk.key] = gradient, outgoing
                self._offer(chunk, outgoing)

        try:
            self._memory.send(self._pushed, gradients, offer)
        except ConnectionError as error:
            raise ServerError(str(error)) from None
        self._pushed += 1
        return Pushed(self.wire.nbytes(len(gradients), gradients.dtype))

    def _offer(self, chunk: PlannedChunk, gradient: Outgoing) -> None:
        """Send what travels of a chunk's gradient. Raise ConnectionError."""
        client = self.links[self._homes[chunk.key][0]]
        self._offering.offer(client, self._entered.token, chunk.key, gradient)

    def prepare(self) -> float | None:
        """The norm of this worker's own gradients if there is to be one; it is finite exactly when they are.

        Raise ServerError.
        """
        self._get_ready()
        if not self._with_norm:
            return None
        return self.optimizers.norm([self.optimizers.square(*square) for square in self._squares()])

    def _get_ready(self) -> None:
        """Everything before this body is here, and its gradients are on their way. Raise ServerError."""
        self.settle()
        try:
            self._memory.sent()
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def _squares(self) -> list[tuple[int, float]]:
        """Sums of squares of what travels, each with the optimizer's number.

        A finite gradient may be infinite in 16 bits.
        """
        left = [chunk for chunk in self.chunks if chunk.key not in self._ahead_of_end]
        squares = [(chunk.optimizer, square_norm(self._parts(chunk))) for chunk in left]
        for key in self._slices.keys() - self._ahead_of_end:
            rows = self._outgoing[key]
            assert isinstance(rows, Rows)
            squares.append((self._target(key)[1], rows.square_norm()))
        return squares

    def _parts(self, chunk: PlannedChunk) -> list[torch.Tensor]:
        """What travels of a chunk's gradient, without padding, in the gradient's own type."""
        outgoing = self._outgoing[chunk.key]
        if isinstance(outgoing, Selected):
            return [outgoing.values]
        assert isinstance(outgoing, torch.Tensor)
        flat = outgoing.to(self._gradients[chunk.key].dtype)
        return [flat[start:stop] for _, _, start, stop in chunk.pieces]

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        """Ask for the next range, and say how the gradients count; the values follow."""
        self._skipping = frozenset(self.optimizers.skipped)
        self._recipe = self._rest_of(self.optimizers.recipe(scale, unused, skip), skip)
        self.optimizers.begin()
        keys = [key for key in self._keys_in_order() if key not in self._ahead_of_end]
        self._sent, self._pending = self._leased, set(keys)
        self._clean = self._chunks.keys() & self._ahead_of_end
        self._again = set()
        self._memory.mark()
        self._decided()
        try:
            # Before the pushes, or its answer would come behind all values.
            self._next_lease = self._ask_range([self._sent])
            self._send(keys[: len(keys) // 2])
            faults.reach("pushing", self._sent + 1)
            self._send(keys[len(keys) // 2 :])
        except ServerError as error:
            # The step stays committed: the rest of it leaves in the next generation.
            self.links.over(str(error))

    def _decided(self) -> None:
        """The body is committed, and its pushes are about to leave."""

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        super().settle(parameters, to_the_end)
        if parameters is None:
            self._take_rows(self._slices_of, to_the_end)
            self._take_answers(to_the_end)
        self._conclude()

    def _take_answers(self, to_the_end: bool) -> None:
        """Wait for what pushes are answered when their values are here already. Raise ServerError."""

    def _conclude(self) -> None:
        """Say which ranges are done, if any are."""
        self._count()
        if self._done:
            done, self._done = self._done, []
            try:
                self._ask(self._desk, Kind.FINISHED, {"me": self._me, "done": done})
            except ServerError as error:
                # The values are here. The next generation begins from what the chunks say themselves.
                self.links.over(str(error))

    def make_way(self) -> None:
        """As in `ServerExchange`: what was pushed may have to be sent again until it is answered."""
        if self._sent is None:
            return
        self.settle()
        if self._sent is not None:
            # Values may be here without it: they came early.
            raise ServerError(f"range {self._sent} has not left whole: it does in the next generation")

    def _send(self, keys: Iterable[str]) -> None:
        for key in keys:
            recipe, values = self._own(self._recipe, key), self._target(key)[2]
            number = self._leased if self._sent is None else self._sent
            form, gradient = self._offering.push(key, self._outgoing[key])
            about = {"k": key, "r": number, "recipe": recipe.to_json(), **form, **self._wanted(key)}
            if key in self._pulled and key not in self._fetches:
                self._based[key] = self._pulled[key].applied
            server, token = self._homes[key][0], self._entered.token
            asked = self.links.ask(server, Kind.PUSH_RANGE, token, about, gradient, values)
            self._fetches[key] = (asked, server)

    def _keys_in_order(self) -> list[str]:
        # Rows first: the next forward pass begins with them.
        return [*self._slices, *self._chunks]

    def _own(self, recipe: Recipe, key: str) -> Recipe:
        """What of it is about this chunk or slice."""
        own, optimizer, _ = self._target(key)
        skip = recipe.skip or optimizer in self._skipping
        return replace(recipe, unused=recipe.unused & own, skip=skip)

    def _wanted(self, key: str) -> dict[str, Any]:
        """What a push says of its answer."""
        return {"rank": self._ranks[key]} if key in self._ranks else {}

    def _owner_of(self, key: str) -> int:
        return self._target(key)[1]

    def _target(self, key: str) -> tuple[set[int], int, torch.Tensor | None]:
        """(its parameters, whose optimizer they are in, where new values go: None of a slice)."""
        if key in self._slices:
            index = self._slices[key].parameter
            return {index}, self.optimizers.owners[self.tables.name(index)], None
        planned = self._chunks[key]
        return {piece[0] for piece in planned.pieces}, planned.optimizer, self._values(planned)

    def _receive(self, key: str, to_the_end: bool) -> None:
        while True:
            asked = self._fetches.get(key)
            if asked is None:
                raise ServerError(f"the values of chunk {key} are not here")
            answer = self.links.answer(*asked, self._values_of(key), to_the_end)
            if not answer.meta.get("whole"):
                break
            # The server had no room for what was offered.
            self._offering.forget([key])
            self._send([key])
        self._take(key, answer)
        del self._fetches[key]

    def _take(self, key: str, answer: Answer) -> None:
        """Values have landed, or an answer without any."""
        said = answer.meta
        if key in self._chunks and not said.get("bare"):
            self._note_pulled(key, said)
        if "already" not in said or key not in self._pending:
            return
        self._pending.discard(key)
        # What is there when it is sent again is this worker's own push, whose answer was lost; what is there
        # when it is sent first is that of a worker which had the range before.
        applied = not self._recipe.skip and (not said["already"] or key in self._again)
        self._owing.landed(key, self._recipe.unused, applied)
        if not said["already"] and key in self._based:
            self._behind.append(max(0, int(said["before"]) - self._based[key]))

    def _note_pulled(self, key: str, said: dict[str, Any]) -> None:
        """What the values of a chunk are that are here."""
        self._pulled[key] = Offer(int(said["applied"]), said["ranges"], skipped=int(said.get("skipped", 0)))

    def _count(self) -> None:
        """A range that every chunk has answered is done."""
        if self._sent is not None and not self._pending:
            self._done.append(self._sent)
            self._clock = (self._clock or 0) + 1
            self._sent, self._gradients, self._outgoing = None, {}, {}

    # ---- within

    @property
    def _desk(self) -> str:
        """The server that gives the ranges out."""
        return self._homes[self._planned[0].key][0]

    def _books(self) -> dict[str, Book]:
        return books_of(self.links, self._entered.token, {key: home[0] for key, home in self._homes.items()})
