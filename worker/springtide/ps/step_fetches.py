"""Values of a common step on their way to this process. Script's thread only; answers land by others."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress

from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.sharding import PlannedChunk
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind

Asked = tuple[Future[Answer], str]
"""A request, and the server that it was sent to."""


class StepFetches:
    """Keep the requests for values of the newest committed step that were not waited for yet."""

    def __init__(self, context: PsContext) -> None:
        self._context = context
        self.asked: dict[str, Asked] = {}
        """Requests under way, by chunk."""
        self._tried = False

    def forget(self) -> None:
        """A generation begins, and the last one's answers mean nothing any more."""
        self.asked = {}

    def committed(self) -> None:
        """Note that this member has committed another step."""
        self._tried = False

    def fetch(self, chunks: Collection[PlannedChunk], step: int, at: str | None = None) -> None:
        """Ask for values as they are after a step.

        Args:
            chunks: Whose.
            step: Its number.
            at: The server; None: the first of each chunk's.

        Raises:
            ServerError: The connection is broken.
        """
        context = self._context
        for chunk in chunks:
            server = at or context.generation.homes[chunk.key][0]
            about = {"k": chunk.key, "s": step, "rank": context.sharding.urgency[chunk.key]}
            answer = context.ask(server, Kind.FETCH, about, out=context.values.of(chunk))
            self.asked[chunk.key] = (answer, server)

    def fetch_where_it_is(self, key: str, lost: ServerError) -> None:
        """Ask for a chunk's values at the first of its servers that can be asked.

        Args:
            key: The chunk's.
            lost: Raised when there is none.

        Raises:
            ServerError: No server can be asked.
        """
        for home in self._context.generation.homes[key]:
            try:
                self.fetch([self._context.sharding.by_key[key]], self._context.generation.step, home)
                return
            except ServerError as error:
                lost = error
        raise lost

    def receive(self, key: str, to_the_end: bool) -> None:
        """Wait for a chunk's values; its other servers have them too, should the first one be lost.

        Args:
            key: The chunk's.
            to_the_end: Wait also when the generation is over.

        Raises:
            ServerError: They do not come.
        """
        asked = self.asked.pop(key, None)
        if asked is None:
            raise ServerError(f"the values of chunk {key} are not here")
        context, (future, first) = self._context, asked
        try:
            self.answer(future, first, context.awaited(key), to_the_end)
            return
        except ServerError as error:
            lost = error
        for other in context.generation.homes[key]:
            if other == first:
                continue
            try:
                self.fetch([context.sharding.by_key[key]], context.generation.step, other)
                self.answer(self.asked.pop(key)[0], other, context.awaited(key), to_the_end)
                return
            except ServerError as error:
                lost = error
        raise lost

    def answer(self, future: Future[Answer], server: str, what: str, to_the_end: bool = False) -> Answer:
        """Wait for an answer.

        Args:
            future: The answer to come.
            server: Its id.
            what: The thing that is waited for, for messages.
            to_the_end: Of a step that this member has committed: wait also when the generation is over.

        Returns:
            The answer.

        Raises:
            ServerError: It does not come.
        """
        if not to_the_end:
            return self._context.connections.answer(future, server, what)
        return self.answer_to_the_end(future, server, what)

    def answer_to_the_end(self, future: Future[Answer], server: str, what: str) -> Answer:
        """Wait for an answer about a committed step, also when the generation is over.

        Args:
            future: The answer to come.
            server: Its id.
            what: The thing that is waited for, for messages.

        Returns:
            The answer.

        Raises:
            ServerError: It does not come.
        """
        if self._context.connections.outlived_by(future):
            self._try_step()
        return self._context.connections.answer(future, server, what, to_the_end=True)

    def _try_step(self) -> None:
        """Have the servers make the committed step for now, since other members may not have committed it."""
        if self._tried:
            return
        self._tried = True
        context = self._context
        for server in context.connections:
            with suppress(ServerError):  # the others have copies
                context.ask(server, Kind.TRY, {"s": context.generation.step, "me": context.settings.me})
