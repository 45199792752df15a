"""Have a process follow the members of a job before it joins them, and feed those that do.

Only the script's thread comes here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from springtide.coordination.membership import Membership
from springtide.coordination.metrics import Metrics
from springtide.coordination.park_reply import Start
from springtide.elastic.state_transfer import StateTransfer
from springtide.elastic.trainer_access import TrainerAccess
from springtide.following.follower import Follower, Script
from springtide.memory.optimizer_state import known_state_bytes
from springtide.settings import Settings
from springtide_protocol.codec import state_from_proto

log = logging.getLogger(__name__)

MOST_SECONDS: Final = 600.0
"""Longest time that a process follows before it asks to be admitted."""
STALL_SECONDS: Final = 10.0
"""Longest time without a byte before it asks all the same."""
LAST_STEP_SECONDS: Final = 10.0
"""Longest time that it waits, as a member, for what is left of the last step."""
ANSWER_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1


class Following:
    """Follow before this process is a member, and end the feeds of those that have become members."""

    def __init__(
        self,
        settings: Settings,
        trainers: TrainerAccess,
        membership: Membership,
        state_transfer: StateTransfer,
        metrics: Metrics,
    ) -> None:
        """Make it for one process.

        Args:
            settings: of the process.
            trainers: where its trainer is found.
            membership: of the process.
            state_transfer: is told when live memory changes.
            metrics: in which bytes are counted.
        """
        self._settings, self._trainers, self._membership = settings, trainers, membership
        self._state_transfer, self._metrics = state_transfer, metrics
        self._follower: Follower | None = None

    @property
    def follows(self) -> bool:
        """Return whether the state may arrive here at any moment, or has, before this process is a member."""
        return self._follower is not None

    def follow(self, check: Callable[[], object]) -> None:
        """Take the state from the members of a job that trains, until little is left to come.

        Return at once where that is impossible, or where the state is so small that it is sent as quickly
        when this process is a member.

        Args:
            check: raises SystemExit or SpringtideError when the process has to end.
        """
        trainer, membership = self._trainers.require("batches()"), self._membership
        if trainer.feeds is None or not membership.can_follow:
            return
        feeds = trainer.feeds
        state_bytes = known_state_bytes(feeds.optimizer) or 0
        size = state_bytes + sum(item.nbytes for item in feeds.parameters)
        # Without any state of the optimizer's, the last gradient is as large as what is to be spared.
        if not state_bytes or size < self._settings.follow_mib * (1 << 20):
            return
        script = Script(
            parameters=feeds.parameters,
            optimizer=feeds.optimizer,
            layout_hash=feeds.layout_hash,
            ready=trainer.state.ready,
        )
        try:
            follower = Follower(
                script,
                self._settings.pod_ip,
                self._settings.connect_seconds,
                self._metrics.transfer.sent_bytes.inc,
                self._state_transfer.overwritten,
            )
        except OSError as error:
            log.warning("the state is not received beside training: %s", error)
            return
        self._follower = follower
        began = time.monotonic()
        count = membership.follow(follower.port, follower.secret, ANSWER_SECONDS)
        follower.expect(count)
        if not count:
            self._end(None)
            return
        log.info("receiving the state from %d members while they train", count)
        try:
            self._wait(follower, check)
        except BaseException:
            self._end(None)
            raise
        log.info(
            "received %d KiB of the state beside training in %.3f s",
            follower.received >> 10,
            time.monotonic() - began,
        )

    def _wait(self, follower: Follower, check: Callable[[], object]) -> None:
        """Return when all has come, when nothing comes any more, or when this process is to go."""
        received, moved_at = 0, (began := time.monotonic())
        while not follower.wait(_LOOK_SECONDS):
            check()
            now = time.monotonic()
            if follower.received > received:
                received, moved_at = follower.received, now
            if self._membership.leaving or now - moved_at > STALL_SECONDS or now - began > MOST_SECONDS:
                return

    def begin_generation(self, start: Start) -> None:
        """End what this process follows, when what the others begin from is here, and feeds of new members.

        Args:
            start: of the generation.
        """
        trainer, message = self._trainers.require("batches()"), start.message
        ids = [member.id for member in message.members]
        receivers = {transfer.receiver for transfer in message.transfers}
        if (feeds := trainer.feeds) is not None:
            if message.fresh or self._membership.me.id in receivers:
                feeds.stop("its state is not the one that was sent any more")
            feeds.finish(ids)
        state = state_from_proto(message.state)
        self._end(None if message.fresh or state is None else state.step)

    def close(self) -> None:
        """End what this process follows: it does not become a member."""
        self._end(None)

    def _end(self, step: int | None) -> None:
        follower, self._follower = self._follower, None
        if follower is None:
            return
        began = time.monotonic()
        ended = follower.end(step, LAST_STEP_SECONDS)
        if step is None:
            return
        log.info(
            "the rest of step %d came in %.3f s, %d KiB in all",
            step,
            time.monotonic() - began,
            follower.received >> 10,
        )
        for why in dict.fromkeys(ended):
            log.info("a member's share has to be sent again: %s", why)
