"""The places of parameters that a trainer does not step itself, and the one that is on servers.

A trainer calls `PsBackend` from the script's thread. Of its two strategies one is active, and has no more
threads than their files say; both are over one `PsContext`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from springtide.comm.layout import Layout
from springtide.comm.process_group import Group
from springtide.comm.store import StreamStore
from springtide.ps.async_backend import AsyncBackend
from springtide.ps.batch_sharing import BatchSharing, GroupBatches
from springtide.ps.compression import GradientCompression
from springtide.ps.connections import Connections, ServerError
from springtide.ps.context import GroupSettings, PsContext, PsSettings
from springtide.ps.generation import GenerationStart, Meeting
from springtide.ps.host_memory import Copier
from springtide.ps.sharding import PlannedChunk
from springtide.ps.snapshot import Plan, Reader, Snapshot
from springtide.ps.speculative_pull import SpeculativeValues
from springtide.ps.step_spec import ServerOptimizers
from springtide.ps.sync_backend import SyncBackend
from springtide.ps.tables import TableIndex
from springtide.ps.worker_groups import DirectRoute, GradientRoute, GroupRoute
from springtide.settings import Settings

log = logging.getLogger("springtide")

_BEYOND_COORDINATOR = 60.0
"""An answer may wait for another member for as long as the coordinator lets it live."""


class Pushed(Protocol):
    """Gradients under way. nbytes: how much has been sent."""

    @property
    def nbytes(self) -> int: ...

    def wait(self) -> bool: ...

    def is_completed(self) -> bool: ...


class ParameterBackend(Protocol):
    """Parameters that a worker does not step itself, or not all of them: on servers, say.

    The order of calls in a step, each from the script's thread:

    1. `begin_step`.
    2. During backward `push` once for each bucket, where `dense`, and `stage_rows` once for each table, in
       any order; buckets in the layout's order unless it takes any.
    3. `prepare`, after all of these. When it has returned at all members, they agree on the step, and each
       that hears so has committed it.
    4. `ends`, with what the members have agreed on.
    5. Where a body has several optimizers, `stage_tables` for each that steps; and again from 2, after
       `begin_backward_pass`.
    6. `commit`, or nothing when the step is dropped: the next `begin_step` forgets it.
    7. `settle` before anything reads parameters.
    """

    @property
    def dense(self) -> bool:
        """Whether all parameters are there, not the rows of tables alone."""
        ...

    def begin_step(self) -> None:
        """Begin a step. Raise UsageError when the script has changed what it must not."""
        ...

    def begin_backward_pass(self) -> None:
        """Begin another backward pass of the body, after the last one's steps."""
        ...

    def push(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Send a bucket's gradients on their way, where the dense parameters are there.

        Args:
            gradients: Flat.
            bucket: Its number.
        """
        ...

    def ends(self, wanted: bool) -> bool:
        """Agree whether to stop: return whether this step is the last one, and not the next."""
        ...

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once, or heads.
            sums: float32 [n, dim].
        """
        ...

    def prepare(self) -> float | None:
        """Return the norm of all gradients there, if it was asked for, once all members' are there."""
        ...

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the norm as of the last `prepare`, of this optimizer's gradients."""
        ...

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """Have the tables of one of several optimizers make its step.

        Args:
            optimizer: The one that steps.
            scale: Gradients are multiplied by it and by `factor`; it is that of the whole step.
            factor: See `scale`.
            unused: Numbers of parameters to which nobody has a gradient.
        """
        ...

    @property
    def any_staged(self) -> bool:
        """Whether there are steps to be made with the commit, of several optimizers."""
        ...

    def commit(self, factors: Sequence[float], unused: Collection[int], skip: bool = False) -> None:
        """Make the step.

        Args:
            factors: Gradients are multiplied by them, one after the other where the home sums exactly.
            unused: Numbers of parameters to which nobody has a gradient.
            skip: Whether the step changes nothing.
        """
        ...

    def settle(self, parameters: Collection[int] | None = None) -> None:
        """Wait until the values of these parameters (None: all) are here."""
        ...


MakeBackend = Callable[
    [dict[str, torch.nn.Parameter], Layout, Sequence[torch.optim.Optimizer], bool], "PsBackend"
]
"""(trained parameters by name, their layout, optimizers, whether the gradients' norm is wanted)."""


class PsBackend:
    """Parameters on servers: a `ParameterBackend` whose members step together in one generation or do not.

    A generation's Start says which of both it is. Servers turn counted steps into applied batches, or back,
    when the generation enters (`springtide_ps.server.step_protocol`).

    In a generation: `begin_generation`, the transfer of `state_dict` to members that lack it, `resolve` when
    all members hold the state, steps, `rest` at a boundary. `fetch_again` when the script may have changed
    parameters between loops.
    """

    def __init__(self, context: PsContext) -> None:
        self.context = context
        settings = context.settings
        speculative: SpeculativeValues | None = None
        route: GradientRoute = DirectRoute()
        sharing: BatchSharing | None = None
        if settings.group is not None:
            route = group = GroupRoute(context, settings.group)
            sharing = GroupBatches(context, group)
        elif settings.dense and settings.early_values and not settings.with_norm:
            # The norm of all gradients, where it matters, is known too late for that.
            speculative = SpeculativeValues(context.memory.values)
        self.route = route
        """How gradients get to the servers, and values back."""
        self.speculative = speculative
        """Values that are asked for early; None: none are."""
        self.sync_backend = SyncBackend(context, route, speculative)
        self.async_backend: AsyncBackend | None = None
        """Backend of members that do not step together; None: they always do."""
        if settings.dense:
            self.async_backend = AsyncBackend(context, route, sharing, speculative)
        self.active: SyncBackend | AsyncBackend = self.sync_backend
        if settings.asynchronous and self.async_backend is not None:
            self.active = self.async_backend

    # ---- what it is

    @property
    def dense(self) -> bool:
        """Whether all parameters are on the servers, not the rows of tables alone."""
        return self.context.settings.dense

    @property
    def asynchronous(self) -> bool:
        """Whether the present generation's members do not step together."""
        return self.active.asynchronous

    @property
    def keeps_sums(self) -> bool:
        """Whether servers keep the sums of a body's backward passes, and show its steps before its end."""
        return self.active.keeps_sums

    @property
    def connections(self) -> Connections:
        """Return the connections to the servers of the present generation."""
        return self.context.connections

    @property
    def compression(self) -> GradientCompression:
        """Return how gradients are compressed on their way."""
        return self.context.compression

    @property
    def optimizers(self) -> ServerOptimizers:
        """The script's, as servers run them."""
        return self.context.optimizers

    @property
    def tables(self) -> TableIndex:
        """The tables of the model."""
        return self.context.tables

    @property
    def chunks(self) -> Sequence[PlannedChunk]:
        """The chunks of the dense parameters, in the order in which a forward pass needs them."""
        return self.context.sharding.chunks

    @property
    def described(self) -> str:
        """Return what all workers have to agree on."""
        return f"{self.tables.describe()} {self.compression.kind}"

    @property
    def in_use(self) -> set[str]:
        """The servers that this generation's shards are on."""
        return self.context.generation.in_use

    @property
    def copies(self) -> int:
        """How many servers hold each shard, at least."""
        return self.context.generation.copies

    @property
    def settled(self) -> bool:
        """Whether nothing is left to copy, and no server holds more than its part."""
        return self.context.generation.settled

    def copied(self) -> bool:
        """Whether the copies that this member has ordered are there; as `Generation.copied`."""
        return self.context.generation.copied()

    def call_when_bound_to_steps(self, call: Callable[[str], object]) -> None:
        """Have this called, with what a body does, when it does what there is in common steps only."""
        self.sync_backend.intermediate.on_use = call

    # ---- generations

    def begin_generation(
        self,
        start: GenerationStart,
        group: Group,
        store: StreamStore,
        *,
        holds: bool,
        leader: int,
        fresh: bool,
    ) -> None:
        """Have the servers begin the generation, and learn where the shards are.

        Args:
            start: Where it begins.
            group: Its members.
            store: Theirs.
            holds: This member has the state that it begins from.
            leader: Rank of the member that speaks for all.
            fresh: Nobody has a state: training begins from the leader's parameters and optimizer.

        Raises:
            ServersLackState: The servers do not hold the state that it begins from.
            RuntimeError: A server or a member fails.
        """
        following = self._following(start.in_batches)
        if following is not self.active:
            # What was asked of servers that are gone ends here, so that it is not waited for.
            self.connections.connect(start.servers, group.on_shut)
            self.active.close_generation()
            self.compression.change_strategy()
            self.active = following
        self.active.begin_generation(start, Meeting(group, store, leader, holds, fresh))

    def _following(self, asynchronous: bool | None) -> SyncBackend | AsyncBackend:
        if asynchronous is None:
            return self.active
        if not asynchronous:
            return self.sync_backend
        assert self.async_backend is not None
        return self.async_backend

    def resolve(self) -> None:
        """All members hold the state: let the servers make what is open of it, and fetch what is not here."""
        self.active.resolve()

    def fetch_again(self) -> None:
        """Take the servers' values: the script may have changed the parameters where that does not count."""
        self.active.fetch_again()

    def rest(self) -> None:
        """End at a boundary, where all members have committed the last step, what would be cut off.

        Wait until all servers have made the step, so that none of it is open when batches are counted; what
        is open then is done again.
        """
        self.active.rest()
        if self.asynchronous or self.async_backend is None:
            return
        try:
            self.sync_backend.await_commits()
        except ServerError as error:
            log.info("the last step may be open on some server: %s", error)

    def close(self) -> None:
        """End all connections and threads."""
        self.route.leave()
        self.connections.close()
        self.context.memory.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a member must know to let the servers make an open step."""
        return {"run id": self.context.generation.run_id, **self.sync_backend.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another member does."""
        self.context.generation.run_id = str(state["run id"])
        self.sync_backend.load_state_dict(state)

    def snapshot(self, name: str, readers: int, positions: Mapping[int, int]) -> Snapshot:
        """Have the servers keep what they hold after the last committed step.

        Args:
            name: The same at all readers.
            readers: How many members read it.
            positions: The place where the optimizer's state of a parameter stands in the checkpoint's tree.

        Returns:
            The snapshot as this member reads it.

        Raises:
            ServerError: No generation has begun.
        """
        context, generation = self.context, self.context.generation
        homes = {key: home[0] for key, home in generation.homes.items()}
        clients = {server: context.connections[server] for server in sorted(set(homes.values()))}
        plan = Plan(context.layout, context.sharding.chunks, context.tables.slices, homes, positions)
        reader = Reader(name, context.settings.me, readers, context.connections.part_bytes)
        return Snapshot(clients, plan, generation.start.token, generation.step, reader)

    # ---- a step

    def begin_step(self) -> None:
        """Begin a step. Raise UsageError when the script has changed what servers have."""
        self.active.begin_step()

    def begin_backward_pass(self) -> None:
        """Begin another backward pass of the body. Raise ServerError, UsageError."""
        self.active.begin_backward_pass()

    def carried(self, index: int, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        """Return this worker's part of what the script leaves of a gradient, which the next one adds to.

        Args:
            index: Number of the parameter.
            gradient: As it is left, multiplied by `factor` since the sum was made.
            factor: The factor that it was multiplied by.

        Returns:
            This worker's part.
        """
        return self.active.carried(index, gradient, factor)

    def make_way(self) -> None:
        """Wait until gradients may be kept where those of the last body are. Raise ServerError."""
        self.active.make_way()

    @property
    def takes_any_order(self) -> bool:
        """Whether buckets may be pushed in any order: nobody sums them on the way to the servers."""
        return self.dense and self.route.takes_any_order

    def push(self, gradients: torch.Tensor, bucket: int) -> Pushed:
        """Send a bucket's gradients on their way.

        Args:
            gradients: Flat.
            bucket: Its number.

        Returns:
            The gradients that this worker sends.

        Raises:
            RuntimeError: A server or a member fails.
        """
        return self.active.push(gradients, bucket)

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once, or heads.
            sums: float32 [n, dim].

        Raises:
            RuntimeError: A server fails.
        """
        self.active.stage_rows(index, ids, sums)

    def prepare(self) -> float | None:
        """Return the norm of all gradients, if there is to be one, once they are on the servers.

        Raise RuntimeError.
        """
        return self.active.prepare()

    def ends(self, wanted: bool) -> bool:
        """Agree whether to stop: return whether this step is the last one."""
        return self.active.ends(wanted)

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the norm as of the last `prepare`, of this optimizer's gradients."""
        return self.optimizers.norm_of(optimizer)

    def stage(
        self,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        scale: float,
        inverse: float,
        unused: Collection[int],
        resting: Collection[int],
    ) -> float:
        """Note the step that the script makes with one of several optimizers.

        Args:
            optimizer: The one that steps.
            clip_norm: See `ServerOptimizers.stage`, like `scale`, `inverse` and `resting`.
            scale: Of the whole step.
            inverse: A GradScaler's.
            unused: Parameters to which no worker had a gradient.
            resting: Parameters whose gradients the script has taken away.

        Returns:
            The factor by which the gradients are multiplied besides `scale`.

        Raises:
            UsageError: Servers cannot make it.
        """
        return self.active.stage(optimizer, clip_norm, scale, inverse, unused, resting)

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """Note a step of tables, to be made when the body is committed.

        Args:
            optimizer: The one that steps.
            scale: Of the whole step.
            factor: The factor by which gradients are multiplied besides.
            unused: Numbers of parameters to which nobody has a gradient.

        Raises:
            UsageError: Servers cannot make it.
        """
        self.active.stage_tables(optimizer, scale, factor, unused)

    @property
    def any_staged(self) -> bool:
        """Whether there are steps to be made with the commit, of several optimizers."""
        return bool(self.optimizers.staged)

    def commit(self, factors: Sequence[float], unused: Collection[int], skip: bool = False) -> None:
        """Have the servers make the step, which is committed, and begin to fetch the values.

        Args:
            factors: Sums are multiplied by their product.
            unused: Parameters to which no worker had a gradient.
            skip: Whether the step changes nothing.
        """
        self.active.commit(math.prod(factors), unused, skip)

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """Wait until values are here.

        Args:
            parameters: Whose (None: all).
            to_the_end: Within the body that has committed the step: wait also when the generation is over.

        Raises:
            ServerError: They do not come.
            UsageError: The script looks at what servers cannot show.
        """
        self.active.settle(parameters, to_the_end)

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """Return rows of a table; before the first generation those that this process would make.

        Args:
            index: Number of the parameter that stands for it.
            ids: int64 [n], each once.
            to_the_end: As for `settle`.

        Returns:
            float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
            UsageError: The script looks at what servers cannot show.
        """
        return self.active.read_rows(index, ids, to_the_end)

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (ids, rows) of a table; before the first generation those that this process holds.

        Args:
            index: Number of the parameter that stands for it.
            to_the_end: As for `settle`.

        Returns:
            ids int64 [n] in order, and rows float32 [n, dim].

        Raises:
            ServerError: A server does not answer.
        """
        return self.active.all_rows(index, to_the_end)


def backend_for(settings: Settings, copier: Copier | None = None) -> MakeBackend:
    """Return what makes a trainer's backend.

    Args:
        settings: The worker's.
        copier: See `HostMemory`; None: the one that the parameters' device needs.

    Returns:
        The function that a trainer calls with its parameters.
    """

    def make(
        parameters: dict[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        with_norm: bool,
    ) -> PsBackend:
        dense = settings.strategy == "ParameterServer"
        group: GroupSettings | None = None
        if dense and settings.group_size > 1:
            group = GroupSettings(settings.group_size, settings.pod_ip, settings.collective_seconds)
        own = PsSettings(
            me=settings.process_id,
            token=(settings.token, *settings.former_tokens),
            replication=settings.replication,
            with_norm=with_norm,
            connect_seconds=settings.connect_seconds,
            answer_seconds=settings.collective_seconds + _BEYOND_COORDINATOR,
            authority=settings.server_authorities,
            dense=dense,
            asynchronous=settings.asynchronous,
            early_values=settings.early_values,
            group=group,
        )
        compression = GradientCompression(settings.push_compression, settings.top_k_ratio)
        return PsBackend(PsContext(parameters, layout, optimizers, own, compression, copier))

    return make
