"""Rows of a table that lie in several slices, which may still have steps to make.

Threads and locks: threads that bring a late slice to its step, or give it up, call the gather; the last of
them reads the rows and answers. `_lock` guards how many slices are late and whether an error was given; rows
are read and answers given outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from springtide_ps.params.chunk import ChunkError
from springtide_ps.params.idmap import Ids
from springtide_ps.server.step_protocol import StepProtocolError

Done = Callable[[Any, Exception | None], None]
"""Takes (result, None), or (None, error)."""


class HasRows(Protocol):
    """A slice, or what stands for one."""

    def rows(self, ids: Ids) -> torch.Tensor:
        """Return the rows of these ids, float32 [len(ids), dim].

        Raises:
            StepProtocolError: they cannot be had.
        """
        ...


class RowGather:
    """Answer a question for rows of several slices once the late ones among them are there.

    It is called once for each late slice, with its error if it never will be there.

    Args:
        slices: what the rows are read from, and which ones.
        late: how many slices still have steps to make.
        done: gets the rows, one after another, or an error; once.
    """

    def __init__(self, slices: Sequence[tuple[HasRows, Ids]], late: int, done: Done) -> None:
        self._slices, self._late, self._done = slices, late, done
        self._lock = threading.Lock()

    def __call__(self, result: Any, error: Exception | None) -> None:
        with self._lock:
            self._late -= 1
            done, over = self._done, error is not None
            if over:
                self._done = lambda result, error: None
        if over:
            done(None, error)
        elif not self._late:
            self.give()

    def give(self) -> None:
        """Read the rows and answer."""
        try:
            rows = torch.cat([piece.rows(ids) for piece, ids in self._slices])
        except StepProtocolError as error:
            self._done(None, error)
            return
        except (ChunkError, KeyError, RuntimeError, MemoryError) as error:
            self._done(None, StepProtocolError(f"the rows cannot be read: {error}"))
            return
        self._done(rows, None)
