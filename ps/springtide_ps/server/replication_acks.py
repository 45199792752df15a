"""Pushes that are answered when other servers have made them, too.

Threads and locks: the thread that reads a push calls `when_all`, and threads that receive other servers'
answers count them; a thread on which a generation enters calls `enter`. `_lock` guards the pushes that wait
and their counts; `then` is called outside of it, by the thread that ends the wait.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from springtide_ps.server.step_protocol import Token


class ReplicationAcks:
    """Wait for copies to make a push, at most as long as its generation lasts.

    A copy on a server that hangs says nothing, for as long as its connection lives. So the next generation,
    which is made without it, ends the wait: the worker that pushed gets an error, and pushes again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Token, Callable[[str], None]]] = {}
        self._token: Token | None = None

    def when_all(self, token: Token, copies: list[Future[Any]], then: Callable[[str], None]) -> None:
        """Call `then` once, when all copies are made or the generation is over.

        Args:
            token: the generation.
            copies: the answers of the servers that hold copies.
            then: gets the first error as text; "": there was none.
        """
        with self._lock:
            number, left, errors = next(self._numbers), [len(copies)], [""]
            self._waiting[number] = token, then
            over = self._token is not None and token < self._token

        def one(future: Future[Any]) -> None:
            error = future.exception()
            with self._lock:
                errors[0] = errors[0] or ("" if error is None else str(error))
                left[0] -= 1
                last = left[0] == 0
            if last:
                self._end(number, errors[0])

        if over:
            self._end(number, _over(token))
        elif not copies:
            self._end(number, "")
        for future in copies:
            future.add_done_callback(one)

    def enter(self, token: Token) -> None:
        """End all waits of older generations, since this one begins."""
        with self._lock:
            self._token = token if self._token is None else max(token, self._token)
            older = [(number, of) for number, (of, _) in self._waiting.items() if of < self._token]
        for number, of in older:
            self._end(number, _over(of))

    def _end(self, number: int, error: str) -> None:
        with self._lock:
            found = self._waiting.pop(number, None)
        if found is not None:
            found[1](error)


def _over(token: Token) -> str:
    return f"generation {token} is over"
