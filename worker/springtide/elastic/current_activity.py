"""Tell which part of a step the script's thread is in, without its help."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.coordination.activity import Now
from springtide.coordination.session import Session
from springtide.elastic.evaluation import Evaluations
from springtide.elastic.state_transfer import StateTransfer
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.train_step.timing import Timing
from springtide.train_step.transaction import Phase
from springtide_protocol import coordinator_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySources:
    """Name what shows the activity of the script's thread. All of it may be read by any thread."""

    state: TrainingState
    trainers: TrainerAccess
    timing: Timing
    evaluations: Evaluations
    state_transfer: StateTransfer
    session: Session


def current_activity(sources: ActivitySources) -> Now | None:
    """Return the running step and what is done in it; None outside of a training loop's generation."""
    trainer, plan = sources.trainers.trainer, sources.state.plan
    if trainer is None or plan is None or sources.session.membership.standing != pb.ACTIVE:
        return None
    if sources.state_transfer.progress is not None:
        return None  # told by itself
    step = sources.state.position.cursor.step + 1
    phase = trainer.transaction.phase
    if sources.timing.fetching:
        return step, pb.DOING_FETCHING
    if trainer.waiting_since is not None:
        return step, pb.DOING_REDUCING
    if phase in (Phase.STEPPING, Phase.STEPPED):
        return step, pb.DOING_STEPPING
    if phase is not Phase.IDLE:
        return step, pb.DOING_COMPUTING
    if sources.evaluations.running is None:
        return step, pb.DOING_BETWEEN
    return step, pb.DOING_ASKING if sources.session.asking else pb.DOING_EVALUATING
