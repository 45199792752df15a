"""One open stream to a worker or parameter server: what is to be sent, in order, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from google.protobuf.message import Message as AnyMessage

from springtide_protocol.versions import may_send

Message = TypeVar("Message", bound=AnyMessage)

MAX_WAITING = 20_000  # messages; a process that reads nothing must not fill the memory


class Stream(Generic[Message]):
    """A queue that the gRPC handler drains. `end` closes it after what was put before."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.member = ""
        self.capabilities: frozenset[str] = frozenset()  # that both sides have
        self.ended = False
        self._queue: asyncio.Queue[Message | None] = asyncio.Queue()

    def put(self, message: Message) -> None:
        """Send a message; a process that does not read is cut off.

        Nothing is sent of a kind that the process does not understand.
        """
        if self.ended or not may_send(message.WhichOneof("message"), self.capabilities):
            return
        if self._queue.qsize() >= MAX_WAITING:
            self.end()
            return
        self._queue.put_nowait(message)

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[Message]:
        while (message := await self._queue.get()) is not None:
            yield message
