"""The instrumented model and optimizer: gradients into buckets, reductions before the step, or undo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from springtide import faults
from springtide.checkpoint.staging import Elsewhere
from springtide.comm.buckets import Buckets, removed
from springtide.comm.compression import LowRankBuckets
from springtide.comm.layout import Layout, field_of, layout_hash, plan_layout
from springtide.comm.nccl import choose_backend
from springtide.data.balance import Figure
from springtide.data.salvage import Carried, merged
from springtide.embedding.handle import tables_among
from springtide.embedding.step import home_here
from springtide.errors import Dropped, PartDone, SpringtideError, UsageError
from springtide.exact.buckets import ExactBuckets
from springtide.exact.rounding import BLOCK
from springtide.exact.step import ExactStep
from springtide.following.feed import Feeds
from springtide.following.shares import can_follow
from springtide.memory.ready import missing_state
from springtide.pods.fully_shard import reshard, weigh_gradients
from springtide.pods.pod import Pod
from springtide.pods.tensors import ShardRuns, lies_along, local_shard, runs_of, shard_count
from springtide.ps.backend import PsBackend
from springtide.ps.lazy_values import Pending
from springtide.ps.states import states_of
from springtide.sharding.backend import ShardedOptimizer
from springtide.sharding.buckets import PassingBuckets
from springtide.sharding.copies import CopyDigest
from springtide.sharding.norms import norm_of_all
from springtide.train_step.buffers import Buffers
from springtide.train_step.context import Failure, StepAssignment, StepContext, check_ended, check_whole
from springtide.train_step.device_clock import DeviceClock
from springtide.train_step.foreach_steps import ForeachSteps
from springtide.train_step.fused_steps import FusedSteps
from springtide.train_step.grad_scaler import Scalings, enabled_among
from springtide.train_step.gradients import Gradients
from springtide.train_step.hooks import Hook
from springtide.train_step.master_weights import MasterWeights
from springtide.train_step.multi_step import check_backward, check_closure
from springtide.train_step.optimizers import closure_of, parameters_of, scale_of, with_closure
from springtide.train_step.options import TrainerOptions
from springtide.train_step.past_body import PastBody
from springtide.train_step.randomness import seed_part
from springtide.train_step.reduction import Reduced, Reduction, commit_on, own_part
from springtide.train_step.repeated_backward import BeforeGradient, RepeatedBackward
from springtide.train_step.replica_digest import ReplicaDigest
from springtide.train_step.replicas import Replicas
from springtide.train_step.rollback import Rollback
from springtide.train_step.salvaged import BeforeLast, Salvaged
from springtide.train_step.staged import HereSteps, StagedSteps
from springtide.train_step.state import Position
from springtide.train_step.sync_batch_norm import BatchStatistics, use_generation
from springtide.train_step.transaction import Phase, Transaction
from springtide.train_step.undeclared import DECLARE, UndeclaredOptimizers


def reads_values(tracked: Mapping[str, Any]) -> bool:
    """Return whether one of these objects looks at the parameters between two steps, as an average of them
    does; schedulers and scalers do not."""
    blind = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
    return any(not isinstance(item, blind) for item in tracked.values())


def tracked_buckets(buckets: Buckets) -> dict[str, Any]:
    """Return what of the buckets is committed and transferred along with the state, by name."""
    if isinstance(buckets, ExactBuckets):
        return {"exact mode": buckets.exponents}
    return {"compression": buckets} if isinstance(buckets, LowRankBuckets) else {}


class Trainer:
    """The models of a script and their optimizers.

    Hooks and calls of a body come from the script's thread, `drop` from any.

    [Note: pods] With a pod, parameters are this process's parts, and gradients are summed over the processes
    of the same local rank. `fully_shard` and tensor parallelism have collectives of their own in forward and
    backward, which all processes of the pod must go through alike: nothing that other pods do may leave a
    body before its optimizer.step(). So a step that is dropped is computed to its end, hooks of gradients do
    nothing any more, and optimizer.step() asks the pod (`Pod.commits`) before it steps, or drops.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        tracked: Mapping[str, Any],
        options: TrainerOptions,
        pod: Pod | None = None,
    ) -> None:
        """Instrument the models and their optimizers.

        Args:
            models: of the script.
            optimizers: of the script.
            tracked: objects that are committed along, by name.
            options: how they are trained.
            pod: the processes among which the script has divided the models; None: this one has them whole.
        """
        self.pod = pod
        self._models, self._optimizers = models, optimizers
        self._multi_step, self._clip_norm = options.multi_step, options.clip_norm
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        named = dict(model.named_parameters())
        trained = [field_of(name, local_shard(item)) for name, item in named.items() if item.requires_grad]
        layout = plan_layout(trained, options.bucket_bytes, BLOCK if options.logical_workers else 1)
        self.device = next(item for item in named.values() if item.requires_grad).device
        exchange = choose_backend(options.backend, self.device.type, dist.is_nccl_available())
        self.nccl_device = self.device if exchange == "nccl" else None

        # The gradients.
        self.buckets = options.make_buckets(layout, self.device)
        exact = self.buckets if isinstance(self.buckets, ExactBuckets) else None
        self._exact = None if exact is None else ExactStep(exact, options.logical_workers)
        square_norm = None if pod is None else self._square_norm_of_pod
        self._gradients = Gradients(named, self.buckets, options.clip_norm, square_norm)
        self.tables = tables_among(self._gradients.parameters)
        # Rows of a table leave with the backward pass that reaches it.
        self._gathers = self.buckets.gathers and not self.tables and pod is None

        # Where the parameters are stepped.
        self.has_masters = options.masters
        self._masters = MasterWeights() if options.masters and options.make_shards is None else None
        self._values_are_read = reads_values(tracked)
        self._init_home(layout, options, exact, bool(enabled_among(tracked)))

        # The state, and the way back to it.
        self.buffers = self._buffers = Buffers(model, options.rules)
        self._init_state(model, tracked, options)
        self._shard_runs: dict[int, ShardRuns] = {}
        frozen = [field_of(name, item) for name, item in named.items() if not item.requires_grad]
        if pod is not None:  # what all local ranks have alike
            whole = [field_of(name, item) for name, item in named.items() if item.requires_grad]
            layout = plan_layout(whole, options.bucket_bytes)
        agreed = options.agreed_text(
            optimizers,
            self.device,
            exchange,
            servers="" if self.servers is None else self.servers.described,
            pod="" if pod is None else str(pod.shape),
        )
        self.layout_hash = layout_hash(layout, [*frozen, *self._buffers.fields], agreed)

        # The step that is open.
        self.transaction = Transaction()
        self._body: StepContext | None = None
        self._earlier: StepContext | None = None
        self._reduced: Reduced | None = None
        self._summed_weight = 0.0
        self._depth = 0
        self._stepping: list[torch.optim.Optimizer] = []
        """Optimizers whose `step()` is running, outermost first; one may call another's, or its own base's.
        """
        self._foreach_steps, self._fused_steps = ForeachSteps(), FusedSteps()
        self._clock = DeviceClock(self.device)
        self._init_reduction()
        self._handles: list[Any] = []
        self._install_hooks()
        synchronised = use_generation(model, lambda: BatchStatistics(self._reduction, self.transaction))
        self._salvages = not synchronised and self._may_salvage()
        self._repeated = RepeatedBackward(
            self._gradients.parameters,
            self.buckets,
            options.multi_step,
            synchronised,
            self.shards if isinstance(self.buckets, PassingBuckets) else None,
            self._before_repeated,
        )
        self._undeclared = UndeclaredOptimizers(optimizers, self._scalings.scalers, self.transaction)

        # Processes that are about to join.
        self.feeds: Feeds | None = None
        """Feeds of theirs; None where they get the state as members only."""
        whole_state = self._home is None and pod is None and not options.multi_step and not options.masters
        if whole_state and len(optimizers) == 1 and can_follow(optimizers[0]):
            self.feeds = Feeds(self._gradients.parameters, optimizers[0], self.layout_hash)

    def _init_home(
        self, layout: Layout, options: TrainerOptions, exact: ExactBuckets | None, has_scaler: bool
    ) -> None:
        """Decide where the parameters are stepped: on servers, in shards, or here.

        Args:
            layout: of the gradients.
            options: how the models are trained.
            exact: buckets of exact sums; None: sums are not exact.
            has_scaler: the script scales its losses.
        """
        with_norm = options.clip_norm is not None or has_scaler
        named, optimizers = self._gradients.named, self._optimizers
        self.servers: PsBackend | None = None
        if options.make_servers is not None:
            self.servers = options.make_servers(named, layout, optimizers, with_norm)
        self.shards: ShardedOptimizer | None = None
        if options.make_shards is not None:
            self.shards = options.make_shards(named, layout, optimizers, with_norm)
            if isinstance(self.buckets, PassingBuckets):
                self.shards.gradients_of = self.buckets.source
            self.shards.waits_for_values = self._values_are_read
            if exact is not None:
                exact.whole = False
                self.shards.use_exact(exact)
        self._home = self.servers or self.shards or home_here(self.tables, self._gradients.names, optimizers)
        self._sums_on_servers = self.servers is not None and self.servers.dense
        if self._sums_on_servers:
            self.nccl_device = None
        arriving = self._sums_on_servers or self.shards is not None
        self.pending = Pending(self._gradients.parameters if arriving else [])
        self._here = HereSteps(self._home, self.tables, self._gradients, self.buckets)
        self._dense_here = self._home is None or not self._home.dense
        self._staged: StagedSteps | None = None
        if self._multi_step and self._sums_on_servers and self.servers is not None:
            self._staged = StagedSteps(self.servers, self._gradients, self.buckets, options.clip_norm)
        self._whole_norm: Callable[[], float] | None = None
        """Returns the norm of all sums, which are here, in the order that members with shards have."""
        if exact is not None and self._clip_norm is not None and not self._multi_step and self._home is None:
            norm, sums = norm_of_all(layout), exact
            self._whole_norm = lambda: norm(sums.flats)

    def _init_state(
        self, model: torch.nn.Module, tracked: Mapping[str, Any], options: TrainerOptions
    ) -> None:
        """Take up what is committed, put back and transferred.

        Args:
            model: of the script; several as one.
            tracked: objects that are committed along, by name.
            options: how the models are trained.
        """
        parameters, buffers, optimizers = self._gradients.parameters, self._buffers, self._optimizers
        self._rollback = Rollback(parameters, buffers, optimizers, tracked, options.multi_step)
        here = self._dense_here and not options.masters
        self.past = PastBody(parameters, buffers, optimizers, tracked, is_here=here)
        self._scalings = Scalings(
            tracked.values(),
            optimizers,
            self._before_unscale,
            self._after_skip,
            self._broken_elsewhere,
            self._dense_here,
        )
        if self.servers is not None:
            self.servers.compression.loss_scale = self._scalings.scale
        self.state, self.whole_state = states_of(
            model,
            buffers,
            optimizers,
            {**tracked, **tracked_buckets(self.buckets)},
            self.servers or self.shards,
            self._dense_here,
            options.masters,
        )
        self.replicas = Replicas(
            buffers,
            ReplicaDigest(list(self._gradients.named.items())) if self._dense_here else None,
            None if self.shards is None else CopyDigest(self.shards),
            self.pod,
        )

    def _init_reduction(self) -> None:
        """Connect the buckets with what sums them."""
        self.reduction = self._reduction = Reduction(
            self.buckets,
            self._buffers,
            self._exact,
            self.transaction,
            self._home,
            self.tables,
            self._optimizers,
            self.replicas,
            self.pod,
        )
        # With several steps in a body each has other parameters; on servers the sums are theirs.
        at_once = self._dense_here and not self._multi_step and self.pod is None
        self.reduction.expects_unused = self.buckets.may_expect_unused and at_once
        self.reduction.in_batches = lambda: self.servers is not None and self.servers.asynchronous
        self.buckets.in_order = self.servers is None or not self.servers.takes_any_order
        # Servers sum in memory of theirs; a worker group sums in the buckets of its members.
        self.buckets.keeps_what_leaves = not self.buckets.in_order
        self.buckets.holds = lambda: self.transaction.phase is Phase.FINISHING

    def _install_hooks(self) -> None:
        """Have the script's backward passes, optimizer steps and forward passes call this object."""
        self._handles += self.buckets.watch(self._gradients.parameters, self._on_gradient)
        if self._multi_step:
            for index, parameter in enumerate(self._gradients.parameters):
                before = partial(self._before_gradient, index)
                self._handles.append(BeforeGradient(parameter, before))
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
        if self.pod is None:
            for part in self._models:
                part.register_forward_pre_hook(Hook(lambda *_: self._check_alive()))
        elif self.pod.shape.data_degree > 1:
            weigh_gradients(self._models, self._weight_in_pod)

    def _may_salvage(self) -> bool:
        """Return whether gradients of a dropped step can count in the next try at it."""
        low_rank = isinstance(self.buckets, LowRankBuckets)  # what it left out belongs to the dropped sums
        in_shards = self.shards is not None and self._exact is None
        on_servers = self._sums_on_servers and not self.tables
        own_gradients = self.pod is None and (self._home is None or in_shards or on_servers)
        return own_gradients and not (self._multi_step or low_rank or self._buffers.awaited)

    def close(self) -> None:
        """Take the hooks away that reach beyond the script's own objects."""
        for handle in self._handles:
            handle.remove()
        self._undeclared.close()
        self._repeated.close()
        self._gradients.close()
        if self.feeds is not None:
            self.feeds.stop("this process ends")
        self.pending.close()
        if self.servers is not None:
            self.servers.close()

    @property
    def failure(self) -> Failure | None:
        """Why a reduction (or a collective of the script's own) failed since the generation began."""
        return self._reduction.failure

    @failure.setter
    def failure(self, failure: Failure | None) -> None:
        self._reduction.failure = failure

    @property
    def waiting_since(self) -> float | None:
        """Monotonic time since when a reduction is being waited for. Any thread."""
        return self._reduction.waiting_since

    def checkpoint_tree(self, position: Position, plan: Mapping[str, int]) -> dict[str, Any]:
        """Return all of the state but what `take_snapshot` is for.

        Args:
            position: of the committed state.
            plan: fingerprint of the training loop.

        Raises:
            RuntimeError: servers fail.
        """
        if (remote := self.servers or self.shards) is not None:
            remote.settle()
        return self.whole_state.read(position, plan)

    def shard_runs(self, tree: Mapping[str, Any], *, whole: bool = True) -> dict[int, ShardRuns]:
        """Return which of a state's tensors are divided among the processes of the pod, and how.

        Args:
            tree: of the state, or its outline.
            whole: its tensors have the shapes of the whole ones; otherwise, of this process's parts.

        Returns:
            The runs of each, by the id of the tree's tensor; none without a mesh.
        """
        if self.pod is None:
            return {}
        at, found = self.pod.shape.coordinate(self.pod.local_rank), {}
        for tensor, parameter in self.whole_state.divided(tree, whole=whole):
            if id(parameter) not in self._shard_runs:
                apart = set(at) - set(lies_along(parameter))
                self._shard_runs[id(parameter)] = runs_of(parameter, not any(at[name] for name in apart))
            found[id(tensor)] = self._shard_runs[id(parameter)]
        return found

    def take_snapshot(self, name: str, rank: int, writers: Collection[int]) -> Elsewhere | None:
        """Have the servers keep what they hold for a checkpoint, or copy the shards that are here.

        Args:
            name: of the checkpoint.
            rank: of this member in the generation that the state is of.
            writers: ranks of the members that write a share.

        Returns:
            The part that is to be saved of them; None where there are neither.

        Raises:
            RuntimeError: servers, or other members, fail.
        """
        positions = self.positions
        if self.servers is not None:
            return self.servers.snapshot(name, len(writers), positions)
        return None if self.shards is None else self.shards.snapshot(rank, writers, positions)

    @property
    def positions(self) -> dict[int, int]:
        """Return, by number of a trained parameter, the place of its optimizer's state in a checkpoint."""
        return self.whole_state.positions(self._gradients.parameters)

    def positions_in(self, tree: Mapping[str, Any]) -> dict[int, int]:
        """Return the same for another state's tree; see `State.positions_in`."""
        return self.whole_state.positions_in(tree, self._gradients.parameters)

    def settle(self, parameters: Collection[int] | None) -> str | None:
        """Wait for the values of these parameters (None: all) from elsewhere; as `ask`."""
        return self.ask(partial(self.take_values, parameters)) if self.values_arrive else None

    @property
    def values_arrive(self) -> bool:
        """Whether a step's values come from servers, or from other members."""
        return self.servers is not None or self.shards is not None

    def take_values(self, parameters: Collection[int] | None) -> None:
        """Wait for the values of these parameters (None: all) from the servers, and note that they are here.

        Errors leave as they come: `ask` handles them.
        """
        if (remote := self.servers or self.shards) is not None:
            remote.settle(parameters, self.transaction.stepped)
            self.pending.mark_arrived(parameters)

    def missing_state(self) -> list[torch.Tensor]:
        """Return what the optimizers' state that a joiner receives looks like; see `memory.ready`."""
        return missing_state(self._optimizers)

    def gradient_forms(self) -> list[torch.Tensor]:
        """Return what gradients on the host look like, of a process by itself; none in a pod."""
        if self.pod is not None or self.device.type != "cpu":
            return []
        return [parameter.detach() for parameter in self._gradients.parameters if parameter.is_contiguous()]

    def import_ahead(self) -> None:
        """Import what the first call of an optimizer's `step` would import: others would wait for it."""
        with torch.autograd.profiler.record_function("springtide: the first one"):
            pass

    def forget_evaluated(self) -> None:
        """Free what forward passes of an evaluation have left of the pod's parameters."""
        if self.pod is not None and self.pod.shape.data_degree > 1:
            reshard(self._models)

    def ask(self, wait: Callable[[], object]) -> str | None:
        """Wait for servers; see `Reduction.ask`."""
        return self._reduction.ask(wait)

    # ---- the body

    @property
    def salvages(self) -> bool:
        """Whether what a dropped step has computed can be kept for the next try at it.

        It is the same on all members, and does not change.
        """
        return self._salvages

    @property
    def batch_number(self) -> int:
        """Number of the global batch that the open body trains. Raise UsageError outside of a body."""
        return self._running().assignment.number

    @property
    def gradient_norm(self) -> float | torch.Tensor | None:
        """Return the norm of the newest step's summed gradients before clipping, equal on all members.

        None without a `clip_norm`; a tensor where it is on a device.
        """
        return self._gradients.unclipped

    @property
    def total_weight(self) -> float:
        """Return the sum of the weights of all members' losses in the newest step: samples, unless the
        script gave others."""
        return self._summed_weight

    def begin(self, assignment: StepAssignment) -> None:
        """Open a body. Raise UsageError when the step cannot be isolated."""
        began = time.perf_counter()  # what is remembered here belongs to the step's time
        self._gradients.check_gone()
        self._gradients.check_frozen()
        self.transaction.begin(assignment.salvages)
        self._rollback.begin()
        self._gradients.begin()
        if self.pod is None:
            self._repeated.begin()
        (self._staged or self._here).begin()
        self._scalings.begin()
        self._depth = 0
        self._stepping = []
        self._undeclared.begin()
        self._body = StepContext(assignment, began)
        if self._earlier is not None and not assignment.first:
            self._body.began, self._body.reports = self._earlier.began, self._earlier.reports
            self._body.waited_seconds = self._earlier.waited_seconds
        self._reduction.begin(self._body)
        if self._exact is None:
            self.buckets.begin(self._reduction.start_gradients)
            self._reduction.expect_unused()
        else:
            self._exact.begin(
                assignment.group,
                assignment.number,
                assignment.first,
                assignment.last,
                self._reduction.start_gradients,
            )
        assignment.batch.micro.before_next = self._between_micro_batches
        if assignment.salvaged is not None:
            self._body.carried_samples = assignment.salvaged.samples
        if assignment.first:
            if assignment.salvaged is not None:
                self._go_on_with(assignment.salvaged, self._body)
            self._clock.begin()
        seed_part(assignment.seed, assignment.number, assignment.part)
        faults.reach("body", assignment.number)

    def _go_on_with(self, kept: Salvaged, body: StepContext) -> None:
        """Begin the body with what earlier tries at the step have kept."""
        self.buckets.go_on_with(kept.sums, kept.used)
        self._buffers.write(list(kept.buffers), kept.buffers)
        body.reports = {name: list(entries) for name, entries in kept.reports.items()}
        if self._exact is not None:
            self._exact.go_on_with(kept.parts)

    def _between_micro_batches(self) -> None:
        """Leave a step that is finishing: the gradients of a micro-batch are all there."""
        if self._exact is not None:
            return
        if self.transaction.phase is Phase.FINISHING:
            self._leave_finished()
        body = self._running()
        if self.buckets.keeps_base and body.assignment.batch.micro.next_is_last:
            body.before_last = BeforeLast(
                body.assignment.batch.micro.to_carry(),
                self._buffers.copies_of_moved(),
                {name: list(entries) for name, entries in body.reports.items()},
                time.perf_counter() - body.began - body.waited_seconds,
            )

    def _leave_finished(self) -> NoReturn:
        body = self._running()
        body.is_kept = True
        self.transaction.finish()
        raise Dropped(self.transaction.reason)

    def report(self, values: Mapping[str, float]) -> None:
        """Values of the current micro-batch, which count with its weight."""
        if self.past.is_open:
            return
        if self.transaction.phase in (Phase.STEPPING, Phase.STEPPED):
            raise UsageError(
                "report() after optimizer.step() in the same body comes too late, because values travel "
                "with the gradients: call report() before optimizer.step(), or after the body"
            )
        if self.pod is not None and self.transaction.phase is Phase.DROPPED:
            return  # see [Note: pods]
        self._require_working("report()")
        body = self._running()
        body.note(values, body.assignment.batch.micro.current_weight)

    def want_change(self, wanted: bool) -> None:
        """Whether this member asks all to stop after the running step; the next commit vote says so.

        Any thread.
        """
        self._reduction.change_wanted = wanted

    def on_save_wish(self, wish: Callable[[int], float]) -> None:
        """Set the function that each commit vote asks, with the rank, for a wish to save after the step."""
        self._reduction.save_wish = wish

    def on_figure(self, figure: Callable[[], Figure]) -> None:
        """Set the function that each commit vote asks for this member's figures for the cut by speed."""
        self._reduction.figure = figure

    def on_found(self, found: Callable[[], Sequence[float]]) -> None:
        """Set the function that each commit vote asks for what this member has found of streams of shards."""
        self._reduction.found = found

    def finish(self) -> None:
        """The script's code of the body has ended: the step cannot be dropped any more.

        Only where several steps were declared; otherwise that is so since optimizer.step(). Raise Dropped if
        it was dropped before, UsageError when something in it would be lost.
        """
        if not self._multi_step or self.transaction.phase is not Phase.OPEN:
            return
        body = self._running()
        if not body.reduced or not body.steps:
            return  # end_stepped() tells
        body.check_reported()
        self._cross(body)
        self._gradients.leave_zeros()
        self.pending.expect()
        self.transaction.finish_stepping()

    def end_dropped(self) -> Salvaged | None:
        """Put back what the dropped body moved; return what is kept of the step, None for nothing new.

        Raise UsageError when it cannot be put back.
        """
        self.buckets.close_gathering()
        kept = self._to_keep(self._running())
        self._rollback.put_back()
        self._gradients.put_back()
        self._body = self._earlier = None
        self._undeclared.end()
        self.transaction.end()
        return kept

    @property
    def is_void(self) -> bool:
        """Whether all members do the running step again in another way, so that nothing of it is kept."""
        return self._body is not None and self._body.is_void

    def _to_keep(self, body: StepContext) -> Salvaged | None:
        """Return what the dropped body, and those before it in the step, have computed, with what they began
        with; None where that is nothing new, or not known.
        """
        assignment = body.assignment
        if not assignment.salvages or assignment.batch.standin or body.is_void:
            return None
        before = 0.0 if assignment.salvaged is None else assignment.salvaged.seconds
        parts = () if self._exact is None else tuple(self._exact.contributions)
        # A part that has put nothing in leaves what earlier ones have.
        if (body.is_kept or (parts and not body.gradients)) and self.buckets.has_own:
            account, buffers = assignment.batch.micro.to_carry(), self._buffers.copies_of_moved()
            if self._exact is not None:
                numbers = merged((part.number, part.number + 1) for part in parts)
                account, buffers = Carried(account.ids[:0], numbers, 0.0), {}
            seconds = before + (body.own_seconds or time.perf_counter() - body.began - body.waited_seconds)
            sums, used = self.buckets.own(), self.buckets.used
            return Salvaged(account, sums, used, buffers, body.reports, seconds, parts)
        if (last := body.before_last) is None:
            return None
        sums, used = self.buckets.base(), self.buckets.in_base
        return Salvaged(last.account, sums, used, last.buffers, last.reports, before + last.seconds)

    def end_part(self) -> None:
        """The body of a part has ended, and its gradients are kept: put back the rest of what it moved.

        Raise UsageError when it cannot be.
        """
        self._rollback.put_back()
        self._gradients.put_back()
        self._body, self._earlier = None, self._body
        self._undeclared.end()
        self.transaction.end()

    def end_stepped(self) -> StepContext:
        """The body has ended after its optimizer step; return its account.

        Raise UsageError if it made no step.
        """
        body = self._running()
        check_ended(body, self.transaction.phase, self.buckets.any_used)
        body.skipped = self._scalings.found()
        self._repeated.end()
        self._body = self._earlier = None
        self._undeclared.end()
        return body

    def drop(self, reason: str) -> bool:
        """Drop the open step, or the next one; as `Transaction.drop`. Any thread."""
        may_be_done = self.transaction.drop(reason)
        self.buckets.close_gathering()
        return may_be_done

    # ---- hooks

    def _check_alive(self) -> None:
        self._finish_in_vain()
        self.transaction.check_alive()

    def _require_working(self, call: str) -> None:
        """Raise as `Transaction.require_open` does, for what belongs to a micro-batch."""
        self._finish_in_vain()
        self.transaction.require_open(call, finishing=True)

    def _finish_in_vain(self) -> None:
        """Leave a step that is finishing at once where its gradients are gone anyway."""
        if self.transaction.phase is Phase.FINISHING and not self.buckets.has_own:
            self.transaction.finish()

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.transaction.phase is Phase.IDLE:
            return  # gradients outside of a step are the script's own affair
        if self.pod is None:
            self._take_gradient(index, parameter)
            return
        try:
            self._take_gradient(index, parameter)
        except Dropped:
            parameter.grad = None  # see [Note: pods]

    def _take_gradient(self, index: int, parameter: torch.Tensor) -> None:
        self._require_working("backward()")
        body = self._running()
        if body.reduced:
            raise UsageError(
                "backward() after the gradients were summed (by optimizer.step() or scaler.unscale_()): a "
                f"body holds one optimizer step. {DECLARE}"
            )
        self._contribute()
        micro = body.assignment.batch.micro
        gradient = parameter.grad
        if gradient is None:
            raise removed(self._gradients.names[index])
        last = micro.is_last
        if self.buckets.has(index, micro.index) and self._exact is None:
            self._found_repeated(last)
        if body.gradients == 0:
            self._make_way()
        if self.pod is None:
            self._gradients.backward_reaches(index)
        if gradient.requires_grad:
            gradient = gradient.detach()  # `backward(create_graph=True)`: a sum is no part of the graph
        scale = micro.scale
        if self.pod is not None:
            if self.buckets.has(index, micro.index):
                raise UsageError(
                    f"two backward() of one micro-batch reach {self._gradients.names[index]}, and with "
                    "mesh() there can be one: add the losses up and call backward() once"
                )
            # Where fully_shard sums over the pod, it has weighed each process's gradients by samples.
            gradient, scale = local_shard(gradient), 1.0 if self.pod.shape.data_degree > 1 else scale
        view = self.buckets.put(index, gradient, scale, micro.index, last)
        parameter.grad = (view if self.pod is None else self._gradients.views[index]) if last else None
        self._reduction.put_rows(index, micro.scale, last and not self.buckets.patient, micro.index)
        self._count_gradients(1)
        if last and not self.buckets.patient and self._gathers and micro.scale:
            self.buckets.open_gathering(micro.scale, micro.index, self._on_full_bucket)

    def _before_repeated(self, index: int) -> None:
        """A gradient is about to come, maybe for a parameter whose last one has left already."""
        if self._body is not None and self.transaction.phase is Phase.OPEN and not self._body.reduced:
            micro = self._body.assignment.batch.micro
            if micro.is_last and self.buckets.has(index, micro.index):
                self._found_repeated(True)

    def _found_repeated(self, last: bool) -> None:
        self._repeated.found()
        if last and not self.buckets.patient:
            self._reduction.do_again(
                "another backward() of the same samples came when gradients were on their way; the step "
                "is done again, and from here on they wait for optimizer.step()"
            )

    def _on_full_bucket(self, gradients: int) -> None:
        """A bucket's gradients are about to be copied and sent."""
        self._require_working("backward()")
        self._contribute()
        self._count_gradients(gradients)

    def _contribute(self) -> None:
        try:
            self._running().assignment.batch.micro.contribute()
        except RuntimeError as error:
            raise UsageError(str(error)) from None

    def _count_gradients(self, more: int) -> None:
        body, half = self._running(), (len(self._gradients.parameters) + 1) // 2
        body.gradients += more
        if body.gradients - more < half <= body.gradients:
            faults.reach("backward", body.assignment.number)

    def _before_gradient(self, index: int) -> None:
        """Several steps in a body: a gradient is about to be accumulated, maybe the first of a round."""
        if self._body is not None and self._body.reduced and self.transaction.phase is Phase.OPEN:
            check_backward(self._exact is not None)
            self._gradients.forget_zeroed()
            (self._staged or self._here).begin_backward_pass(self._reduced_now, self._reduction)
            self._body.backward_pass += 1
            self._body.reduced = False
        if self._body is not None:
            self._repeated.before(index)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.past.is_open:
            return self.past.before_step(optimizer, args, kwargs)
        if optimizer in self._stepping:
            self._stepping.append(optimizer)
            return None  # torch's hooks run for `super().step()` too
        arguments = self._prepare_step(optimizer, args, kwargs)
        self._stepping.append(optimizer)
        if self._dense_here:
            self._gradients.lay_out()
        if self.feeds is not None:
            self.feeds.before_step()
        if self._masters is not None:
            self._masters.begin(optimizer)
        if (self._dense_here or self.shards is not None) and self.pod is None:
            if closure_of(args, kwargs) is None:  # which would see values that are put back
                self._fused_steps.begin(optimizer)
            self._foreach_steps.begin(optimizer)
        return arguments

    def _prepare_with_pod(self, pod: Pod, args: Any, kwargs: Any, optimizer: torch.optim.Optimizer) -> None:
        """Commit the step in all processes of the pod, or drop it in all. Raise Dropped."""
        body = self._running()
        if closure_of(args, kwargs) is not None:
            raise UsageError("optimizer.step(closure) cannot be together with mesh()")
        number, reason = body.assignment.number, "another process of this pod could not finish the step"
        try:
            self.transaction.require_open("optimizer.step()")
            self._complete(body)
            self.transaction.vote()
        except Dropped:
            pod.commits(number, able=False)
            raise
        agreed = pod.commits(number, able=True)
        self.transaction.decide(agreed, reason)
        if not agreed:
            self._reduction.failure = Failure(reason, [])
            body.assignment.group.shut()
            raise Dropped(reason)
        self._cross(body)
        self._gradients.clip_here(None, scale_of(optimizer))

    def _weight_in_pod(self) -> float:
        """Return what this process's gradients are multiplied by before the pod averages them."""
        if self.pod is None or self._body is None:
            return 1.0
        return self._body.assignment.batch.micro.scale * self.pod.shape.data_degree

    def _square_norm_of_pod(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the sum of squares over whole gradients, of which this process has parts; the processes of
        the pod call it together.
        """
        assert self.pod is not None
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        by_count: dict[int, list[int]] = {}
        for index in indices:
            by_count.setdefault(shard_count(self._gradients.parameters[index]), []).append(index)
        for count, chosen in sorted(by_count.items()):
            # Each part lies in as many processes as there are more of them than parts.
            square = self.buckets.square_norm(chosen).to(self.device)
            total += square * (count / self.pod.processes)
        return self.pod.total(total)

    def _prepare_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self.pod is not None:
            self._prepare_with_pod(self.pod, args, kwargs, optimizer)
            return None
        self._end_finishing()
        self.transaction.require_open("optimizer.step()")
        body = self._running()
        closure = closure_of(args, kwargs)
        if self._staged is not None:
            body.steps += 1
            if closure is not None:
                return with_closure(args, kwargs, partial(self._evaluate, optimizer, closure))
            self._stage(optimizer, body)
            return None
        if not self._multi_step:
            if closure is not None:
                raise UsageError(f"optimizer.step(closure) has to be declared. {DECLARE}")
            self._complete(body)
            self._cross(body)
            if self._dense_here:
                scale = scale_of(optimizer)
                norm = self._reduced_now.norm_elsewhere * self._scalings.inverse(optimizer)
                if self._whole_norm is not None:
                    self._gradients.clip_to(norm)
                    return None
                if self._home is None:
                    self._gradients.clip_here(None, scale)
                    return None
                elsewhere = norm * scale
                self._gradients.clip(None, scale, elsewhere)
            return None
        self._depth += 1
        if self._depth > 1:  # an optimizer that uses another one
            self._rollback.keep(optimizer)
            return None
        if not body.reduced and (closure is None or self.buckets.any_used):
            self._complete(body)
        self._rollback.keep(optimizer)
        body.steps += 1
        if closure is None:
            self._gradients.check_zeroed([optimizer])
            self._here.stage(optimizer, self._reduced_now, self._scalings)
            return None
        return with_closure(args, kwargs, partial(self._evaluate, optimizer, closure))

    def _stage(self, optimizer: torch.optim.Optimizer, body: StepContext) -> None:
        assert self._staged is not None
        self._complete(body)
        self._gradients.check_zeroed([optimizer])
        self._rollback.expect(optimizer)
        self._staged.stage(optimizer, self._reduced_now, self._scalings)

    def _evaluate(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """The closure's loss, as the mean over all members, with the sums of its gradients in place."""
        check_closure(self._exact is not None, isinstance(self.buckets, LowRankBuckets))
        body = self._running()
        self._gradients.lay_back()
        loss = closure()
        self._complete(body)
        if self._staged is None:
            self._here.stage(optimizer, self._reduced_now, self._scalings)
            self._gradients.lay_out()
        else:
            self._stage(optimizer, body)
        return self._reduction.mean_loss(loss, body)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.past.is_open:
            self.past.after_step(optimizer)
            return
        del self._stepping[-1:]
        if optimizer in self._stepping:
            return
        self._foreach_steps.end()
        self._fused_steps.end(optimizer)
        if self.feeds is not None:
            self.feeds.after_step()
        if self._masters is not None:
            self._masters.end(optimizer)
        if self.shards is not None:
            self._send_values(self.shards)
        if not self._stepping:
            self._gradients.lay_back()
        if self._staged is not None:
            self.pending.expect(self._staged.stepped(optimizer))
        elif self._multi_step:
            self._depth -= 1
        else:
            self._end_step()
        if self.pod is None:
            self._gradients.note_used(parameters_of(optimizer) if self._multi_step else None)
        faults.reach_in(self._running().backward_pass, "stepped", self._running().assignment.number)
        if self._values_are_read:
            self.settle(None)

    def _send_values(self, shards: ShardedOptimizer) -> None:
        """Send the values of own shards. Raise Dropped when those of others had to come, and do not."""
        try:
            shards.stepped()
        except SpringtideError:
            raise
        except RuntimeError as error:
            if self._exact is not None:
                self._exact.take_back()
            self._reduction.fall_back(error)

    def _end_finishing(self) -> None:
        """Leave a step that is finishing, all of whose gradients have to be there."""
        if self.transaction.phase is not Phase.FINISHING:
            return
        body = self._running()
        check_whole(body, self.buckets.any_used)
        if self._exact is not None:
            self._exact.keep(own_part(body.assignment, self._buffers, exact=True))
            self.buckets.end_part()
        self._leave_finished()

    def _before_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.sum_gradients("scaler.unscale_()")

    def sum_gradients(self, call: str) -> None:
        """Wait for the sums of all workers' gradients before optimizer.step(), which then takes them as they
        have become.

        Args:
            call: of the script, in words.

        Raises:
            Dropped: the step is dropped.
            UsageError: this is the wrong place.
        """
        if self.past.is_open:
            return
        self._end_finishing()
        self.transaction.require_open(call)
        body = self._running()
        if not body.reduced:
            self._complete(body)

    def _broken_elsewhere(self, optimizer: torch.optim.Optimizer) -> bool | None:
        """Whether a gradient of it is not finite in the step's home; None: there is none."""
        if self._home is None or self.past.is_open:
            return None
        return not math.isfinite(self._home.norm_of(optimizer))

    def _after_skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler has left the optimizer's step out, here and at all other members."""
        if self.past.is_open:
            return
        body = self._running()
        body.steps += 1
        if not self._multi_step:
            self._cross(body)
            self._end_step()
        elif self._staged is not None:
            self._staged.skip(optimizer)

    def _complete(self, body: StepContext) -> None:
        """Wait for the sums of what the body has put in, and make them the gradients."""
        if body.reduced:
            return
        assignment, micro = body.assignment, body.assignment.batch.micro
        check_whole(body, self.buckets.any_used)
        if assignment.is_warm_up:
            self.transaction.drop("a rehearsal ends here")
            self.transaction.check_alive()
        self._rollback.check_untouched()
        body.zeros = self._gradients.check_ours(micro.index)
        if not self._multi_step:
            self._gradients.check_zeroed(self._optimizers)
        self._make_way()
        kept_buffers = {} if assignment.salvaged is None else assignment.salvaged.buffers
        if assignment.batch.standin and kept_buffers:
            self._buffers.put_back()  # of what the stand-in has moved, nothing counts
            self._buffers.write(list(kept_buffers), kept_buffers)
        own = own_part(assignment, self._buffers, self._exact is not None, kept_buffers)
        parts = [own] if self._exact is None else self._exact.keep(own)
        body.is_kept = True  # from here on, whatever becomes of the sums
        if not assignment.last:
            self._end_gradients()
        self._clock.end()
        reduced = self._reduction.complete(body, parts)
        body.is_kept = False
        if assignment.group.size > 1 and (on_device := self._clock.seconds()) is not None:
            body.own_seconds = max(0.0, on_device - body.waited_before)
        self._buffers.take(reduced.combined)
        if self._whole_norm is not None:
            reduced = replace(reduced, norm=self._whole_norm())
        if self._dense_here:
            self._gradients.place(reduced.result.used, reduced.correction)
        else:
            self._gradients.show_zeros(body.zeros)
        self._reduced = reduced
        self._summed_weight = micro.global_samples / reduced.correction if reduced.correction else 0.0
        body.reduced = True
        (self._staged or self._here).placed(reduced)
        if self._multi_step:
            micro.begin_backward_pass()

    def _make_way(self) -> None:
        if self.servers is not None:
            self.ask(self.servers.make_way)

    def _cross(self, body: StepContext) -> None:
        """Pass the point after which the step cannot be dropped any more. Raise Dropped if it has been."""
        if not self._dense_here:
            self.buckets.check_untouched()
        self.transaction.start_stepping()
        faults.reach("stepping", body.assignment.number)
        if self._exact is not None:
            self._exact.commit(body.assignment.number)
        if not self._multi_step:
            self.buckets.take(index for index, used in enumerate(self._reduced_now.result.used) if used)
        self.buckets.committed()
        if self._home is not None:
            inverse, held = self._scalings.inverse(self._optimizers[0]), scale_of(self._optimizers[0])
            clip_norm, skip = self._clip_norm, self._scalings.found()
            if self._multi_step:  # each optimizer's step was staged with its own
                inverse, held, clip_norm, skip = 1.0, 1.0, None, not self._home.any_staged
            commit_on(self._home, self._reduced_now, self._gradients, clip_norm, inverse, skip, held)

    def _end_step(self) -> None:
        """The one step of the body is over."""
        gone = self.shards is not None  # what is in the buckets are partly sums
        needed = gone or (self.servers is not None and self.servers.asynchronous)
        self._gradients.leave(self._reduced_now.result.used, needed)
        self.pending.expect()
        self.transaction.finish_stepping()

    @property
    def _reduced_now(self) -> Reduced:
        assert self._reduced is not None
        return self._reduced

    # ---- parts

    def _end_gradients(self) -> NoReturn:
        """Leave the body of a part whose step goes on with another one."""
        assert isinstance(self.buckets, ExactBuckets)
        self.buckets.end_part()
        self.transaction.set_aside()
        raise PartDone

    def _running(self) -> StepContext:
        if self._body is None:
            raise UsageError(
                "outside of a step: put the training code of each batch into `with springtide.step():`"
            )
        return self._body
