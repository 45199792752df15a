"""See that members have the same state before it is saved, sent to others, or a loop ends with it.

Within training, votes compare a piece of it every few steps. A job of few steps would end before they have
seen all, and a checkpoint is written by all members together: one that has drifted would put parts of
another model into it. So all of it is compared after the last step of a loop, after one that a checkpoint is
taken of, and where members stop because others come or go. Members that differ write nothing, stop with all
others, and are sent the state.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from springtide.comm.process_group import Group, peers_in
from springtide.coordination.membership import Membership
from springtide.coordination.metrics import Metrics
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.train_step.context import Failure
from springtide.train_step.replicas import Found

log = logging.getLogger(__name__)

MOST_NAMES = 4


class ReplicaCheck:
    """Compare the members' states, and tell of differences. Only the script's thread uses it."""

    def __init__(
        self,
        state: TrainingState,
        trainers: TrainerAccess,
        metrics: Metrics,
        membership: Membership | None,
    ) -> None:
        """Compare nothing yet.

        Args:
            state: of the process.
            trainers: has the script's trainer.
            metrics: count differences.
            membership: knows the members; None without a job.
        """
        self._state, self._trainers = state, trainers
        self._metrics, self._membership = metrics, membership
        self._unseen: Group | None = None  # whose members have made a step since they were compared
        self._mending: tuple[Group, Collection[int]] | None = None  # who is sent the state at the next stop

    def committed(self, found: Found | None) -> None:
        """Take what members have found in the vote of the step that they have committed, and tell of it."""
        self._unseen = self._state.group
        if found is not None:
            self._announce(found)

    def compare(self, wanted: bool) -> Collection[int]:
        """Compare all of the state if a step was made since, and have members stop where it differs.

        All members call it alike, between two steps. When a sum fails, another generation follows.

        Args:
            wanted: the state is saved or sent, or the loop ends.

        Returns:
            Ranks of the members that have another state than most.
        """
        group, trainer = self._state.group, self._trainers.require("batches()")
        if self._mending is not None and self._mending[0] is group:
            return self._mending[1]
        if not wanted or self._unseen is not group:
            return ()
        self._unseen = None
        try:
            found = trainer.reduction.compare_replicas(group)
        except RuntimeError as error:
            trainer.failure = Failure(str(error), peers_in(error))
            group.shut()
            return ()
        self._announce(found)
        if found.mends:
            self._state.stop_at_boundary()
        return found.odd

    def _announce(self, found: Found) -> None:
        group, step = self._state.group, self._state.position.cursor.step
        if found.mends:
            self._mending = group, found.odd
        if found.odd:
            self._metrics.replicas_differed.inc()
            log.error(
                "step %d: the parameters of %s are not those of the other workers (seen in %s); it is %s",
                step,
                ", ".join(map(self._name_of, found.odd)),
                ", ".join(found.names[:MOST_NAMES]),
                "sent the state again"
                if found.mends
                else "not sent the state any more: its machine computes otherwise",
            )
        for pair in found.differences:
            if group.rank in (pair.owner, pair.buddy):
                self._metrics.copies_differed.inc()
            log.error(
                "step %d: the copies of %d shards of %s (owner) and %s (buddy) differ; nobody can tell which "
                "of them is right, and the owner's counts: it is %s",
                step,
                len(pair.shards),
                self._name_of(pair.owner),
                self._name_of(pair.buddy),
                "sent to the buddy again"
                if found.mends
                else "not sent any more, since one of the two machines computes otherwise",
            )

    def _name_of(self, rank: int) -> str:
        members = self._membership.members if self._membership is not None else []
        return members[rank].pod_name if rank < len(members) else f"rank {rank}"
