"""Intermediate values: seen within a body that makes several optimizer steps, before the body counts.

Each backward pass of the body is summed on the servers. A step of an optimizer becomes a substep of the
body's one step when the script wants to see what it has made, goes on with another backward pass, or makes
the same optimizer step again. Servers make substeps on a second copy (`server.intermediate`) and send those
values; the end of the body commits all of them. When it is dropped instead, the values that were seen are
fetched anew from the chunks, which no substep has touched.

Everything here belongs to the script's thread, and no lock is held. Values land from connections' threads
where the parameters are: the script has asked for them, and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Final

import torch

from springtide import faults
from springtide.errors import UsageError
from springtide.ps import row_reads
from springtide.ps.connections import ServerError
from springtide.ps.context import PsContext
from springtide.ps.sharding import PlannedChunk
from springtide.ps.step_fetches import Asked, StepFetches
from springtide_ps.params.chunk import BACKWARD_PASSES_LIMIT, SUBSTEPS_LIMIT, StepSpec
from springtide_ps.server.intermediate import NO_ROOM, OTHERWISE
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keys import STEP_SPEC_KEY, SUBSTEPS_KEY

_LATE_SECONDS: Final = 10.0


class IntermediateValues:
    """The substeps of the running body. fetches: of the step, where values that are looked at are noted."""

    def __init__(self, context: PsContext, fetches: StepFetches) -> None:
        self._context, self._fetches = context, fetches
        self.backward_pass = 0
        """Number of the body's present one."""
        self.seen: dict[str, Future[Answer]] = {}
        """Chunks whose values of this body were asked for."""
        self.seen_before = False
        """Whether the body before this one has looked at values."""
        self._substeps: list[StepSpec] = []
        self._announced: list[Asked] = []  # of the newest substeps, to the servers
        self._outdated: set[str] = (
            set()
        )  # chunks that substeps have changed since their values were asked for
        self._sums: tuple[float, tuple[int, ...]] = (1.0, ())
        self._open = False
        # Called when a body does what there is in common steps only, with what it calls.
        self.on_use: Callable[[str], object] = lambda call: None

    def end_generation(self) -> None:
        """Wait for what a dropped body has asked for: it must not land after the next one's values."""
        wait(list(self.seen.values()), _LATE_SECONDS)
        self._context.values.held_keys.difference_update(self.seen)
        self._forget()

    def begin_step(self) -> None:
        """Begin a body, without substeps."""
        self.seen_before = bool(self.seen)
        self._forget()
        self._open = True

    def _forget(self) -> None:
        self._substeps, self._announced, self._outdated, self.seen, self.backward_pass = [], [], set(), {}, 0

    def begin_backward_pass(self) -> None:
        """Begin another backward pass of the body, after the last one's steps. Raise UsageError."""
        self._end_substep()
        if self.backward_pass + 1 >= BACKWARD_PASSES_LIMIT:
            raise UsageError(
                f"more than {BACKWARD_PASSES_LIMIT} backward passes in one body: servers keep all their sums"
            )
        own = [step.unused for step in self._substeps if step.backward_pass == self.backward_pass]
        self._context.compression.begin_backward_pass(own)
        self.backward_pass += 1

    def before_step(self, optimizer: torch.optim.Optimizer, scale: float, unused: Collection[int]) -> None:
        """Note with which sums an optimizer is about to step; a second time, its first step ends there.

        Args:
            optimizer: One of the script's.
            scale: Of the whole step.
            unused: Parameters to which no worker had a gradient.

        Raises:
            UsageError: The body has too many steps.
        """
        if self._context.optimizers.is_staged(optimizer):
            self._end_substep()
        self._sums = scale, tuple(unused)

    def _end_substep(self) -> None:
        """Make a substep of what is staged. Raise UsageError."""
        optimizers = self._context.optimizers
        staged = optimizers.staged
        if not staged:
            return
        if len(self._substeps) + 1 >= SUBSTEPS_LIMIT:
            raise UsageError(f"more than {SUBSTEPS_LIMIT} optimizer steps in one body, one after another")
        scale, unused = self._sums
        made = optimizers.step_spec(scale, unused, False)
        self._substeps.append(replace(made, backward_pass=self.backward_pass))
        chunks = self._context.sharding.chunks
        self._outdated |= {chunk.key for chunk in chunks if chunk.optimizer in staged}
        self._announced = []

    # ---- what the script looks at

    def look(self, parameters: Collection[int] | None, receive: Callable[[str], None]) -> None:
        """Ask for values that the body's substeps have changed.

        Args:
            parameters: Whose (None: all).
            receive: Waits for the values of a chunk that were asked for.

        Raises:
            RuntimeError: A server fails.
            UsageError: The script asks for what servers cannot do.
        """
        sharding = self._context.sharding
        if not sharding.chunks:
            return  # only rows are on servers, and they are asked for by id
        if self._outdated or self._context.optimizers.staged:
            self._end_substep()
        if wanted := [key for key in sharding.keys_of(parameters) if key in self._outdated]:
            self._ask(wanted, receive)
        self._check_announced()

    def read_rows(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Return rows float32 [n, dim] as the body's steps have made them so far.

        Args:
            index: Number of the parameter that stands for the table.
            ids: int64 [n], each once.

        Returns:
            The rows.

        Raises:
            ServerError: A server does not answer.
            UsageError: The script asks for what servers cannot do.
        """
        self._end_substep()
        self._announce()
        self._check_announced()
        context, about = self._context, {SUBSTEPS_KEY: len(self._substeps)}
        homes, step = context.generation.homes, context.generation.step + 1
        answer = context.connections.answer
        return row_reads.read(context.tables, index, ids, homes, step, context.ask, answer, about)

    def receive(self, key: str) -> bool:
        """Wait for a chunk's values if they are of the open body, which only one server has.

        Args:
            key: The chunk's.

        Returns:
            False: they are a step's.

        Raises:
            ServerError: They do not come.
        """
        asked, seen = self._fetches.asked.get(key), self.seen.get(key)
        if asked is None or seen is None or asked[0] is not seen or not self._open:
            return False
        self._context.connections.answer(*self._fetches.asked.pop(key), "values within a step")
        return True

    def commit(
        self, scale: float, unused: Collection[int], skip: bool
    ) -> tuple[StepSpec, Sequence[PlannedChunk]]:
        """End the body.

        Args:
            scale: Of what is not in a substep yet.
            unused: Parameters to which no worker had a gradient.
            skip: Whether the step changes nothing.

        Returns:
            How the servers make the whole step, and the chunks whose values are to be fetched then.

        Raises:
            UsageError: The body has too many steps.
        """
        self._open = False
        if self._substeps or self.backward_pass:
            self._end_substep()
        chunks = self._context.sharding.chunks
        if not self._substeps:
            return self._context.optimizers.step_spec(scale, unused, skip), chunks
        made = self._whole
        # What was seen of the last substep is what the step makes of it.
        changed = chunks if not self.seen else [c for c in chunks if c.key in self._outdated]
        self._substeps, self._outdated = [], set()
        return made, changed

    # ---- what servers are asked

    @property
    def _whole(self) -> StepSpec:
        """All substeps as one step."""
        return replace(self._substeps[-1], before=tuple(self._substeps[:-1]))

    def _announce(self) -> None:
        """Say to the servers which substeps the body has made."""
        if self._announced:
            return
        context = self._context
        about: dict[str, Any] = {
            "s": context.generation.step + 1,
            "me": context.settings.me,
            STEP_SPEC_KEY: self._whole,
        }
        self._announced = [
            (context.ask(server, Kind.REPORT_SUBSTEPS, about), server) for server in context.connections
        ]

    def _check_announced(self) -> None:
        for future, server in self._announced:
            try:
                self._context.connections.answer(future, server, "the steps within a body")
            except ServerError as error:
                if OTHERWISE in str(error) or NO_ROOM in str(error):
                    raise UsageError(str(error)) from None
                raise

    def _ask(self, keys: Sequence[str], receive: Callable[[str], None]) -> None:
        context, fetches = self._context, self._fetches
        step = context.generation.step + 1
        context.values.outdate(())
        self._announce()
        for key in dict.fromkeys(keys):
            if key in fetches.asked:  # an earlier substep's, in the same memory
                receive(key)
            server, values = context.generation.homes[key][0], context.values.of(context.sharding.by_key[key])
            about = {
                "s": step,
                "k": key,
                SUBSTEPS_KEY: len(self._substeps),
                "rank": context.sharding.urgency[key],
            }
            self.seen[key] = context.ask(server, Kind.FETCH_INTERMEDIATE, about, out=values)
            fetches.asked[key] = self.seen[key], server
            context.values.held_keys.discard(key)
            self._outdated.discard(key)
        faults.reach("seen", step)
