"""The things that the strategies of one worker share: connections, shards, memory and options.

The script's thread uses all of it. Beside it, each connection's thread lands values in `memory`, the thread
of a device's copies reads gradients, and any thread may end the waits of `connections`. There is no lock:
what another thread brings is a future, for which the script's thread waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from springtide.comm.layout import Layout
from springtide.embedding.handle import tables_among
from springtide.ps.compression import GradientCompression
from springtide.ps.connections import Connections
from springtide.ps.generation import Generation, GenerationStart, Meeting, Planned
from springtide.ps.host_memory import Copier, HostMemory
from springtide.ps.local_values import LocalValues
from springtide.ps.optimizer_state import cut_states
from springtide.ps.sharding import Sharding, plan_chunks
from springtide.ps.step_spec import ServerOptimizers
from springtide.ps.tables import PlannedSlice, TableIndex
from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Workers in groups. size: of a group. address: IP of this process for the groups' sums."""

    size: int
    address: str
    collective_seconds: float


@dataclass(frozen=True, slots=True)
class PsSettings:
    """Say what a worker knows of its servers before the first generation.

    me: name of this worker. token: for connections. replication: copies of each shard. with_norm: whether the
    norm of all gradients is wanted. authority: see `Connections`. dense: all parameters are on the servers,
    not the rows of tables alone. asynchronous: whether members step together before a generation says so.
    early_values: whether values may be asked for before their step is committed. group: None where each
    worker speaks to the servers for itself.
    """

    me: str
    token: str
    replication: int
    with_norm: bool
    connect_seconds: float
    answer_seconds: float
    authority: str = ""
    dense: bool = True
    asynchronous: bool = False
    early_values: bool = True
    group: GroupSettings | None = None


class PsContext:
    """Made once for a script, from its trained parameters by name, their layout and its optimizers.

    compression: of gradients on their way; None: they travel as they are. copier: see `HostMemory`.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        settings: PsSettings,
        compression: GradientCompression | None = None,
        copier: Copier | None = None,
    ) -> None:
        self.settings = settings
        self.layout = layout
        self.compression = compression or GradientCompression()
        self.tables = TableIndex(tables_among(list(parameters.values())), list(parameters), optimizers)
        self.optimizers = ServerOptimizers(optimizers, parameters)
        self.connections = Connections(
            settings.token, settings.connect_seconds, settings.answer_seconds, settings.authority
        )
        dense = dict(parameters) if settings.dense else {}
        own = self.optimizers
        chunks = plan_chunks(layout, own.groups, owners=own.owners) if dense else []
        self.sharding = Sharding(layout, list(dense), chunks)
        self.memory = HostMemory(list(dense.values()), layout, copier)
        self.values = LocalValues(list(dense.values()), list(dense), self.sharding, self.memory)
        self.planned: list[Planned] = [*self.sharding.chunks, *self.tables.slices]
        self.generation = Generation(self.connections, self.planned, self.sharding, settings.me)

    def open_generation(self, start: GenerationStart, meeting: Meeting) -> None:
        """Connect to the generation's servers, and let go of what the last one was about.

        Args:
            start: Where it begins.
            meeting: The members that meet for it.

        Raises:
            ServerError: A server cannot be reached.
        """
        self.generation.open(start)
        self.optimizers.begin()
        self.compression.reopen()
        self.connections.connect(start.servers, meeting.group.on_shut)
        self.memory.drop()
        if meeting.fresh:
            self.memory.bring_down()
        if not meeting.holds:
            self.values.lose()

    def new_shard(self, planned: Planned) -> Chunk | Slice:
        """Return what a server begins to hold of a fresh start: what is in this process."""
        if isinstance(planned, PlannedSlice):
            return self.tables.make(planned)
        chunk = self.optimizers.make(self.values.of(planned), planned.pieces, planned.optimizer)
        states = self.optimizers.state_of(planned.optimizer)
        cut_states(self.layout, planned, chunk, self.values.parameters, states)
        return chunk

    def hand_over_states(self) -> None:
        """Forget the optimizers' state in this process: it lives on the servers from now on."""
        self.optimizers.forget(self.values.parameters)

    def begin_step(self) -> None:
        """Check that the script has changed nothing that servers have. Raise UsageError."""
        self.optimizers.check_unchanged(self.settings.dense)
        self.connections.failed_step = ""
        self.memory.drop()
        self.optimizers.begin()
        self.values.check_unchanged()

    def ask(
        self,
        server: str,
        kind: Kind,
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]:
        """Make a request in the generation's name.

        Args:
            server: Its id.
            kind: Of the request.
            meta: Its content, in JSON's types.
            payload: The tensor that it brings.
            out: Where the answer's payload lands.
            any_size: Whether the answer may have any size.

        Returns:
            The answer to come.

        Raises:
            ServerError: The connection is broken, or no generation has begun.
        """
        token = self.generation.start.token
        return self.connections.ask(server, kind, token, meta, payload, out, any_size)

    def awaited(self, key: str) -> str:
        """Return what is waited for of a shard, for messages."""
        return f"the newest values of {self.sharding.describe(key)}"
