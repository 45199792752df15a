"""Shards that make a step before it is decided, for those who want its values early (see `early`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from springtide_ps.chunk import Chunk, Recipe
from springtide_ps.copying import CopyingShards
from springtide_ps.early import Foresight, not_foreseen
from springtide_ps.gathered import Done, GatheredRows, HasRows
from springtide_ps.held import Held, Sum
from springtide_ps.idmap import Ids
from springtide_ps.rounds import RoundError, Token
from springtide_ps.rows_within import ChangedRows
from springtide_ps.slices import Slice
from springtide_ps.within import Parts

log = logging.getLogger("springtide.ps")


@dataclass(frozen=True, slots=True)
class _SliceWithin:
    """A slice after the parts of a step that is not decided."""

    key: str
    held: Held
    step: int
    recipe: Recipe

    def rows(self, ids: Ids) -> torch.Tensor:
        held = self.held
        with held.lock:
            if held.version != self.step - 1 or not isinstance(held.chunk, Slice):
                raise RoundError(
                    f"rows of {self.key!r} within step {self.step} are asked for, and step {held.version} is "
                    "made"
                )
            return held.changed.rows(held.chunk, held.totals(self.step), self.step, self.recipe, ids)


class EarlyShards(CopyingShards):
    """As `Shards`."""

    _foresight = Foresight(-1, None)
    _parts = Parts()

    def foresee(self, token: Token, step: int, member: str, recipe: Recipe) -> None:
        """A member expects the step to be made like this. Who expects it otherwise than another gets nothing
        early, and no more do the others.
        """
        refused: list[Done] = []
        with self._lock:
            self._rounds.check_word(token, step, member)
            self._foresight = self._foresight.with_another(step, recipe)
            if self._foresight.recipe is None:
                for held in self._held.values():
                    refused += held.early.forget()
        for done in refused:
            done(None, not_foreseen(step))

    def fetch_early(self, token: Token, step: int, key: str, done: Done) -> None:
        """`done` gets what the chunk's values after `step` will be if it is made as foreseen; or what they
        are, if it is made before that.
        """
        with self._lock:
            self._rounds.may_fetch(token, step)
            held = self._held_dense(key)
            if held.version < step:
                if self._foresight.step != step or self._foresight.recipe is None:
                    raise not_foreseen(step)
                held.early.waiting.append((step, done))
                self._want(key, held, step)
                return
            assert isinstance(held.chunk, Chunk)
            values = held.chunk.values
        done(values, None)

    def within(self, token: Token, step: int, member: str, recipe: Recipe) -> None:
        """A member has made these parts of the step so far, whose gradients are here (see `within`)."""
        with self._lock:
            self._rounds.check_parts(token, step, member, recipe)
            self._parts = self._parts.with_word(step, recipe)

    def fetch_within(self, token: Token, step: int, key: str, count: int, done: Done) -> None:
        """`done` gets the chunk's values after the first `count` parts of a step that is not decided.

        The step before it is decided, and may still have to be made: its values may have been there early.
        """
        with self._lock:
            self._rounds.may_fetch(token, step)
            held = self._held_dense(key)
            recipe = self._parts.first(step, count)
            if held.version < step - 1 == self._rounds.version:
                held.waiting.append((step - 1, partial(self._fetch_later, token, step, key, count, done)))
                return
            held.lock.acquire()
        try:
            if held.version != step - 1 or not isinstance(held.chunk, Chunk):
                raise RoundError(f"parts of step {step} are asked for, and step {held.version} is made")
            totals = held.totals(step)
            values = held.early.reach(held.chunk, totals, step, recipe).values.clone()
        finally:
            held.lock.release()
        done(values, None)

    def fetch_rows_within(
        self, token: Token, step: int, wanted: Sequence[tuple[str, Ids]], count: int, done: Done
    ) -> None:
        """As `fetch_rows`, after the first `count` parts of a step that is not decided."""
        with self._lock:
            self._rounds.may_fetch(token, step)
            recipe, slices = self._parts.first(step, count), list[tuple[HasRows, Ids]]()
            for key, ids in wanted:
                self.slice_of(key)
                slices.append((_SliceWithin(key, self._held[key], step, recipe), ids))
            before = step - 1 == self._rounds.version
            late = {key for key, _ in wanted if before and self._held[key].version < step - 1}
            answer = GatheredRows(slices, len(late), done)
            for key in late:
                self._held[key].waiting.append((step - 1, answer))
        if not late:
            answer.give()

    @property
    def dense_bytes(self) -> int:
        """Of the chunks that can have a second copy."""
        with self._lock:
            return sum(h.chunk.nbytes for h in self._held.values() if isinstance(h.chunk, Chunk))

    def _fetch_later(
        self, token: Token, step: int, key: str, count: int, done: Done, _: Any, error: Exception | None
    ) -> None:
        """The step before is made, or never will be here."""
        try:
            if error is not None:
                raise error
            self.fetch_within(token, step, key, count, done)
        except Exception as failure:  # on the thread that makes the steps, which has no part in it
            done(None, failure if isinstance(failure, RoundError) else RoundError(repr(failure)))

    def _want(self, key: str, held: Held, step: int) -> None:
        """Make the step early as soon as its sum is whole (in the lock)."""
        if held.closed == (step, 0) and held.early.waiting:
            self._asides.append(partial(self._make_early, key, step))
            self._wake.notify_all()

    def _close_sum(self, key: str, held: Held, which: Sum) -> None:
        super()._close_sum(key, held, which)
        self._want(key, held, which[0])

    def _make_early(self, key: str, step: int) -> None:
        with self._lock:
            held, recipe = self._held.get(key), self._foresight.recipe
            # It may have been decided, or be over, since it was wanted.
            if held is None or self._foresight.step != step or recipe is None or held.closed != (step, 0):
                return
        with held.lock:
            total, chunk = held.sums.get((step, 0)), held.chunk
            if total is None or held.version != step - 1 or not isinstance(chunk, Chunk):
                return
            error: Exception | None = None
            try:
                if not held.early.holds(step, recipe):
                    held.early.make(chunk, total, step, recipe)
            except Exception as failure:  # the step itself will say what is wrong, if it is made so
                log.warning("chunk %s: step %d cannot be made early: %r", key, step, failure)
                error = not_foreseen(step)
            early = held.early.chunk
        with self._lock:
            ready = held.early.take_waiting(step)
        for done in ready:
            done(None if early is None else early.values, error)

    def _apply(self, held: Held, totals: dict[int, torch.Tensor], recipe: Recipe, step: int) -> None:
        if held.early.has_begun(step, recipe) and held.before is None:
            assert isinstance(held.chunk, Chunk)
            held.early.reach(held.chunk, totals, step, recipe, keep=False)
            held.chunk = held.early.swap(held.chunk)
            return
        held.changed = ChangedRows()
        super()._apply(held, totals, recipe, step)

    def _take_waiting(self, held: Held) -> list[Done]:
        def with_values(done: Done) -> Done:
            return lambda _, error: done(held.chunk.values if isinstance(held.chunk, Chunk) else None, error)

        return super()._take_waiting(held) + [with_values(d) for d in held.early.take_waiting(held.version)]

    def _fence(self, error: Exception) -> None:
        super()._fence(error)
        self._asides, self._parts = [], Parts()
        waiting = [done for held in self._held.values() for done in held.early.forget()]
        for held in self._held.values():
            held.changed = ChangedRows()
        self._foresight = Foresight(-1, None)
        for done in waiting:
            done(None, error)

    def give_up(self, key: str, why: Exception) -> RoundError:
        with self._lock:
            held = self._held.get(key)
        told = super().give_up(key, why)
        for done in held.early.forget() if held is not None else ():
            done(None, told)
        return told
