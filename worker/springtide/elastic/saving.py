"""Take checkpoints of the training state, and tell the coordinator what became of them."""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import partial
from typing import Any

from springtide import faults
from springtide.checkpoint import names as checkpoint_names
from springtide.checkpoint import schedule
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.local_shards import OwnShards
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.shares import Share
from springtide.checkpoint.staging import Elsewhere
from springtide.checkpoint.writer import Written
from springtide.coordination.membership import Membership, generation_of
from springtide.elastic.accounting import Accounting
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.settings import Settings
from springtide.train_step.trainer import Trainer
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import state_to_proto
from springtide_protocol.names import StateName
from springtide_protocol.tracing import OFF, Attributes, Span, Tracer, of_checkpoint, of_job


class CheckpointSaver:
    """Write this member's share of checkpoints. `checkpoints` decides when, and reads them back."""

    def __init__(
        self,
        settings: Settings,
        state: TrainingState,
        trainers: TrainerAccess,
        accounting: Accounting,
        membership: Membership | None,
        tracer: Tracer = OFF,
    ) -> None:
        """Make it for one process.

        Args:
            settings: of the process.
            state: of the training.
            trainers: where its trainer is found.
            accounting: in which checkpoints are counted.
            membership: of the job; None without one.
            tracer: takes a span of each checkpoint.
        """
        self._job_uid, self._tracer = settings.job_uid, tracer
        self._state = state
        self._trainers = trainers
        self._accounting = accounting
        self._membership = membership
        self.checkpoints = Checkpoints(
            CheckpointLocation() if settings.alone else settings.checkpoint,
            {"namespace": settings.namespace, "name": settings.job, "uid": settings.job_uid},
            self._members_besides,
            self._on_written,
        )

    # ---- the script's thread

    def save_if_due(self, state: StateName, *, ended: bool, without: Collection[int] = ()) -> None:
        """Save the state when the members have agreed on a checkpoint of it.

        Args:
            state: the name of the committed state.
            ended: it is the last one of its loop.
            without: ranks of members that write nothing, since their state is another.
        """
        if not self.checkpoints.due or self._membership is None:
            return
        rank, labels = self._state.group.rank, self._membership.labels()
        writers = [other for other in range(len(labels)) if other not in without]
        if rank not in writers:
            self.checkpoints.leave_out()
            return
        share = Share(writers.index(rank), tuple(labels[other] for other in writers))
        self.save(state, share, "end" if ended else schedule.INTERVAL)

    def save(self, state: StateName, share: Share, reason: str) -> None:
        """Copy this member's share of the state and have it written.

        Args:
            state: the name of the committed state.
            share: which part this member writes.
            reason: why the checkpoint is taken, for its manifest.
        """
        trainer, plan = self._trainers.require("batches()"), self._state.plan
        assert plan is not None
        seconds = self.checkpoints.take(
            state,
            lambda: trainer.checkpoint_tree(self._state.position, plan.fingerprint()),
            share,
            reason,
            partial(self._snapshot, trainer, share),
            partial(self._own_shards, trainer, share),
        )
        self._accounting.count_stall(seconds)
        faults.reach("staged", state.step)

    def _snapshot(self, trainer: Trainer, share: Share, name: str, readers: int) -> Elsewhere | None:
        """Take what is not in the tree; see `Trainer.take_snapshot`."""
        known = [] if self._membership is None else self._membership.labels()
        writers = [known.index(label) for label in share.members if label in known]
        if len(writers) == readers:
            return trainer.take_snapshot(name, writers[share.index], writers)
        if trainer.shards is not None:  # who writes which shard follows from the members' ranks
            unknown = ", ".join(label for label in share.members if label not in known)
            raise RuntimeError(f"{unknown} would write a part of the checkpoint, and holds no shards")
        return trainer.take_snapshot(name, share.index, range(readers))

    def _own_shards(self, trainer: Trainer, share: Share, tree: Any) -> OwnShards | None:
        """Return which of the tree's tensors are parts, and what of them this member writes; None for none.

        Raise RuntimeError when some local rank is missing among the writers: the checkpoint would not be
        whole.
        """
        if trainer.pod is None:
            return None
        local_ranks = {} if self._membership is None else self._membership.local_ranks()
        rows: dict[int, list[str]] = {rank: [] for rank in range(trainer.pod.processes)}
        for label in share.members:
            if label in local_ranks:
                rows[local_ranks[label]].append(label)
        row = rows[trainer.pod.local_rank]
        if len({len(labels) for labels in rows.values()}) > 1 or share.members[share.index] not in row:
            raise RuntimeError(
                f"{', '.join(share.members)} would write the checkpoint, and not all processes of their pods "
                "are among them"
            )
        return OwnShards(
            trainer.shard_runs(tree, whole=False), row.index(share.members[share.index]), len(row)
        )

    # ---- the thread that writes checkpoints

    def _members_besides(self, state: StateName) -> list[str] | None:
        """Return the members of the current generation; None if that is the state's own."""
        if self._membership is None or generation_of(self._membership) == state.generation:
            return None
        return self._membership.labels()

    def _on_written(self, result: Written) -> None:
        metrics = self._accounting.metrics
        metrics.checkpoint.writing.observe(result.seconds)
        if result.error:
            metrics.checkpoint.failures.inc()
        else:
            metrics.checkpoint.written_bytes.inc(result.share_bytes)
        self._trace(result)
        if self._membership is not None and (result.whole or result.error):
            self._membership.report_checkpoint(
                pb.Checkpoint(
                    state=state_to_proto(result.state),
                    name=checkpoint_names.folder(result.state),
                    uri=result.uri,
                    error=result.error[:1000],
                    bytes=result.bytes,
                    seconds=result.seconds,
                    stall_seconds=result.stall_seconds,
                    written_unix=result.written,
                    reason=result.reason,
                )
            )

    def _trace(self, result: Written) -> None:
        """Record this member's share; the one that has made the checkpoint whole records all of it, too."""
        tracer, name, now = self._tracer, checkpoint_names.folder(result.state), time.time()
        if not tracer.enabled:
            return
        whole, began = tracer.begin(of_checkpoint(self._job_uid, name)), now - result.seconds
        attributes: Attributes = {
            "springtide.checkpoint": name,
            "springtide.step": result.state.step,
            "springtide.reason": result.reason,
            "springtide.bytes": result.share_bytes,
            "springtide.stall_seconds": result.stall_seconds,
        }
        share = tracer.child_of(whole)
        tracer.record(Span("write share", share, began, now, whole, attributes, error=result.error[:500]))
        if result.whole:
            linked = (tracer.begin(of_job(self._job_uid)),)
            sizes = {**attributes, "springtide.bytes": result.bytes}
            began -= result.stall_seconds
            tracer.record(Span("checkpoint", whole, began, now, None, sizes, linked=linked))
