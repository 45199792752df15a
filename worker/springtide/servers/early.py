"""A step's values asked for during backward: they come while gradients of other layers still leave.

The servers make a step early if they know how it will be made (`server.speculative_copy`): as the last
one was, with the optimizer's present options. What they send lands beside the parameters, which change only
when the step is committed and was made just so; if not, its values are fetched as without this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import torch

from springtide.exchange.groups import Group
from springtide.exchange.store import StreamStore
from springtide.servers.leading import Place
from springtide.servers.links import ServerError
from springtide.servers.plan import PlannedChunk
from springtide.servers.wire import Made, Pushed
from springtide.servers.within import WithinExchange
from springtide_ps.params.chunk import Recipe
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind

_REST_LIMIT: Final = 64

Asked = tuple[Future[Answer], str]
Options = Callable[[], tuple[dict[str, Any], ...]]


class EarlyValues:
    """Of one worker. values: flat memory of the parameters by bucket, of which this has a second one.

    After a step that was made otherwise than expected (a batch of another size, a scheduler that moves in
    between), nothing is asked for in the next 1, 3, 7 ... 63 steps.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self._landing: list[torch.Tensor] = []
        self._step = -1
        self._last: Recipe | None = None
        self._options: Options = tuple
        self._expected: Recipe | None = None
        self._told: set[str] = set()
        self._asked: dict[str, Asked] = {}
        self._abandoned: dict[str, Future[Answer]] = {}
        self._missed, self._rest = 0, 0

    def begin(self, step: int, last: Recipe | None, options: Options) -> None:
        """A body begins that would make this step. last: how the step before was made, if that is known."""
        self.abandon()
        self._step, self._expected, self._told = step, None, set()
        self._last = None if last is None or last.skip or self._rest > 0 else last
        self._options = options
        self._rest = max(0, self._rest - 1)

    def expect(self, chunk: PlannedChunk) -> tuple[Recipe, torch.Tensor] | None:
        """How the step is expected to be made, and where the chunk's values may land; None: nothing is to be
        asked for.
        """
        still = self._abandoned.get(chunk.key)
        if self._last is None or (still is not None and not still.done()):
            return None
        if self._expected is None:
            self._expected = replace(self._last, groups=self._options())
        self._abandoned.pop(chunk.key, None)
        if not self._landing:
            self._landing = [torch.empty_like(value) for value in self._values]
        return self._expected, self._landing[chunk.bucket][chunk.start : chunk.stop]

    def asked(self, key: str, server: str, future: Future[Answer]) -> None:
        """The values of a chunk, which land where `expect` said, are asked for."""
        self._asked[key] = future, server

    def tell(self, server: str, recipe: Recipe, me: str, ask: Callable[..., object]) -> None:
        """Before the first gradient the server hears how the step is expected to be made. Raise ServerError.

        ask: of (server, kind, what).
        """
        if server not in self._told:
            self._told.add(server)
            ask(server, Kind.EXPECT, {"s": self._step, "me": me, "recipe": recipe.to_json()})

    def commit(self, step: int, made: Recipe) -> dict[str, Asked]:
        """The step is committed, made like this: the values by chunk, here or under way, and their server."""
        if not self._asked or self._step != step:
            self.abandon()
            return {}
        if made != self._expected:
            self._missed = min(self._missed + 1, 6)
            self._rest = min(2**self._missed - 1, _REST_LIMIT)
            self.abandon()
            return {}
        self._missed = 0
        asked, self._asked = self._asked, {}
        return asked

    def take(self, chunk: PlannedChunk) -> None:
        """The values of a chunk have come: have them where they belong."""
        span = slice(chunk.start, chunk.stop)
        self._values[chunk.bucket][span].copy_(self._landing[chunk.bucket][span])

    def keep(self, key: str, asked: Future[Answer]) -> None:
        """An answer that is not waited for any more may still land."""
        if not asked.done():
            self._abandoned[key] = asked

    def stop(self) -> None:
        """Nothing more is asked for in this body, and what was is not needed."""
        self._last = None
        self.abandon()

    def abandon(self) -> None:
        """What was asked for is not needed. Its memory is used again when nothing can land there."""
        for key, (future, _) in list(self._asked.items()):  # another thread may send still
            self.keep(key, future)
        self._asked = {}


class EarlyExchange(WithinExchange):
    """As `WithinExchange`, with values that are asked for during backward.

    early: False for never. The norm of all gradients, where it matters, is known too late for that.
    """

    def __init__(self, *args: Any, early: bool = True, **named: Any) -> None:
        super().__init__(*args, **named)
        self._wants_early = early and not self._with_norm
        self._early = EarlyValues(self._memory.values)
        self._expected: dict[str, torch.Tensor] = {}  # where values of chunks land whose gradients leave next
        self._came_early: dict[str, Future[Answer]] = {}
        self._coming: dict[str, Asked] | None = {}

    def begin_generation(
        self, place: Place, group: Group, store: StreamStore, *, holds: bool, leader: int, fresh: bool
    ) -> None:
        for key, future in self._came_early.items():
            self._early.keep(key, future)
        self._came_early = {}
        self._early.abandon()
        super().begin_generation(place, group, store, holds=holds, leader=leader, fresh=fresh)

    def begin_step(self) -> None:
        super().begin_step()
        self._expected = {}
        self._early.begin(self._step + 1, self._last_made(), lambda: self.optimizers.options)

    def _last_made(self) -> Recipe | None:
        """How the last step was made; None: nothing is to be asked for early in the next one."""
        last = self.recipe if self._wants_early and not self._saw_within else None
        if last is not None and last.before:
            return None  # what is seen within a body comes then
        return last

    def push(self, gradients: torch.Tensor) -> Pushed:
        self._await_commits()
        for chunk in self._by_bucket[self._pushed]:
            if self._round == 0 and (expected := self._early.expect(chunk)) is not None:
                recipe, self._expected[chunk.key] = expected
                self._early.tell(self._homes[chunk.key][0], recipe, self._me, self._ask)
        return super().push(gradients)

    def _send_gradient(
        self, server: str, made: Made, key: str, gradient: torch.Tensor | SparseGradient
    ) -> None:
        out = self._expected.pop(key, None)
        if out is None:
            super()._send_gradient(server, made, key, gradient)
            return
        asked = self.links[server].stage_early(*made, self._me, key, gradient, out, self._ranks[key])
        self._early.asked(key, server, asked)

    def commit(self, scale: float, unused: Collection[int], skip: bool = False) -> None:
        self._coming = None
        super().commit(scale, unused, skip)
        unneeded: dict[str, Asked] = self._coming or {}
        for key, asked in unneeded.items():
            self._early.keep(key, asked[0])
        self._coming, self._ahead = {}, bool(self._came_early or self._seen)

    def _fetch(self, chunks: Collection[PlannedChunk], step: int, at: str | None = None) -> None:
        if self._coming is None:
            assert self.recipe is not None
            self._coming = self._early.commit(step, self.recipe)
        for chunk in chunks:
            if (coming := self._coming.pop(chunk.key, None)) is None:
                super()._fetch([chunk], step, at)
                continue
            self._fetches[chunk.key] = coming
            self._came_early[chunk.key] = coming[0]

    def _receive(self, key: str, to_the_end: bool) -> None:
        future = self._came_early.pop(key, None)
        if future is None:
            super()._receive(key, to_the_end)
            return
        _, server = self._fetches.pop(key)
        result = self._patient if to_the_end else self.links.answer
        try:
            result(future, server, self._values_of(key))
        except ServerError as error:
            self._early.keep(key, future)
            self._fetch_where_it_is(key, error)
            super()._receive(key, to_the_end)
            return
        self._early.take(self._chunks[key])

    def _fetch_where_it_is(self, key: str, lost: ServerError) -> None:
        """Ask for the values of a committed step as if they had not been asked for early."""
        for home in self._homes[key]:
            try:
                super()._fetch([self._chunks[key]], self._step, home)
                return
            except ServerError as error:
                lost = error
        raise lost
