"""Take a process that comes to a running job through the training loops that the job has ended, while the
others train without it.

Nothing of what it computes there stays: it has its own initial values, and gets the job's state when it is
admitted. Until then it looks to its script like the last of the members, and is alone in its collectives. A
task that one worker does for all, which takes a member, admits it there and then, and it goes through what is
left of these loops as a member.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from springtide.coordination.membership import Membership
from springtide.coordination.newcomer import Move
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.elastic.warm_up import ImaginedGroup
from springtide.errors import SpringtideError

log = logging.getLogger(__name__)

_WELCOME_SECONDS = 5.0


class CatchingUp:
    """Know whether this process goes through ended loops outside of the job. The script's thread uses it."""

    def __init__(
        self,
        state: TrainingState,
        trainers: TrainerAccess,
        membership: Membership | None,
        stand: Callable[[int], object],
    ) -> None:
        """Make it for one process.

        Args:
            state: of the process.
            trainers: where its trainer is found.
            membership: of the process; None without a job.
            stand: joins a running generation in the loop of that ordinal.
        """
        self._state, self._trainers, self._membership, self._stand = state, trainers, membership, stand
        self._group: ImaginedGroup | None = None  # that the script sees
        self._has_waited = False  # whether it has waited for the coordinator's word

    @property
    def is_possible(self) -> bool:
        """Return whether the process can: its values are its own, and it has not been a member.

        Values that are on servers or shared out among members are theirs alone.
        """
        new = self._membership is not None and not self._state.generations
        return new and not self._trainers.require("batches()").values_arrive

    @property
    def is_outside(self) -> bool:
        """Return whether the process has gone through such loops, and is no member yet."""
        return self._group is not None and not self._state.generations

    def passes(self, stage: int) -> bool:
        """Return whether the process is to go through a loop outside of the job.

        Args:
            stage: ordinal of the loop, which the script is at.
        """
        membership = self._membership
        if membership is None or not self.is_possible:
            return False
        if not self._has_waited:
            membership.await_welcome(_WELCOME_SECONDS)
            self._has_waited = True
        return membership.newcomers_move(stage) is Move.PASS

    def seem_last_member(self, stage: int) -> None:
        """Look to the script like the last of the job's members, until this process is one.

        Args:
            stage: ordinal of the ended loop whose body is about to run.
        """
        membership = self._membership
        assert membership is not None
        if self._group is None:
            others = membership.await_welcome(0.0)
            if membership.stands_by:
                others -= 1  # it takes the place of one of them
            self._group = ImaginedGroup(max(1, others))
            log.info(
                "going through training loops that the job has ended, beside the job: loop %d is the first",
                stage + 1,
            )
        self._state.use_group(self._group)

    def admit(self, call: str) -> None:
        """Be a member from here on, between two loops that the job has ended, if the process is outside.

        Args:
            call: of the script, which needs that.

        Raises:
            SystemExit: the coordinator lets the process go.
            SpringtideError: it was refused, or the job has gone back to a loop that the process has left.
        """
        membership = self._membership
        if membership is None or not self.is_outside:
            return
        stage = self._state.opened_loops - 1
        log.info("%s needs the other members: asking to be admitted behind loop %d", call, stage + 1)
        with self._state.last_loop_reopened():
            self._stand(stage)
        if membership.ended_stages <= stage:
            raise SpringtideError(
                f"the job has gone back to training loop {self._state.position.cursor.stage + 1}, which this "
                "worker has left: it has to begin again"
            )
        membership.await_end(stage)  # that has ended: this tells the coordinator where the process stands
