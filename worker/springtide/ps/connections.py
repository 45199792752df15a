"""Connections to the servers of the present generation, and waits that end when it is over."""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Final, TypeVar

import torch

from springtide.comm.store import FormationCancelled
from springtide_ps.server.failed_shards import StepFailedError
from springtide_ps.wire.auth import Tokens
from springtide_ps.wire.client import Answer, RefusedError, ServerClient, ServerLostError
from springtide_ps.wire.frames import PART_BYTES, Kind
from springtide_ps.wire.stream import PeerClosedError, RejectedError, parse_address
from springtide_ps.wire.tls import client_context

Result = TypeVar("Result")
_AGAIN_SECONDS: Final = (0.05, 0.3)
"""How long, at least and at most, until a connection is tried again that was closed without a word."""
_NAMED = re.compile(r"parameter server \[?([0-9a-fA-F.:]+)\]?:\d+")


class ServerError(RuntimeError):
    """A server is lost, or refuses: the step cannot go on in this generation."""


class NotWaitedForError(ServerError):
    """An answer is not waited for any more, since the generation is over: that is not the server's fault."""


def servers_in(error: BaseException) -> list[str]:
    """IP address of the parameter server that an error is about, if of any: of several the last, since a
    server whose copies cannot be made says which other one it does not reach. None where the error only tells
    that the generation is over, for what another member may have complained of.
    """
    if isinstance(error, (NotWaitedForError, FormationCancelled)):
        return []
    return _NAMED.findall(str(error))[-1:]


class Connections:
    """One connection to each server, kept from generation to generation. `over` is for any thread.

    authority: what signs the servers' certificates, in PEM; empty: no TLS. part_bytes: a slice of a table
    that is larger is sent and read in parts of so many.
    """

    def __init__(
        self,
        token: Tokens,
        connect_seconds: float,
        answer_seconds: float,
        authority: str = "",
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.part_bytes = part_bytes
        self._token = token
        self._connect_seconds, self.answer_seconds = connect_seconds, answer_seconds
        self._tls = client_context(authority) if authority else None
        self._clients: dict[str, ServerClient] = {}
        self._needed: list[str] = []
        self._over: Future[str] = Future()
        self._entered_at = 0.0  # monotonic: when the present generation's connections were asked for
        self._questions: dict[str, Future[Answer]] = {}  # by server: only that it answers is of interest
        self.failed_step = ""
        """Words of a server whose step on a chunk has failed; for others to forget."""

    def __getitem__(self, server: str) -> ServerClient:
        return self._clients[server]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the servers that this generation's steps need."""
        return iter(self._needed)

    def connect(
        self, servers: Mapping[str, str], on_over: Callable[[Callable[[], object]], None] | None = None
    ) -> None:
        """Have connections to exactly these servers.

        Args:
            servers: Address by id.
            on_over: Has a function called when the generation is over, which ends every wait from then on.

        Raises:
            ServerError: A server cannot be reached; it is named.
        """
        self._over, self._entered_at = Future(), time.monotonic()
        if on_over is not None:
            on_over(lambda: self.over("the generation is over"))
        for server in [s for s in self._clients if s not in servers]:
            self._clients.pop(server).close()
        for server, address in servers.items():
            client = self._clients.get(server)
            if client is not None and client.broken is None and client.address == address:
                continue
            if client is not None:
                self._clients.pop(server).close()
            try:
                self._clients[server] = self._connect(parse_address(address))
            except (OSError, ValueError, RejectedError) as error:
                raise ServerError(f"parameter server {address} cannot be reached: {error}") from None
        self._needed = list(self._clients)
        for server, client in self._clients.items():
            self._ask_for_life(server, client)

    def _ask_for_life(self, server: str, client: ServerClient) -> None:
        """Have a server answer that has been silent in this generation, since only then it is `reached`.

        Most members ask servers nothing before all of them have met, and they may wait long for one of them.
        """
        question = self._questions.get(server)
        if client.heard_at < self._entered_at and (question is None or question.done()):
            with contextlib.suppress(ServerLostError):
                self._questions[server] = client.status()

    def _connect(self, address: tuple[str, int]) -> ServerClient:
        """Connect to a server, again for some time when it closes the connection without a word.

        It does so when it has too many connections, or too many at once that have not said who they are.
        Nobody waits for the connection once the generation is over.

        Raises:
            RejectedError: It does not know the token, or this process's is another one.
            OSError: It cannot be reached.
        """
        end = time.monotonic() + self._connect_seconds
        while True:
            try:
                return ServerClient(
                    address, self._token, self._connect_seconds, self._tls, silent=self._connect_seconds
                )
            except (PeerClosedError, ConnectionResetError, BrokenPipeError):
                pause = random.uniform(*_AGAIN_SECONDS)
                if time.monotonic() + pause > end or self._is_over_in(pause):
                    raise

    def _is_over_in(self, seconds: float) -> bool:
        """Wait for so long, or until the generation is over; return whether it is."""
        return bool(wait([self._over], timeout=seconds).done)

    def reached(self) -> list[str]:
        """Return the servers that have been heard in this generation, and whose connection is whole."""
        return sorted(
            server
            for server, client in self._clients.items()
            if client.broken is None and client.heard_at >= self._entered_at
        )

    def rely_on(self, servers: Collection[str]) -> None:
        """Need these servers only; others may end, but a checkpoint may still be read from them."""
        self._needed = [server for server in self._clients if server in servers]

    def over(self, reason: str) -> None:
        """End every wait: the generation is over."""
        if not self._over.done():
            self._over.set_result(reason)

    def result(self, future: Future[Result], what: Callable[[], str], to_the_end: bool = False) -> Result:
        """Wait for what a server answers.

        Args:
            future: The answer to come.
            what: Says what is being waited for.
            to_the_end: Wait also when the generation is over, for an answer that does not need the other
                members.

        Raises:
            ServerError: The server refuses or does not answer, or the generation is over.
        """
        if not future.done():
            started = time.monotonic()
            either: list[Future[Any]] = [future] if to_the_end else [future, self._over]
            wait(either, timeout=self.answer_seconds, return_when=FIRST_COMPLETED)
            if not future.done():
                if self._over.done() and not to_the_end:
                    reason = self._over.result()
                    kind = ServerError if _NAMED.search(reason) else NotWaitedForError
                    raise kind(f"{what()}: {reason}")
                raise ServerError(f"{what()}: no answer in {time.monotonic() - started:.0f} s")
        try:
            return future.result()
        except (ServerLostError, RefusedError, ValueError) as error:
            told = f"{what()}: {error}"
            if isinstance(error, RefusedError) and error.error == StepFailedError.__name__:
                self.failed_step = told
            raise ServerError(told) from None

    def outlived_by(self, future: Future[Any]) -> bool:
        """Wait for it as `result` does. True: it is still open, and the generation is over."""
        wait([future, self._over], timeout=self.answer_seconds, return_when=FIRST_COMPLETED)
        return self._over.done() and not future.done()

    def first_of(self, future: Future[Any], other: Future[Any]) -> bool:
        """Wait for either of two, at most as long as `result` does.

        Args:
            future: The one that is wanted.
            other: The one that ends the wait.

        Returns:
            False: only `other` is done.
        """
        both: list[Future[Any]] = [future, other, self._over]
        wait(both, timeout=self.answer_seconds, return_when=FIRST_COMPLETED)
        return future.done() or not other.done()

    def comes_before(self, future: Future[Any], others: Iterable[Future[Any]]) -> bool:
        """Wait until one is done, or all of the others are.

        Args:
            future: The one that is wanted.
            others: They end the wait together.

        Returns:
            False: it is not done, or the generation is over.
        """
        left = {other for other in others if not other.done()}
        while left and not future.done() and not self._over.done():
            both: list[Future[Any]] = [future, self._over, *left]
            done, _ = wait(both, timeout=self.answer_seconds, return_when=FIRST_COMPLETED)
            if not done:
                break
            left -= done
        return future.done()

    def ask(
        self,
        server: str,
        kind: Kind,
        token: tuple[int, int, int],
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]:
        """Make a request.

        Args:
            server: Its id.
            kind: Of the request.
            token: The generation's.
            meta: Its content, in JSON's types.
            payload: The tensor that it brings.
            out: Memory that the answer's payload comes into.
            any_size: Whether the answer's payload may have any size.

        Returns:
            The answer to come.

        Raises:
            ServerError: The connection is broken.
        """
        try:
            return self._clients[server].ask_step(kind, token, meta, payload, out, any_size=any_size)
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def answer(self, future: Future[Answer], server: str, what: str, to_the_end: bool = False) -> Answer:
        """Wait for an answer, like `result`, with the server's name in messages.

        Args:
            future: The answer to come.
            server: Its id.
            what: The thing that is waited for, for messages.
            to_the_end: Wait also when the generation is over.

        Raises:
            ServerError: It does not come.
        """
        return self.result(
            future, lambda: f"{what} at parameter server {self._clients[server].address}", to_the_end
        )

    def answers(self, asked: Sequence[tuple[str, Future[Answer]]], what: str) -> list[Answer]:
        """Wait for the answer to each request.

        The first that fails ends the wait for the others, which may wait for what failed.

        Args:
            asked: (server, answer to come).
            what: The thing that is waited for, for messages.

        Returns:
            The answers in the same order.

        Raises:
            ServerError: One does not come.
        """
        servers = {future: server for server, future in asked}
        left: set[Future[Any]] = set(servers)
        end = time.monotonic() + self.answer_seconds
        while left and not self._over.done():
            limit = max(0.0, end - time.monotonic())
            done, _ = wait({*left, self._over}, timeout=limit, return_when=FIRST_COMPLETED)
            if not done:
                missing = ", ".join(self._clients[servers[future]].address for future in left)
                raise ServerError(
                    f"{what} at parameter server {missing}: no answer in {self.answer_seconds:g} s"
                )
            for future in done & left:
                self.answer(future, servers[future], what)
            left -= done
        return [self.answer(future, server, what) for server, future in asked]

    def close(self) -> None:
        self.over("this process ends")
        while self._clients:
            self._clients.popitem()[1].close()
