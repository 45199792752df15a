"""A step's values asked for during backward: they come while gradients of other layers still leave.

The servers make a step early if they know how it will be made (`springtide_ps.server.speculation`): like the
last one, with the optimizer's present options. The values land beside the parameters, which change only when
the step is committed and was made just so; if not, its values are fetched as without this.

The script's thread begins steps, commits and receives. `SpeculativePull.send` comes from it on the CPU, and
from the thread of a device's copies otherwise, between `expect` and the end of the body's copies: it takes
what `expect` has put down, and adds to what was asked for. Each of these is one operation on a dictionary, so
that no lock is needed. Values land from connections' threads, in memory that nothing else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

import torch

from springtide.ps.compression import Made
from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.sharding import PlannedChunk
from springtide.ps.step_fetches import Asked, StepFetches
from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import STEP_SPEC_KEY

_REST_LIMIT: Final = 64

Options = Callable[[], tuple[dict[str, Any], ...]]


class SpeculativeValues:
    """Ask for the values of a step that is not committed, for one worker.

    values: flat memory of the parameters by bucket, of which this has a second one.

    After a step that was made otherwise than expected (a batch of another size, a scheduler that moves in
    between), nothing is asked for in the next 1, 3, 7 ... 63 steps.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self._landing: list[torch.Tensor] = []
        self._step = -1
        self._last: StepSpec | None = None
        self._options: Options = tuple
        self._expected: StepSpec | None = None
        self._announced: set[str] = set()
        self._asked: dict[str, Asked] = {}
        self._abandoned: dict[str, Future[Answer]] = {}
        self._missed, self._rest = 0, 0

    @property
    def under_way(self) -> Sequence[Future[Answer]]:
        """Return the answers that were asked for in the running body."""
        return [future for future, _ in self._asked.values()]

    def begin(self, step: int, last: StepSpec | None, options: Options) -> None:
        """Begin a body that would make a step.

        Args:
            step: Its number.
            last: How the step before was made; None: it is not known.
            options: Returns the optimizers' present options.
        """
        self.abandon()
        self._step, self._expected, self._announced = step, None, set()
        self._last = None if last is None or last.skip or self._rest > 0 else last
        self._options = options
        self._rest = max(0, self._rest - 1)

    def expect(self, chunk: PlannedChunk) -> tuple[StepSpec, torch.Tensor] | None:
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
        """Note that the values of a chunk, which land where `expect` said, are asked for.

        Args:
            key: The chunk's.
            server: Its id.
            future: The answer to come.
        """
        self._asked[key] = future, server

    def announce(self, server: str, step_spec: StepSpec, me: str, ask: Callable[..., object]) -> None:
        """Tell a server before its first gradient how the step is expected to be made.

        Args:
            server: Its id.
            step_spec: How the step is expected to be made.
            me: This member.
            ask: Makes a request of (server, kind, meta).

        Raises:
            ServerError: The connection is broken.
        """
        if server not in self._announced:
            self._announced.add(server)
            ask(server, Kind.EXPECT, {"s": self._step, "me": me, STEP_SPEC_KEY: step_spec})

    def commit(self, step: int, made: StepSpec) -> dict[str, Asked]:
        """Note that the step is committed.

        Args:
            step: Its number.
            made: How it was made.

        Returns:
            The values by chunk, here or under way, and their server; nothing where another step was expected.
        """
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
        """Keep in mind that an answer that is not waited for any more may still land.

        Args:
            key: The chunk's.
            asked: The answer to come.
        """
        if not asked.done():
            self._abandoned[key] = asked

    def stop(self) -> None:
        """Ask for nothing more in this body, and give up what was asked for."""
        self._last = None
        self.abandon()

    def abandon(self) -> None:
        """Give up what was asked for. Its memory is used again when nothing can land there."""
        for key, (future, _) in list(self._asked.items()):  # another thread may send still
            self.keep(key, future)
        self._asked = {}


class SpeculativePull:
    """Pulls of a common step's values before it is committed. values: where they land, and when they may."""

    def __init__(self, context: PsContext, fetches: StepFetches, values: SpeculativeValues) -> None:
        self._context, self._fetches, self._values = context, fetches, values
        self._expected: dict[str, torch.Tensor] = {}  # where values of chunks land whose gradients leave next
        self._coming: dict[str, Asked] = {}  # of the step that is being committed
        self._came: dict[str, Future[Answer]] = {}  # used, and not waited for yet

    @property
    def awaited(self) -> Collection[str]:
        """Chunks whose values of the committed step are among what was asked for, and not taken yet."""
        return self._came.keys()

    def end_generation(self) -> None:
        """Wait for nothing any more; what was asked for may still land beside the parameters."""
        for key, future in self._came.items():
            self._values.keep(key, future)
        self._came = {}
        self._values.abandon()

    def begin_step(self, last: StepSpec | None) -> None:
        """Begin a body. last: how the step before was made; None: nothing is to be asked for in this one."""
        self._expected = {}
        step = self._context.generation.step + 1
        self._values.begin(step, last, lambda: self._context.optimizers.options)

    def expect(self, chunks: Collection[PlannedChunk]) -> None:
        """Have values of these chunks asked for as their gradients leave. Raise ServerError."""
        context = self._context
        for chunk in chunks:
            if (expected := self._values.expect(chunk)) is not None:
                step_spec, self._expected[chunk.key] = expected
                server = context.generation.homes[chunk.key][0]
                self._values.announce(server, step_spec, context.settings.me, context.ask)

    def send(self, server: str, made: Made, key: str, gradient: torch.Tensor | SparseGradient) -> bool:
        """Send a chunk's gradient, and ask for its values with it.

        Args:
            server: Where to.
            made: The state that the step makes.
            key: The chunk's.
            gradient: The form in which it travels.

        Returns:
            False: nothing is to be asked for, and the gradient was not sent.

        Raises:
            ConnectionError: The connection is broken.
        """
        out = self._expected.pop(key, None)
        if out is None:
            return False
        context = self._context
        client, urgency = context.connections[server], context.sharding.urgency[key]
        asked = client.stage_speculative(*made, context.settings.me, key, gradient, out, urgency)
        self._values.asked(key, server, asked)
        return True

    def begin_commit(self, step: int, step_spec: StepSpec) -> None:
        """Keep what was asked for if the step was made as expected.

        Args:
            step: The committed step's number.
            step_spec: How it was made.
        """
        self._coming = self._values.commit(step, step_spec)

    def use(self, key: str) -> bool:
        """Take a chunk's values of the committed step from what was asked for, if they are among that."""
        if (coming := self._coming.pop(key, None)) is None:
            return False
        self._fetches.asked[key] = coming
        self._came[key] = coming[0]
        return True

    def end_commit(self) -> bool:
        """Let go of what is not needed; return whether values may be here before the step is made."""
        for key, (future, _) in self._coming.items():
            self._values.keep(key, future)
        self._coming = {}
        return bool(self._came)

    def receive(self, key: str, to_the_end: bool) -> bool:
        """Wait for a chunk's values if they were asked for early.

        Args:
            key: The chunk's.
            to_the_end: Wait also when the generation is over.

        Returns:
            False: they were not, or do not come, and are asked for as without this.

        Raises:
            ServerError: They cannot be asked for either.
        """
        future = self._came.pop(key, None)
        if future is None:
            return False
        _, server = self._fetches.asked.pop(key)
        try:
            self._fetches.answer(future, server, self._context.awaited(key), to_the_end)
        except ServerError as error:
            self._values.keep(key, future)
            self._fetches.fetch_where_it_is(key, error)
            return False
        self._values.take(self._context.sharding.by_key[key])
        return True
