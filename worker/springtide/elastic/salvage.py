"""Keep what this process has computed of a step that was dropped, until the step is committed.

The members of a generation tell each other what each has kept, and all come to the same cut of what is left.
Only the script's thread uses it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from statistics import median

import torch

from springtide.coordination.membership import Membership
from springtide.coordination.metrics import Metrics
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan
from springtide.data.salvage import Agreed, Claim, Places, agree, size
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.exact.parts import parts_of
from springtide.launch.cgroup import memory_left
from springtide.train_step.context import StepContext
from springtide.train_step.salvaged import Salvaged, copies_pay, has_room
from springtide.train_step.trainer import Trainer

log = logging.getLogger(__name__)

_STEPS_BEFORE_ROOM_IS_KNOWN = 3
"""The first steps of a process take the memory that the script's own computing needs."""
_TRY_AGAIN_STEPS = 100
"""Number of steps without copies after which the time that they once took is not believed any more."""


class Salvage:
    """Hold what this process has of the step at the cursor, and what the other members say that they have."""

    def __init__(
        self,
        mode: str,
        state: TrainingState,
        trainers: TrainerAccess,
        metrics: Metrics,
        membership: Membership | None,
    ) -> None:
        """Make it for one process.

        Args:
            mode: Always, Never or Auto; see `Settings.salvage`.
            state: of the process.
            trainers: where its trainer is found.
            metrics: of the process.
            membership: of the process; None without a job, where no step is ever dropped for others.
        """
        self._mode = mode
        self._state, self._trainers, self._metrics = state, trainers, metrics
        self._membership = membership
        self._own: Salvaged | None = None
        self._work = ""
        """Name of the step that it belongs to."""
        self._claims: Sequence[Claim] = ()
        self._rank = 0
        self._agreed: Agreed | None = None
        self._step_seconds, self._micro_batches, self._steps = 0.0, 1, 0
        self._copying_seconds: list[float] = []
        self._without_copies = 0
        self._room: bool | None = None

    @property
    def salvaged(self) -> Salvaged | None:
        """Return what the running step begins with; after `rest`."""
        return self._own if self._agreed is not None else None

    def own(self) -> Claim:
        """Return what this process tells the members of a generation that forms."""
        if self._own is None or self._work != self._present_work():
            return Claim()
        return Claim(self._work, self._own.account.places)

    def begin_generation(self, claims: Sequence[Claim], rank: int) -> None:
        """Take what all members have told.

        Args:
            claims: by rank.
            rank: of this member.
        """
        self._claims, self._rank, self._agreed = claims, rank, None
        if not claims[rank].work:
            self._own = None  # of a step that somebody has committed

    def forget(self) -> None:
        """Forget everything: what is kept is of a step that no generation will make."""
        self._own, self._work, self._claims, self._agreed = None, "", (), None

    def begin_step(self) -> bool:
        """Prepare the trainer for the next body; return whether what it computes is to be kept."""
        trainer = self._trainers.require("batches()")
        if self._membership is None or not trainer.salvages or self._mode == "Never":
            return False
        buckets, device, always = trainer.buckets, trainer.device, self._mode == "Always"
        if buckets.keeps_what_leaves:
            return True  # what is there stays there: nothing is to be copied
        size_of_all = buckets.bytes
        if self._room is None and self._steps >= _STEPS_BEFORE_ROOM_IS_KNOWN:
            self._room = has_room(size_of_all, _free_memory(device))
        takes = median(self._copying_seconds) if self._copying_seconds else 0.0
        pays = copies_pay(size_of_all, self._step_seconds, self._micro_batches, takes, device.type)
        buckets.copies = always or (pays and bool(self._room))
        buckets.keeps_base = always or bool(self._room)
        return True

    def rest(self, plan: LoopPlan, cursor: Cursor, logical_workers: int = 0) -> Places | None:
        """Return which places of the global batch are to be computed; None: all.

        Args:
            plan: of the loop.
            cursor: where the step starts.
            logical_workers: parts that a batch is cut into in exact mode, whose numbers are the places; 0:
                places are samples.
        """
        if not any(claim.work for claim in self._claims):
            return None
        if self._agreed is None:
            n = plan.global_ids(cursor).numel()
            places = parts_of(plan, n, logical_workers) if logical_workers else n
            self._agreed = agree(self._claims, self._present_work(), places)
            if not self._agreed.accepted[self._rank]:
                self._own = None
            log.info(
                "step %d: %d of %d %s are computed already, %d of them here; the rest is dealt anew",
                cursor.step + 1,
                places - size(self._agreed.rest),
                places,
                "parts" if logical_workers else "samples",
                0 if self._own is None else size(self._own.account.places),
            )
        return self._agreed.rest if any(self._agreed.accepted) else None

    def dropped(self, kept: Salvaged | None, *, is_void: bool) -> None:
        """Note what a dropped body leaves.

        Args:
            kept: with all that it began with; None where that has not grown.
            is_void: all members do the step again in this generation in another way, from nothing.
        """
        if is_void:
            self.forget()
        elif kept is not None:
            self._own, self._work = kept, self._present_work()

    def committed(self, body: StepContext, trainer: Trainer, seconds: float) -> float:
        """Forget what belonged to a committed step; return the seconds of it that earlier tries have taken.

        Args:
            body: of the step.
            trainer: of the process.
            seconds: that the body has taken.
        """
        before = 0.0 if self._own is None else self._own.seconds
        self._metrics.salvaged.inc(body.carried_samples)
        self._step_seconds, self._steps = seconds + before, self._steps + 1
        self._micro_batches = body.assignment.batch.micro.count
        self._note_copying(trainer.buckets.copying_seconds)
        self.forget()
        return before

    def _note_copying(self, seconds: float) -> None:
        if seconds:
            self._copying_seconds, self._without_copies = [*self._copying_seconds[-4:], seconds], 0
            return
        self._without_copies += 1
        if self._without_copies >= _TRY_AGAIN_STEPS:
            self._copying_seconds, self._without_copies = [], 0

    def _present_work(self) -> str:
        """Return the name of the step at the cursor; "" where this process holds no state."""
        state = None if self._membership is None else self._membership.state
        cursor = self._state.position.cursor
        return "" if state is None else f"{state}, {cursor.stage}/{cursor.epoch}/{cursor.position}"


def _free_memory(device: torch.device) -> int | None:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_left()
