"""Run blocks of the script's own collectives: give them their group, and repeat them when members change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist

from springtide.comm.process_group import Group, peers_in
from springtide.comm.torch_group import Handle
from springtide.coordination.membership import Membership
from springtide.elastic.consistency import Consistencies
from springtide.elastic.retry_position import RetryKey, RetryPosition, agree
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import GenerationChanged, SpringtideError, UsageError
from springtide.settings import Settings
from springtide.train_step.context import Failure

log = logging.getLogger(__name__)

Subset = Callable[[tuple[int, ...]], Group]


class RetryBlocks:
    """Run the script's collectives again when members change. The script's thread uses it, any may `shut`."""

    def __init__(
        self,
        settings: Settings,
        state: TrainingState,
        trainers: TrainerAccess,
        membership: Membership | None,
        consistencies: Consistencies,
        stand: Callable[[int], None],
        is_outside: Callable[[], bool],
    ) -> None:
        """Make it for one process.

        Args:
            settings: of the process.
            state: of the process.
            trainers: where its trainer is found.
            membership: of the process; None without a job.
            consistencies: say whether there are common steps.
            stand: joins a running generation in the loop of that ordinal.
            is_outside: whether the process goes through ended loops, and is no member yet.
        """
        self._collective_seconds, self._exact = settings.collective_seconds, bool(settings.logical_workers)
        self._state, self._trainers, self._membership = state, trainers, membership
        self._consistencies, self._stand, self._is_outside = consistencies, stand, is_outside
        self._key: RetryKey | None = None
        self._ready = False
        self._past: RetryKey | None = None
        self._counted: tuple[int, int, int] = (-1, -1, 0)
        self._companions: tuple[int, ...] | None = None
        self._done = False
        self._has_joined = False  # later than others, whose state it has got
        self._own: Group | None = None
        self._handle: Handle | None = None

    # ---- from recovery and the commit

    def position(self) -> RetryPosition:
        """Return where this member stands, for the others of a generation that forms."""
        return RetryPosition(self._key, self._ready, self._past)

    def formed(
        self, positions: Sequence[RetryPosition], rank: int, subset: Subset, joins: bool | None = None
    ) -> None:
        """Take up the running block in a generation that has formed.

        Args:
            positions: of all members, by rank.
            rank: of this member.
            subset: forms a group of some of the ranks, called by all of them alike.
            joins: whether this member gets the state of others that train; None: it went on with its own.
        """
        self._has_joined = self._has_joined if joins is None else joins
        verdict = agree(positions, rank)
        self._done = verdict.done
        self._companions = verdict.companions
        if verdict.companions is not None and len(verdict.companions) > 1:
            self._own = subset(verdict.companions)

    def leave(self) -> None:
        """Release the block's own group before the generation's groups are released."""
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
        """Note that a step was committed, so that all members stand at the same place."""
        if self._companions is not None:
            self._companions = None
            self.leave()

    # ---- the script's part

    @property
    def scope(self) -> Group:
        """Return the group of the script's collectives: the members that run the same block."""
        if self._key is None or (self._companions is None and not self._is_behind):
            return self._state.group
        return self._alone() if self._own is None else self._own

    def _alone(self) -> Group:
        """Return a group of this process, which stays until members stand together again."""
        if self._own is None:
            self._own = Group(None, 0, 1, self._collective_seconds)
        return self._own

    @property
    def _is_behind(self) -> bool:
        """Return whether the script is between two loops that the job has ended, where this process is alone:
        the others are in steps of a later one."""
        opened = self._state.opened_loops
        return self._is_outside() or (self._has_joined and 0 < opened <= self._state.position.cursor.stage)

    def process_group(self) -> dist.ProcessGroup:
        """Return the group for functions of torch.distributed.

        Raise GenerationChanged between two generations, UsageError where there is none.
        """
        self._consistencies.check_together("process_group()")
        is_behind = self._is_behind
        if self._membership is not None and not is_behind:
            if self._membership.generation is None:
                raise UsageError(
                    "process_group() before the first training loop: the members meet when it begins"
                )
            if self._trainers.in_body:
                self._check_step()
            elif (over := self._membership.over) or self._state.group.is_shut:
                raise GenerationChanged(f"the generation is over: {over or 'a reduction failed'}")
        scope = self._alone() if is_behind else self.scope
        if self._handle is None or self._handle.source is not scope:
            if self._handle is not None:
                self._handle.close()
            self._handle = Handle(scope, self._collective_seconds)
        if scope.before_next is not None:
            scope.before_next()  # the script's collectives go past the group
        return self._handle.group

    def _check_step(self) -> None:
        if self._exact:
            raise UsageError(
                "process_group() inside of a step in exact mode: members run a different number of bodies for"
                " one step, so their collectives would not match; use it between steps"
            )
        self._trainers.require("process_group()").transaction.require_open("process_group()")

    def attempts(self) -> Iterator[RetryAttempt]:
        """Yield attempts at a block until it is complete. Raise UsageError for a wrong place."""
        self._consistencies.check_together("retry()")
        if self._trainers.in_body:
            raise UsageError("retry() inside of a step: a step is repeated as a whole; use it between steps")
        if self._key is not None:
            raise UsageError("retry() inside of another retry(): put both blocks into one")
        is_new = self._membership is not None and self._membership.generation is None
        if is_new and not self._is_outside():
            raise UsageError("retry() before the first training loop: the members meet when it begins")
        self._key, self._ready, self._done = self._next_key(), False, False
        try:
            while True:
                attempt = RetryAttempt(self)
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

    def _next_key(self) -> RetryKey:
        ended, step = self._state.ended_loops, self._state.position.cursor.step
        number = self._counted[2] + 1 if self._counted[:2] == (ended, step) else 0
        self._counted = (ended, step, number)
        return self._counted

    def _rejoin(self) -> None:
        """Be a member of a running generation again; between loops too."""
        assert self._membership is not None
        stage = self._state.opened_loops - 1
        if self._state.plan is not None:
            self._stand(stage)
            return
        with self._state.last_loop_reopened():
            self._stand(stage)
            self._membership.await_end(stage)

    def close_attempt(self, error: BaseException | None) -> bool:
        """Return whether the block is complete; else it is run again. Raise what is the script's own."""
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
        """Return whether the members changed, rather than that the script failed."""
        if self._membership is None or not isinstance(error, RuntimeError):
            return False
        if isinstance(error, GenerationChanged) or self._membership.over:
            return True
        if isinstance(error, SpringtideError):
            return False
        peers = peers_in(error)
        if not (peers or isinstance(error, dist.DistError) or "/gloo/" in str(error)):
            return False
        self._trainers.require("retry()").failure = Failure(str(error), peers)
        return True


class RetryAttempt:
    """Holds the block in `with attempt:`, and swallows an error that leaves it because members changed."""

    def __init__(self, retry_blocks: RetryBlocks) -> None:
        self._retry_blocks = retry_blocks
        self.entered = False
        self.complete = False

    def __enter__(self) -> None:
        self.entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            self.complete = self._retry_blocks.close_attempt(error)
        except BaseException as left:
            if left is error:
                return False
            raise
        return not self.complete and error is not None
