"""Put the parts of the library together for one process; nobody but the API knows the whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from springtide.comm.process_group import Group
from springtide.coordination.activity import Now
from springtide.coordination.membership import Membership
from springtide.coordination.outcome import Failed, Finished
from springtide.coordination.progress import as_numbers
from springtide.coordination.report_limits import ReportedNames
from springtide.coordination.session import Session, SessionSources
from springtide.elastic.accounting import Accounting
from springtide.elastic.async_loop import AsyncLoopParts
from springtide.elastic.balancer import Balancer
from springtide.elastic.catching_up import CatchingUp
from springtide.elastic.consistency import Consistencies, declare_consistencies
from springtide.elastic.current_activity import ActivitySources, current_activity
from springtide.elastic.evaluation import Evaluations
from springtide.elastic.exit import ExitParts, ProcessExit
from springtide.elastic.following import Following
from springtide.elastic.loop import LoopParts, TrainingLoops
from springtide.elastic.recovery import Recovery, RecoveryParts
from springtide.elastic.recovery_spans import RecoverySpans
from springtide.elastic.replica_check import ReplicaCheck
from springtide.elastic.retry import RetryBlocks
from springtide.elastic.salvage import Salvage
from springtide.elastic.saving import CheckpointSaver
from springtide.elastic.server_values import ServerValues
from springtide.elastic.state_transfer import StateTransfer
from springtide.elastic.step_runner import StepParts, StepRunner
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.elastic.warm_up import WarmUp
from springtide.following.feed import FeedOrder
from springtide.loggers.logger import Logger
from springtide.loggers.tracking import Tracking
from springtide.memory.report import MemoryReport
from springtide.pods.dims import MeshShape
from springtide.pods.pod import Pod, form_pod
from springtide.ps.forward_waits import wait_for_values
from springtide.settings import Settings
from springtide.train_step.state import Position
from springtide.train_step.trainer import Trainer
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.lobby import raise_descriptor_limit
from springtide_protocol.span_export import SpanQueue, job_resource, open_tracer, process_began
from springtide_protocol.tracing import OFF


class Runtime:
    """Hold the parts of the library in this process, and pass on what the coordinator wants.

    Parts get what they use in their constructors; none of them knows this class. The script's thread calls
    all methods but those of `SessionListener`.
    """

    def __init__(
        self,
        settings: Settings,
        loggers: Sequence[Logger] = (),
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Put the parts together; `begin` begins.

        Args:
            settings: of the process.
            loggers: experiment trackers of the script, which can be used here.
            config: hyperparameters for them.
        """
        self.settings = settings
        # What all parts share.
        self.state = TrainingState(Group(None, 0, 1, settings.collective_seconds))
        self.trainers = TrainerAccess()
        self.accounting = Accounting(settings)
        if loggers:
            self.accounting.tracking = self._make_tracking(loggers, config or {})
        self._balancer = Balancer(settings.balance == "Speed", settings.logical_workers)
        self._reported = ReportedNames()
        self._stop_metrics: Callable[[], None] = lambda: None
        # The job; alone there is none, and nothing to trace.
        self._traces = None if settings.alone else self._open_traces()
        tracer = self._traces or OFF
        self._spans = RecoverySpans(tracer, settings.job_uid, self.accounting.commits, process_began())
        self._state_transfer = StateTransfer(self.state, self.trainers, self.accounting.metrics)
        self._session = None if settings.alone else self._make_session()
        membership = None if self._session is None else self._session.membership
        self.membership: Membership | None = membership
        self._memory = MemoryReport(settings, self.accounting.metrics, membership)
        self._salvage = Salvage(
            settings.salvage, self.state, self.trainers, self.accounting.metrics, membership
        )
        # What the script calls.
        self.saver = CheckpointSaver(settings, self.state, self.trainers, self.accounting, membership, tracer)
        self.consistencies = Consistencies(settings, self.state, membership)
        self.catching_up = CatchingUp(self.state, self.trainers, membership, self._stand)
        self.retry_blocks = RetryBlocks(
            settings,
            self.state,
            self.trainers,
            membership,
            self.consistencies,
            self._stand,
            lambda: self.catching_up.is_outside,
        )
        self.evaluations = Evaluations(
            self.state,
            self.trainers,
            self.consistencies,
            self._session,
            self._settle_shards,
            self.catching_up,
        )
        self.values = ServerValues(self.state, self.trainers, None if settings.alone else self._stand)
        replicas = ReplicaCheck(self.state, self.trainers, self.accounting.metrics, membership)
        self.steps = self._make_steps(replicas)
        self.exit = ProcessExit(
            ExitParts(
                settings=settings,
                state=self.state,
                evaluations=self.evaluations,
                session=self._session,
                flush=self.saver.checkpoints.flush,
                close=self.close,
            )
        )
        self._recovery = None if self._session is None else self._make_recovery(self._session)
        self._activity = None if self._session is None else self._make_activity(self._session)
        if membership is not None:
            membership.use_storage(self.saver.checkpoints.able, keeps_applied_batches=settings.asynchronous)
        self.loop_parts = self._make_loop_parts(replicas)
        self.loops = TrainingLoops(self.loop_parts)
        # The processes of the pod, once the script has asked for their mesh.
        self.pod: Pod | None = None

    # ---- parts that take several others

    def _make_tracking(self, loggers: Sequence[Logger], config: Mapping[str, object]) -> Tracking:
        return Tracking(
            loggers,
            config,
            run_id="" if self.settings.alone else self.settings.checkpoint.folder,
            run_name=self.settings.job,
            take_reported=self.state.take_reported,
            metrics=self.accounting.metrics.tracker,
        )

    def _open_traces(self) -> SpanQueue | None:
        """Return what takes this process's spans, and show how many it loses; None: nobody wants them."""
        process = {
            "service.instance.id": self.settings.process_id,
            "springtide.local_rank": str(self.settings.local_rank),
        }
        traces = open_tracer("springtide-worker", job_resource(os.environ) | process)
        if traces is not None:
            self.accounting.metrics.count_spans(traces)
        return traces

    def _make_session(self) -> Session:
        raise_descriptor_limit()  # a group has two for each member
        sources = SessionSources(
            state=self.state,
            trainers=self.trainers,
            commits=self.accounting.commits,
            timing=self.accounting.timing,
            state_transfer=self._state_transfer,
            spans=self._spans,
        )
        session = Session(self.settings, sources, self)
        self.accounting.metrics.coordinator_missing.set_function(session.missing_seconds)
        return session

    def _make_steps(self, replicas: ReplicaCheck) -> StepRunner:
        return StepRunner(
            StepParts(
                state=self.state,
                trainers=self.trainers,
                accounting=self.accounting,
                saver=self.saver,
                consistencies=self.consistencies,
                membership=self.membership,
                check_no_evaluation=self.evaluations.check_none,
                all_together=self.retry_blocks.together,
                memory=self._memory,
                balancer=self._balancer,
                replicas=replicas,
                salvage=self._salvage,
            )
        )

    def _make_activity(self, session: Session) -> ActivitySources:
        return ActivitySources(
            state=self.state,
            trainers=self.trainers,
            timing=self.accounting.timing,
            evaluations=self.evaluations,
            state_transfer=self._state_transfer,
            session=session,
        )

    def _make_loop_parts(self, replicas: ReplicaCheck) -> LoopParts:
        settings, membership = self.settings, self.membership
        return LoopParts(
            state=self.state,
            trainers=self.trainers,
            steps=self.steps,
            saver=self.saver,
            replicas=replicas,
            values=self.values,
            evaluations=self.evaluations,
            consistencies=self.consistencies,
            timing=self.accounting.timing,
            balancer=self._balancer,
            salvage=self._salvage,
            catching_up=self.catching_up,
            warm_up=WarmUp(settings, self.state, self.trainers, self.steps, membership),
            membership=membership,
            recovery=self._recovery,
            logical_workers=settings.logical_workers,
        )

    def _make_recovery(self, session: Session) -> Recovery:
        return Recovery(
            RecoveryParts(
                settings=self.settings,
                state=self.state,
                trainers=self.trainers,
                accounting=self.accounting,
                saver=self.saver,
                consistencies=self.consistencies,
                retry_blocks=self.retry_blocks,
                state_transfer=self._state_transfer,
                membership=session.membership,
                memory=self._memory,
                balancer=self._balancer,
                salvage=self._salvage,
                following=Following(
                    self.settings,
                    self.trainers,
                    session.membership,
                    self._state_transfer,
                    self.accounting.metrics,
                ),
                spans=self._spans,
                check_term=session.check_term,
                depart=self.exit.depart,
            )
        )

    def begin(self) -> None:
        """Serve metrics and say Hello, in a job."""
        if self._session is not None:
            self._stop_metrics = self.accounting.metrics.serve(
                self.settings.metrics_port, self.settings.bind, self.settings.metrics_file
            )
            self._session.start()

    def install(
        self,
        trainer: Trainer,
        models: list[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        check: Callable[..., object],
    ) -> None:
        """Take the trainer of the script's models.

        Args:
            trainer: of the models.
            models: of the script.
            optimizers: of the script.
            tracked: objects that are committed along, by name.
            check: of what the script distributes, for a `consistency`.
        """
        self.trainers.install(trainer)
        if trainer.servers is not None:
            for index, handle in trainer.tables.items():
                handle.read = partial(self.values.rows, index)
                handle.read_all = partial(self.values.all_rows, index)
        if trainer.shards is not None:
            wait_for_values(models, self.values.settle, trainer.pending)
        if not self.settings.alone and self.settings.strategy == "ParameterServer":
            wait_for_values(models, self.values.settle, trainer.pending)
            declare_consistencies(
                self.consistencies, self.async_loop_parts(), trainer.servers, tracked, check
            )
        trainer.on_figure(self._balancer.own)
        if trainer.feeds is not None:
            trainer.feeds.connect_seconds = self.settings.connect_seconds
            trainer.feeds.on_bytes = self.accounting.metrics.transfer.sent_bytes.inc
        trainer.on_save_wish(lambda rank: self.saver.checkpoints.wish(rank == 0))
        if self.membership is not None:
            together = 1 if trainer.pod is None else trainer.pod.processes
            self.membership.set_layout(trainer.layout_hash, together)
        self._memory.begin(trainer, models, optimizers)

    def form_pod(self, shape: MeshShape) -> Pod:
        """Form the mesh of the pod's processes; see `pods.pod.form_pod`."""
        self.pod = form_pod(
            shape,
            folder=self.settings.pod_folder,
            local_rank=self.settings.local_rank,
            device="cuda" if torch.cuda.is_available() else "cpu",
            form_seconds=self.settings.formation_seconds,
            wait_seconds=self.settings.collective_seconds,
            over=lambda: "" if self.membership is None else self.membership.over,
        )
        return self.pod

    def async_loop_parts(self) -> AsyncLoopParts:
        """Return what a loop without common steps uses of this process."""
        return AsyncLoopParts(
            state=self.state,
            accounting=self.accounting,
            saver=self.saver,
            membership=self.membership,
            all_together=self.retry_blocks.together,
            collective_seconds=self.settings.collective_seconds,
        )

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values that the script reports, wherever it is. Raise UsageError for what is no number."""
        numbers = self._reported.bounded(as_numbers(values))
        if self.trainers.in_body:
            self.trainers.require("report()").report(numbers)
            return
        if self.evaluations.running is not None:
            self.evaluations.running.report(numbers)
            return
        if self.state.warming_up or self.catching_up.is_outside:
            return
        self.state.report(numbers)
        if self._session is not None:
            self._session.send_values(numbers)

    def close(self) -> None:
        """End threads and sockets; the process is about to exit."""
        self.saver.checkpoints.close()
        ended, tracking = self.state.outcome, self.accounting.tracking
        if tracking is not None and isinstance(ended, Finished):
            tracking.close(ended)  # first, since a job that has ended may be cleared away
        if self._session is not None:
            step, samples = self.steps.failed_step if isinstance(ended, Failed) else (0, "")
            self._session.close(ended, step, samples)
        self._spans.close()
        self.retry_blocks.leave()
        self.state.group.release()
        if self.trainers.trainer is not None:
            self.trainers.trainer.close()
        if self.pod is not None:
            self.pod.close()
        if tracking is not None and not isinstance(ended, Finished):
            tracking.close(ended)  # the others do not wait for it
        self._stop_metrics()
        self.accounting.close()
        if self._traces is not None:
            self._traces.close()  # last, since a collector may not answer

    def _stand(self, stage: int) -> None:
        assert self._recovery is not None
        self._recovery.stand(stage)

    def _settle_shards(self) -> None:
        if self.trainers.trainer is not None and self.trainers.trainer.shards is not None:
            self.values.settle(None)

    # ---- short ways to what is asked for most

    @property
    def position(self) -> Position:
        """Return the position of the committed state."""
        return self.state.position

    @property
    def group(self) -> Group:
        """Return the group of the present generation."""
        return self.state.group

    @property
    def trainer(self) -> Trainer | None:
        """Return the trainer; None before `distribute()`."""
        return self.trainers.trainer

    def settle(self, parameters: Collection[int] | None) -> None:
        """Wait for the values of these parameters (None: all) from servers; see `ServerValues.settle`."""
        self.values.settle(parameters)

    # ---- the session's threads, as `SessionListener`

    def on_over(self, reason: str) -> None:
        """Drop the open step, and release whoever waits in a collective of it, here and at the peers."""
        if self.trainers.trainer is not None:
            self.trainers.trainer.drop(reason)
        self.state.group.shut()
        self.retry_blocks.shut()

    def on_boundary(self) -> None:
        """Have all members stop after the running step."""
        if self.trainers.trainer is not None:
            self.trainers.trainer.want_change(True)
        if self.consistencies.async_loop is not None:
            self.consistencies.async_loop.interrupt()

    def on_feed(self, order: pb.Feed) -> None:
        """Send the state to a process that is about to join, where it can be sent beside training."""
        trainer = self.trainers.trainer
        if trainer is not None and trainer.feeds is not None:
            trainer.feeds.begin(
                FeedOrder(
                    follower=order.follower,
                    address=order.address,
                    secret=order.secret,
                    index=order.index,
                    count=order.count,
                )
            )

    def current_activity(self) -> Now | None:
        """Return what the script's thread does now."""
        return None if self._activity is None else current_activity(self._activity)

    def write_outcome(self) -> None:
        """Write how the process ends, if that is decided."""
        self.exit.write_outcome()
