"""Blocks of the script's own collectives: the group they use, and their repetition when members change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from springtide.body import Failure
from springtide.errors import GenerationChanged, SpringtideError, UsageError
from springtide.exchange.groups import Group, peers_in
from springtide.exchange.handle import Handle
from springtide.leasing import check_together
from springtide.places import Key, Place, agree

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")

Subset = Callable[[tuple[int, ...]], Group]


class Blocks:
    """Used by the script's thread alone, except `leave`, which recovery calls on it too."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._key: Key | None = None
        self._ready = False
        self._past: Key | None = None
        self._counted: tuple[int, int, int] = (-1, -1, 0)
        self._companions: tuple[int, ...] | None = None
        self._done = False
        self._own: Group | None = None
        self._handle: Handle | None = None

    # ---- from recovery and the commit

    def place(self) -> Place:
        """Where this member stands, for the others of a generation that forms."""
        return Place(self._key, self._ready, self._past)

    def formed(self, places: Sequence[Place], rank: int, subset: Subset) -> None:
        """A generation formed. subset: forms a group of some of its ranks, called by all of them alike."""
        verdict = agree(places, rank)
        self._done = verdict.done
        self._companions = verdict.companions
        if verdict.companions is not None and len(verdict.companions) > 1:
            self._own = subset(verdict.companions)

    def leave(self) -> None:
        """The generation's groups are about to be released."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
        if self._own is not None:
            self._own.release()
            self._own = None

    def shut(self) -> None:
        """Fail what is under way in a group of some members. Any thread."""
        own = self._own
        if own is not None:
            own.shut()

    def together(self) -> None:
        """A step was committed, so all members stand at the same place."""
        if self._companions is not None:
            self._companions = None
            self.leave()

    # ---- the script's part

    @property
    def scope(self) -> Group:
        """The members that the script's collectives are among: those that run the same block."""
        runtime = self._runtime
        if self._key is None or self._companions is None:
            return runtime.group
        if self._own is None:
            self._own = Group(None, 0, 1, runtime.settings.collective_seconds)
        return self._own

    def process_group(self) -> dist.ProcessGroup:
        """Raise GenerationChanged between two generations, UsageError where there is none."""
        runtime = self._runtime
        check_together(runtime, "process_group()")
        if runtime.membership is not None:
            if runtime.membership.generation is None:
                raise UsageError(
                    "process_group() before the first training loop: the members meet when it begins"
                )
            if runtime.step_in_body:
                self._check_step()
            elif (over := runtime.membership.over) or runtime.group.is_shut:
                raise GenerationChanged(f"the generation is over: {over or 'a reduction failed'}")
        scope = self.scope
        if self._handle is None or self._handle.source is not scope:
            if self._handle is not None:
                self._handle.close()
            self._handle = Handle(scope, runtime.settings.collective_seconds)
        return self._handle.group

    def _check_step(self) -> None:
        if self._runtime.settings.logical_workers:
            raise UsageError(
                "process_group() inside of a step in exact mode: members run a different number of bodies for"
                " one step, so their collectives would not match; use it between steps"
            )
        self._runtime.ready("process_group()").transaction.require_open("process_group()")

    def attempts(self) -> Iterator[Attempt]:
        runtime = self._runtime
        check_together(runtime, "retry()")
        if runtime.step_in_body:
            raise UsageError("retry() inside of a step: a step is repeated as a whole; use it between steps")
        if self._key is not None:
            raise UsageError("retry() inside of another retry(): put both blocks into one")
        if runtime.membership is not None and runtime.membership.generation is None:
            raise UsageError("retry() before the first training loop: the members meet when it begins")
        self._key, self._ready, self._done = self._next_key(), False, False
        try:
            while True:
                attempt = Attempt(self)
                yield attempt
                if not attempt.entered:
                    raise UsageError(
                        "retry() without its block: for attempt in springtide.retry(): and below it with"
                        " attempt: ..."
                    )
                if attempt.complete:
                    break
                self._rejoin()
                if self._done:
                    break
                self._ready = False
            self._past = self._key
        finally:
            self._key, self._ready = None, False

    def _next_key(self) -> Key:
        runtime = self._runtime
        ended, step = runtime.ended_loops, runtime.position.cursor.step
        number = self._counted[2] + 1 if self._counted[:2] == (ended, step) else 0
        self._counted = (ended, step, number)
        return self._counted

    def _rejoin(self) -> None:
        """Be a member of a running generation again; between loops too."""
        runtime = self._runtime
        recovery, membership = runtime.recovery, runtime.membership
        assert recovery is not None
        assert membership is not None
        stage = runtime.loops - 1
        if runtime.plan is not None:
            recovery.stand(stage)
            return
        runtime.plan = runtime.last_plan
        try:
            recovery.stand(stage)
            membership.await_end(stage)
        finally:
            runtime.plan = None

    def close_attempt(self, error: BaseException | None) -> bool:
        """True: the block is complete; False: it is to be run again. Raise what is the script's own."""
        if error is None:
            self._ready = True
            try:
                if self.scope.size > 1:
                    self.scope.start_sum(torch.zeros(1)).wait()
                return True
            except RuntimeError as failed:
                error = failed
        if not self._is_change(error):
            raise error
        log.info("a block of collectives runs again: %s", error)
        return False

    def _is_change(self, error: BaseException) -> bool:
        """Whether the members changed, rather than that the script failed."""
        runtime = self._runtime
        if runtime.membership is None or not isinstance(error, RuntimeError):
            return False
        if isinstance(error, GenerationChanged) or runtime.membership.over:
            return True
        if isinstance(error, SpringtideError):
            return False
        peers = peers_in(error)
        if not (peers or isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            return False
        runtime.ready("retry()").failure = Failure(str(error), peers)
        return True


class Attempt:
    """`with attempt:` holds the block. What leaves it because members changed is swallowed."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self.entered = False
        self.complete = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            self.complete = self._blocks.close_attempt(error)
        except BaseException as left:
            if left is error:
                return False
            raise
        return not self.complete and error is not None
