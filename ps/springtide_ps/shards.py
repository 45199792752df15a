"""The chunks that a server holds for a job's steps: gradients are summed as they come, steps made as decided.

Requests come from the threads that read; one thread of its own makes the steps, chunk by chunk, and answers
who waits for their values.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from springtide_ps.chunk import ROUNDS_LIMIT, Chunk, Recipe
from springtide_ps.early import Early
from springtide_ps.frozen import Cuts
from springtide_ps.gathered import Done, GatheredRows
from springtide_ps.held import Fill, Forward, Held, Sum
from springtide_ps.idmap import Ids
from springtide_ps.lost import Lost
from springtide_ps.rounds import Effect, RoundError, Rounds, StaleError, Token
from springtide_ps.selected import Selected
from springtide_ps.slices import Slice
from springtide_ps.within import make_parts

log = logging.getLogger("springtide.ps")

_RECIPES_LIMIT: Final = 256
_SUMS_AHEAD: Final = 4
"""So many steps, at most, is the first server of a chunk ahead of those that keep copies."""


class Shards:
    """Raises RoundError for what does not belong to the present step. `close` ends its thread."""

    def __init__(self, forward: Forward, fill: Fill) -> None:
        self._forward, self._fill = forward, fill
        self._lock = threading.RLock()
        self._rounds = Rounds()
        self._held: dict[str, Held] = {}
        self.lost = Lost()
        self.cuts = Cuts(time.monotonic)
        self._recipes: dict[int, Recipe] = {}
        self._prepares: list[tuple[bool, Done]] = []
        self._commits: list[Done] = []
        self._unacknowledged = 0
        self._lost_backup = ""
        self._todo: list[tuple[str, int, bool]] = []  # chunks to bring to a step; it is only tried
        self._making = -1  # the step that a chunk is being brought to
        self._fills: list[tuple[str, str]] = []
        self._behind: set[str] = set()  # chunks that have come and have steps to make
        self._asides: list[Callable[[], None]] = []  # for when no step is to be made
        self._wake = threading.Condition(self._lock)
        self._busy = False
        self._closed = False
        self.steps = 0
        self._thread = threading.Thread(target=self._work_for_ever, name="springtide-ps-steps", daemon=True)
        self._thread.start()

    # ---- what there is

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return sum(h.chunk.nbytes for h in self._held.values() if h.chunk is not None)

    @property
    def unlocked_bytes(self) -> int:
        """As `held_bytes`, for whoever may hold a chunk's lock; it may be of a moment ago."""
        return sum(h.chunk.nbytes for h in list(self._held.values()) if h.chunk is not None)

    @property
    def version(self) -> int:
        return self._rounds.version

    def inventory(self, token: Token) -> list[str]:
        """Names of the chunks whose values after the generation's first state are here, or can be made."""
        with self._lock:
            self._rounds.check_token(token)
            self._settle()
            version, needed, number = self._rounds.version, self._rounds.unresolved, self._rounds.round

            def can_be_had(held: Held) -> bool:
                here = held.version == version and (needed is None or held.has_sums(needed, number))
                return here or held.version == needed

            return [k for k, held in self._held.items() if held.chunk is not None and can_be_had(held)]

    def check_gradient(self, key: str, nbytes: int, dtype: torch.dtype | None) -> None:
        """Raise RoundError when the chunk is not here, ChunkError for a gradient that does not fit it."""
        self._chunk(key).check_gradient(nbytes, dtype)

    def dtype(self, key: str) -> torch.dtype:
        return self._chunk(key).dtype

    def dense(self, key: str) -> Chunk:
        """Raise RoundError when the chunk is not here."""
        if not isinstance(chunk := self._chunk(key), Chunk):
            raise RoundError(f"{key!r} is a slice of a table")
        return chunk

    @property
    def token(self) -> Token:
        """Of the present generation. Raise RoundError before the first one."""
        if self._rounds.token is None:
            raise RoundError("no generation has entered")
        return self._rounds.token

    # ---- generations

    def enter(
        self,
        token: Token,
        members: Iterable[str],
        step: int,
        lineage: str,
        booked: bool = False,
        skipped: int = 0,
    ) -> int:
        """See `Rounds.enter`; return the step that this server is at.

        skipped: how many of the steps so far changed nothing, where books begin.
        """
        with self._lock:
            self._settle()
            before = self._rounds.version
            effects = self._rounds.enter(token, frozenset(members), step, lineage, booked)
            if Effect.FENCE in effects:
                self.cuts.readings.clear()
            if {Effect.BOOK, Effect.COUNT, Effect.FORGET}.intersection(effects):
                self._before_change(self._held)
            for effect in effects:
                if effect is Effect.FENCE:
                    self._fence(StaleError(f"generation {token} has begun"))
                elif effect is Effect.UNDO:
                    self._undo(before)
                elif effect is Effect.DROP:
                    self._drop_sums()
                elif effect is Effect.BOOK:
                    self._keep(lambda held: held.write_book(skipped))
                elif effect is Effect.COUNT:
                    self._keep(lambda held: held.count_steps(self._rounds.version))
                elif effect is Effect.FORGET:
                    self._held, self._recipes, self.lost = {}, {}, Lost()
            return self._rounds.version

    def resolve(self, token: Token, recipe: Recipe | None) -> None:
        """See `Rounds.resolve`."""
        with self._lock:
            if self._rounds.resolve(token, recipe):
                self._make_step()

    def load(self, token: Token, key: str, version: int, chunk: Chunk | Slice) -> None:
        """Hold a chunk from now on; sums that came before it are applied."""
        with self._lock:
            self._rounds.check_token(token)
            self._before_change([key] if key in self._held else [])
            held = self._held.setdefault(key, Held())
            with held.lock:
                held.chunk, held.version, held.early, held.spare = chunk, version, Early(), None
                held.drop_sums(lambda step: step <= version)
            self.lost.forget(key)
            self._todo.append((key, self._rounds.version, False))
            self._wake.notify_all()

    # ---- a step

    def take_spare(self, key: str, nbytes: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Memory (uint8) for a gradient of that type (None: the values'), if there is some that nobody uses.

        Who takes it stages the gradient with it, or lets it go.
        """
        held = self._held.get(key)
        if held is None or held.spare is None:
            return None
        with held.lock:
            spare = held.spare
            if spare is None or spare.nbytes != nbytes or dtype not in (None, spare.dtype):
                return None
            held.spare = None
        return spare.view(torch.uint8)

    def stage(
        self,
        token: Token,
        step: int,
        member: str,
        key: str,
        gradient: torch.Tensor | Selected,
        number: int = 0,
        own: bool = False,
    ) -> None:
        """Add a gradient (flat, of the chunk's size) to a round of the step. own: it is in memory of
        `take_spare`, which is the chunk's again; other memory is not kept.
        """
        which = (step, number)
        with self._lock:
            chunk: Any = self.dense(key) if isinstance(gradient, Selected) else self._chunk(key)
            held = self._held[key]
            first = self._rounds.stage(token, step, member, key, number)
            held.lock.acquire()
            held.added = 0 if first else held.added
        try:
            kept = gradient if own and isinstance(gradient, torch.Tensor) else None
            if first and kept is not None:
                held.sums[which] = kept
            else:
                spare, held.spare = (held.spare, None) if first else (None, held.spare)
                held.sums[which] = chunk.add(None if first else held.sums[which], gradient, spare)
                held.spare = held.spare if kept is None else kept
        finally:
            held.lock.release()
        with self._lock:
            if self._rounds.token != token:
                return
            held.added += 1
            if held.added == self._rounds.size:
                self._close_sum(key, held, which)

    def _close_sum(self, key: str, held: Held, which: Sum) -> None:
        """Nothing more comes to this sum (in the lock)."""
        if held.closed != which and which in held.sums:
            held.closed = which
            for address in held.forward:
                self._send_sum(address, which, key, held.sums[which])

    def check_sum(self, key: str, which: Sum, nbytes: int, dtype: torch.dtype) -> None:
        """Raise RoundError for a sum of a chunk that is neither here nor on its way, or of a step far ahead;
        ChunkError for one that does not fit the chunk. Nothing else bounds what another server may send.
        """
        step, number = which
        if step > self._rounds.version + _SUMS_AHEAD or number >= ROUNDS_LIMIT:
            raise RoundError(
                f"a sum of step {step}, round {number}, and step {self._rounds.version} is the last"
            )
        if not self.is_coming(key) and not self.lost.has(key):
            self.check_gradient(key, nbytes, dtype)

    def is_coming(self, key: str) -> bool:
        """Whether parts of it are here, and not all."""
        return False

    def take_sum(self, token: Token, which: Sum, key: str, total: torch.Tensor) -> None:
        """The sum of all gradients of a chunk, from the server that the workers send them to."""
        with self._lock:
            self._rounds.check_token(token)
            if key not in self._held and not self.is_coming(key):
                return  # it was given up here, which the next generation finds out
            held = self._held.setdefault(key, Held())
            with held.lock:
                held.sums[which] = total.clone()

    def prepare(
        self, token: Token, step: int, member: str, count: int, norm: bool, done: Done, number: int = 0
    ) -> None:
        """`done` gets the sums of squares over this server's sums, by their optimizer's first group (None
        unless `norm`), when all members have prepared and the copies are where they belong.
        """
        with self._lock:
            effects = self._rounds.prepare(token, step, member, count, number)
            self._prepares.append((norm, done))
            if Effect.PREPARED in effects:
                # Where workers are in teams, not every member sends a gradient.
                for key in self._rounds.staged:
                    self._close_sum(key, self._held[key], (step, number))
            self._answer_prepares()

    def try_step(self, token: Token, step: int, member: str) -> None:
        """See `Rounds.try_step`."""
        with self._lock:
            if self._rounds.try_step(token, step, member):
                assert self._rounds.recipe is not None
                self._recipes[step] = self._rounds.recipe
                self._todo += [(key, step, True) for key in self._held]
                self._wake.notify_all()

    def commit(self, token: Token, step: int, member: str, recipe: Recipe, done: Done) -> None:
        """`done` gets None when the step is decided here."""
        with self._lock:
            effects = self._rounds.commit(token, step, member, recipe)
            self._commits.append(done)
            if Effect.APPLY in effects:
                self._make_step()
                waiting, self._commits = self._commits, []
                for answer in waiting:
                    answer(None, None)

    def fetch(self, token: Token, step: int, key: str, done: Done) -> None:
        """`done` gets the chunk's values once they are those after `step`."""
        with self._lock:
            self._rounds.may_fetch(token, step)
            held = self._held_dense(key)
            if held.version < step:
                held.waiting.append((step, lambda _, error: done(held.values, error)))
                return
        done(held.values, None)

    def fetch_rows(self, token: Token, step: int, wanted: Sequence[tuple[str, Ids]], done: Done) -> None:
        """`done` gets the rows of these ids by slice, one after another, once all are those after `step`."""
        with self._lock:
            self._rounds.may_fetch(token, step)
            slices = [(self.slice_of(key), ids) for key, ids in wanted]
            late = {key for key, _ in wanted if self._held[key].version < step}
            answer = GatheredRows(slices, len(late), done)
            for key in late:
                self._held[key].waiting.append((step, answer))
        if not late:
            answer.give()

    def slice_of(self, key: str) -> Slice:
        """Raise RoundError when it is not here."""
        found = self._chunk(key)
        if not isinstance(found, Slice):
            raise RoundError(f"{key!r} is no slice of a table")
        return found

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._fence(StaleError("this server ends"))
            self._wake.notify_all()
        self._thread.join(30.0)

    # ---- within

    def _before_change(self, keys: Iterable[str]) -> None:
        """What a cut keeps of these chunks, which are here, is copied now."""
        for key in keys:
            held = self._held[key]
            with held.lock:
                if held.chunk is not None:
                    self.cuts.before(key, held.chunk, held.version)

    def _held_dense(self, key: str) -> Held:
        if not isinstance(self._chunk(key), Chunk):
            raise RoundError(f"{key!r} is of a table, which is read by rows")
        return self._held[key]

    def _chunk(self, key: str) -> Chunk | Slice:
        held = self._held.get(key)
        if held is None or held.chunk is None:
            raise self.lost.of(key)
        return held.chunk

    def _fence(self, error: Exception) -> None:
        """Send away whoever waits for something of the generation before."""
        waiting = [done for _, done in self._prepares] + self._commits
        self._prepares, self._commits, self._fills = [], [], []
        self._unacknowledged, self._lost_backup = 0, ""
        for held in self._held.values():
            waiting += [done for _, done in held.waiting]
            held.waiting, held.forward = [], []
        for done in waiting:
            done(None, error)

    def _drop_sums(self) -> None:
        version = self._rounds.version
        for held in self._held.values():
            with held.lock:
                held.drop_sums(lambda step: step > version)
                held.closed = (-1, 0)

    def _make_step(self) -> None:
        """The step `rounds.version` is decided: have it made, with the chunks in their order."""
        version, recipe = self._rounds.version, self._rounds.recipe
        assert recipe is not None
        self.steps += 1
        self._recipes[version] = recipe
        if not self._needs_recipes:
            # Steps may be decided faster than they are made; chunks are brought to them in their order.
            open_from = self._making if self._busy else version
            open_from = min([open_from, *(step for _, step, _ in self._todo[:1])])
            while len(self._recipes) > _RECIPES_LIMIT and (oldest := min(self._recipes)) < open_from:
                del self._recipes[oldest]
        self._todo += [(key, version, False) for key in self._held]
        self._wake.notify_all()

    def _undo(self, version: int) -> None:
        """The step after `version`, which was tried, never was."""
        self._recipes.pop(version + 1, None)
        self._keep(lambda held: held.undo(version))

    def _keep(self, change: Callable[[Held], bool]) -> None:
        """Change everything that is held; what cannot be is held no more."""
        self._held = {key: held for key, held in self._held.items() if change(held)}

    def _send_sum(self, address: str, which: Sum, key: str, total: torch.Tensor) -> None:
        self._unacknowledged += 1
        token = self._rounds.token

        def done(error: Exception | None) -> None:
            with self._lock:
                if self._rounds.token != token:
                    return
                self._unacknowledged -= 1
                held = self._held.get(key)
                # A copy that was given up meanwhile, as there is no room for it, misses nothing.
                if error is not None and (held is None or address in held.forward):
                    self._lost_backup = f"{address}: {error}"
                self._answer_prepares()

        self._forward(address, which, key, total, done)

    def _answer_prepares(self) -> None:
        if not self._rounds.complete or not self._prepares:
            return
        error = RoundError(f"a copy could not be made: {self._lost_backup}") if self._lost_backup else None
        if self._unacknowledged and error is None:
            return
        waiting, self._prepares = self._prepares, []
        norms: dict[int, float] | None = None
        if error is None and any(wanted for wanted, _ in waiting):
            which, norms = (self._rounds.version + 1, self._rounds.round), {}
            for key in sorted(self._rounds.staged):
                chunk = self._chunk(key)
                found = chunk.square_norm(self._held[key].sums[which])
                norms[chunk.first] = norms.get(chunk.first, 0.0) + found
        for _, done in waiting:
            done(norms, error)

    def _settle(self) -> None:
        """Wait until the decided steps are made (in the lock)."""
        while (self._todo or self._busy) and not self._closed:
            self._wake.wait(1.0)

    def _work_for_ever(self) -> None:
        while True:
            with self._lock:
                while not (self._todo or self._asides or self._fills_now() or self._closed):
                    self._wake.wait(self._patience)
                if self._closed:
                    return
                self._busy = True
                work = self._todo.pop(0) if self._todo else None
                self._making = work[1] if work is not None else self._rounds.version
                aside = self._asides.pop(0) if work is None and self._asides else None
                copy = self._fills_now().pop(0) if work is None and aside is None else None
            try:
                if work is not None:
                    self._bring(*work)
                elif aside is not None:
                    aside()
                elif copy is not None:
                    self._copy(*copy)
            except Exception as error:
                log.exception("a chunk is given up: %s", work or copy)
                if work is not None:
                    self.give_up(work[0], error)
            finally:
                with self._lock:
                    self._busy = False
                    self._wake.notify_all()

    def _bring(self, key: str, version: int, trying: bool) -> None:
        """Apply the sums of a chunk up to `version`, and answer who waits for that.

        trying: keep what the chunk was before that step.
        """
        with self._lock:
            held = self._held.get(key)
            recipes = (
                dict(self._recipes) if held is not None and held.version < version - 1 else self._recipes
            )
        if held is None or held.chunk is None:
            return
        with held.lock:
            if not trying:
                held.before = None
            while held.version < version:
                step = held.version + 1
                totals, recipe = held.totals(step), recipes.get(step)
                if recipe is None or not totals.keys() >= {part.round for part in recipe.parts}:
                    break  # a copy in the making that missed a step: it is not in the inventory
                self.cuts.before(key, held.chunk, held.version)
                if trying and step == version:
                    held.before = held.chunk.dump()
                self._apply(held, totals, recipe, step)
                held.version = step
                held.drop_sums(lambda other: other <= held.version)
                held.spare = totals[0] if isinstance(held.chunk, Chunk) and 0 in totals else None
        with self._lock:
            self._behind.discard(key)
            ready = self._take_waiting(held)
        for done in ready:
            done(None, None)

    def _apply(self, held: Held, totals: dict[int, torch.Tensor], recipe: Recipe, step: int) -> None:
        """Make a step of a chunk (in its lock)."""
        assert held.chunk is not None
        make_parts(held.chunk, totals, recipe, keep=False)

    def _take_waiting(self, held: Held) -> list[Done]:
        """Who waited for what the chunk is now."""
        ready = [done for step, done in held.waiting if step <= held.version]
        held.waiting = [(step, done) for step, done in held.waiting if step > held.version]
        return ready

    def _fills_now(self) -> list[tuple[str, str]]:
        """Copies that can be begun (in the lock)."""
        return []

    @property
    def _patience(self) -> float | None:
        """Seconds after which it may be time for something without anybody's word."""
        return None

    @property
    def _needs_recipes(self) -> bool:
        """Whether chunks are to come, or have come, that have older steps to make."""
        return False

    def _copy(self, key: str, address: str) -> None:
        raise NotImplementedError

    def give_up(self, key: str, why: Exception) -> RoundError:
        """A chunk whose update failed is held no more; the next generation finds that out."""
        with self._lock:
            held, told = self._held.pop(key, None), self.lost.add(key, why)
        for _, done in held.waiting if held is not None else ():
            done(None, told)
        return told
