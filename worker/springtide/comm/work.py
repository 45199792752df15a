"""Messages and collectives of a group, waited for so that nothing can hold the script's thread for long.

When a connection breaks, the backend (gloo) may lose the very message that was moving on it, or the
collective that it was part of, whose wait then ends by its timeout alone: it fails what is still to be read
from the connection, and forgets what it has read in part. A sum has other parts under way, which fail it; an
exchange (all-to-all) often has none. So soon after the group was shut, all that has not ended is lost,
whether anybody waits for it or not. A collective is waited for in short turns; a message, whose wait would
ignore a timeout, by threads of the group's.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Protocol

import torch

_LOOK_SECONDS = 0.02
_LOST_SECONDS = 0.25
"""Time after which what has not failed since its group was shut is lost: others fail within milliseconds."""
_CLOSED_SECONDS = 0.02
"""The same once the backend has closed the connections: before that it has failed all that it ever will."""
_TURN = timedelta(seconds=_LOOK_SECONDS)


def is_lost(seconds: float | None, is_disconnected: Callable[[], bool] = lambda: False) -> bool:
    """Return whether what has not ended in a group will never end.

    Args:
        seconds: since the group was shut; None: it was not.
        is_disconnected: whether the backend has closed the group's connections.
    """
    if seconds is None or seconds < _CLOSED_SECONDS:
        return False
    return seconds >= _LOST_SECONDS or is_disconnected()


def keep_for_ever(*items: object) -> None:
    """Leave a reference that nobody gives back.

    Of groups with collectives that did not end after the shutdown: freeing them, also when the interpreter
    ends, would block for their timeout. And of memory that such a collective may still write into.
    """
    for item in items:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


class Ending(Protocol):
    """Work that may still be under way."""

    def is_completed(self) -> bool: ...


_until_done: list[tuple[list[Ending], tuple[object, ...]]] = []


def keep_until_done(works: Iterable[Ending], *items: object) -> None:
    """Leave references as `keep_for_ever` does, until all of these works have ended and `let_go` is called.

    Args:
        works: of a group; they are kept, too, with the memory that they write into.
        items: what they need.
    """
    pending = list(works)
    keep_for_ever(*pending, *items)
    _until_done.append((pending, (*pending, *items)))


def let_go() -> int:
    """Give back what works needed that have ended since; return of how many groups. The script's thread."""
    ended = [entry for entry in _until_done if all(work.is_completed() for work in entry[0])]
    for entry in ended:
        _until_done.remove(entry)
        for item in entry[1]:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(item))
    return len(ended)


def drop_apart(works: list[Any]) -> None:
    """Empty a list of works that have ended, on a thread of its own.

    The last reference to a work of a group that was shut frees the group's connections, for which gloo waits
    for its own threads (measured: 1 to 7 ms).

    Args:
        works: that nobody else uses.
    """
    # No daemon: the interpreter ends a daemon that comes back to it after its end in the middle of a
    # destructor, and with it the process (before Python 3.14).
    threading.Thread(target=works.clear, name="springtide-drop").start()


class Collective:
    """A collective under way.

    Args:
        work: the backend's.
        is_lost: whether it is lost unless it has ended, as `is_lost` says of its group.
    """

    def __init__(self, work: Any, is_lost: Callable[[], bool]) -> None:
        self._work, self._is_lost = work, is_lost

    def wait(self) -> bool:
        """Raise RuntimeError when it fails, or is lost in a group that was shut."""
        lost = False
        while not lost:
            try:
                self._work.wait(_TURN)
                return True
            except RuntimeError:
                if self._work.is_completed():
                    # It came while the exception was made, or failed: this says which.
                    self._work.wait()
                    return True
            lost = self._is_lost()
        raise RuntimeError("the group was shut while a collective was under way")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> object:
        return self._work.exception()


class Message:
    """A send or receive under way; `tensor` is its memory."""

    def __init__(self, work: Any, tensor: torch.Tensor, waiter: Waiter) -> None:
        self._work, self._tensor, self._waiter = work, tensor, waiter
        self._ended = False
        self.lost = False
        """The backend will never say what became of it, so its memory and the group must not be freed."""

    def wait(self) -> bool:
        """Raise RuntimeError when it fails or the group is shut. Calls after the first do nothing."""
        if not self._ended and not self.lost:
            try:
                self.lost = not self._waiter.wait(self._work)
            finally:
                self._ended = not self.lost
            if self.lost:
                raise RuntimeError("the group was shut while a message was on its way")
        return True

    def is_completed(self) -> bool:
        return self._ended


_Asked = queue.SimpleQueue[tuple[Any, threading.Event, list[BaseException]] | None]


class Waiter:
    """Threads that wait for messages: one for each thread that asks, made when that one first does, so that
    nobody waits for what another one waits for.

    By themselves messages would be waited for as long as connecting may take.
    """

    def __init__(self, timeout: timedelta, is_shut: Callable[[], bool]) -> None:
        self._timeout, self._is_shut = timeout, is_shut
        self._asked: dict[int, _Asked] = {}

    def wait(self, work: Any) -> bool:
        """False: the group was shut, and the message is lost. Raise the backend's RuntimeError."""
        me = threading.get_ident()
        if (asked := self._asked.get(me)) is None:
            asked = self._asked[me] = queue.SimpleQueue()
            threading.Thread(target=self._run, args=(asked,), name="springtide-messages", daemon=True).start()
        done, errors = threading.Event(), list[BaseException]()
        asked.put((work, done, errors))
        while not done.wait(_LOOK_SECONDS):
            if self._is_shut() and not done.wait(_LOST_SECONDS):
                self._asked.pop(me, None)  # its thread is lost with it
                return False
        if errors:
            raise errors[0]
        return True

    def close(self) -> None:
        """End the threads; no message may be under way."""
        asked, self._asked = self._asked, {}
        for each in asked.values():
            each.put(None)

    def _run(self, asked: _Asked) -> None:
        while (next_one := asked.get()) is not None:
            work, done, errors = next_one
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                errors.append(error)
            finally:
                # Not kept until the next one comes: torch frees it without the interpreter's lock, and where
                # the interpreter ends meanwhile, to ask for the lock again ends the process by SIGABRT.
                del next_one, work, errors
                done.set()
