"""The shards that a server holds for a job: gradients are summed as they come, steps are made as decided.

Which thread calls what: the threads that read requests call the public methods, in any order and at once.
Threads of the store's own (`springtide-ps-steps`, one for each core) make the steps, each shard's in their
order, answer those that wait for their values, make steps early, and begin copies. Answers of other servers
come on any thread.

Which lock guards what: `_lock` (a lock that its holder may take again) guards everything here but the inside
of shards: which there are, the two-phase commit, the lists of those that wait, and what the parts below hold.
`_work` is notified when there is something to do for the store's threads, `_changed` when they have done it.
A shard's own lock keeps its chunk, version and sums from changing.

Where both are needed, `_lock` comes first. But a shard may be locked for long, by a gradient that is added or
a step that is made, and whatever waits for it in `_lock` would stop all clients. So requests that come in
every step give `_lock` back before they take the shard's, and look again then: `_fences` counts the
generations that have begun, and what one leaves behind is cleared, in the shard's lock, after it is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import torch

from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.chunk import BACKWARD_PASSES_LIMIT, Chunk, ChunkError, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.idmap import Ids
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.server.cores import available_cores
from springtide_ps.server.failed_shards import FailedShards
from springtide_ps.server.replication import Incoming, Later, Replicator
from springtide_ps.server.row_gather import Done, HasRows, RowGather
from springtide_ps.server.shard import Fill, Forward, LockedShard, Shard, Sum
from springtide_ps.server.snapshot import DumpPiece, SnapshotKeeper, describe_shard, give
from springtide_ps.server.snapshot_reader import part_of
from springtide_ps.server.speculation import (
    IntermediateRows,
    Speculator,
    apply,
    intermediate_values,
    is_wanted,
    not_expected,
    speculate,
)
from springtide_ps.server.speculative_copy import SpeculativeCopy
from springtide_ps.server.step_protocol import Effect, StaleError, StepProtocol, StepProtocolError, Token
from springtide_ps.server.step_queue import Job, StepQueue
from springtide_ps.wire.frames import PART_BYTES

log = logging.getLogger("springtide.ps")

MAX_SPECS: Final = 256
_SUMS_AHEAD: Final = 4
"""Most steps that the first server of a shard is ahead of those that keep copies."""
_STEP_SECONDS: Final = 60.0

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Holding:
    """How much a server holds.

    Attributes:
        pieces: chunks, and slices of tables, those that are copies of another server's included.
        nbytes: memory of their values and optimizer state.
        rows: rows of the slices.
    """

    pieces: int
    nbytes: int
    rows: int


class ShardStore:
    """All shards of a server, through generations and steps.

    Methods raise StepProtocolError for what does not belong to the present step (StaleError for what belongs
    to an earlier generation), ChunkError and SparseGradientError for tensors that do not fit. A `done` gets a
    result, or None and an error, now or later, from any thread.

    Args:
        forward: sends a sum to another server.
        fill: sends a shard, or a part of one, to another server.
        part_bytes: a slice of more goes to another server in parts of so many.
        threads: that make steps; 0: one for each core that the process may use.

    Attributes:
        steps: how many steps were decided here.
        evicted: rows that slices let go on this server; those of a step that was only tried count, too, so
            that the number never falls.
        failed_shards: the shards whose update failed, and why.
        snapshots: what is kept of shards as they were, for those who read them while training goes on.
        replicator: copies on their way to other servers, and from them.
    """

    def __init__(self, forward: Forward, fill: Fill, part_bytes: int = PART_BYTES, threads: int = 0) -> None:
        self._forward = forward
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._work = threading.Condition(self._lock)

        # The present generation and its step.
        self._protocol = StepProtocol()
        self._step_specs: dict[int, StepSpec] = {}  # by step, until all shards have made it
        self._prepares: list[tuple[bool, Done]] = []
        self._commits: list[Done] = []
        self._fences = 0  # generations that have begun here
        self._adding = 0  # gradients that are counted already, and not in their sums yet
        self._unclosed = False  # whether sums that all members have prepared can be open still
        self._unacknowledged = 0  # sums on their way to copies
        self._lost_backup = ""
        self._norms_wanted = False  # whether the last step's members wanted norms
        self._measured: Sum = (-1, 0)  # the backward pass all of whose norms are made, or are being made
        self._measuring = 0  # so many of them are still to be made
        self.steps = 0

        # The shards, and what is kept or made beside them.
        self._shards: dict[str, Shard] = {}
        self.failed_shards = FailedShards()
        self.snapshots = SnapshotKeeper(time.monotonic)
        self._speculator = Speculator()
        self.replicator = Replicator(
            self._work, fill, self.snapshots.chunk_reads, part_bytes, self._on_steps_thread
        )
        self.evicted = 0
        self._counting = threading.Lock()  # of `evicted`: shards change on several threads

        # The work of the threads that make the steps.
        self._todo = StepQueue()
        self._asides = deque[Callable[[], None]]()  # for when no step is to be made
        self._busy = 0  # threads at work
        self._done = 0  # pieces of work
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work_for_ever, name=f"springtide-ps-steps-{number}", daemon=True)
            for number in range(threads or available_cores())
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Send everybody away who waits, and end the threads."""
        with self._lock:
            self._closed = True
            self._fence(StaleError("this server ends"))
            self._changed.notify_all()
            self._work.notify_all()
        for thread in self._threads:
            thread.join(30.0)

    # ---- what there is

    @property
    def held_bytes(self) -> int:
        """Return the memory of all shards, those included of which only parts are here."""
        with self._lock:
            held = sum(shard.chunk.nbytes for shard in self._shards.values() if shard.chunk is not None)
            return held + self.replicator.incoming_bytes

    @property
    def unlocked_bytes(self) -> int:
        """Return `held_bytes` as of a moment ago, for a caller that may hold a shard's lock."""
        chunks = [shard.chunk for shard in list(self._shards.values())]
        return sum(chunk.nbytes for chunk in chunks if chunk is not None) + self.replicator.incoming_bytes

    @property
    def dense_bytes(self) -> int:
        """Return the memory of the chunks that can have a second copy."""
        with self._lock:
            return sum(s.chunk.nbytes for s in self._shards.values() if isinstance(s.chunk, Chunk))

    @property
    def holding(self) -> Holding:
        """Return how much is held, for metrics."""
        with self._lock:
            pieces = [shard.chunk for shard in self._shards.values() if shard.chunk is not None]
        rows = sum(len(piece.table) for piece in pieces if isinstance(piece, Slice))
        return Holding(len(pieces), sum(piece.nbytes for piece in pieces), rows)

    @property
    def keys(self) -> list[str]:
        """Return the keys of all shards, those included of which only sums are here."""
        with self._lock:
            return list(self._shards)

    @property
    def version(self) -> int:
        """Return the last step that was decided."""
        return self._protocol.version

    @property
    def token(self) -> Token:
        """Return the name of the present generation.

        Raises:
            StepProtocolError: none has entered yet.
        """
        if self._protocol.token is None:
            raise StepProtocolError("no generation has entered")
        return self._protocol.token

    def inventory(self, token: Token) -> list[str]:
        """Return the keys of the shards that are, or can be brought, at the generation's first state."""
        with self._lock:
            self._protocol.check_token(token)
            self.settle()
            version, needed, number = (
                self._protocol.version,
                self._protocol.unresolved,
                self._protocol.backward_pass,
            )

            def can_be_had(shard: Shard) -> bool:
                here = shard.version == version and (needed is None or shard.has_sums(needed, number))
                return here or shard.version == needed

            return [k for k, shard in self._shards.items() if shard.chunk is not None and can_be_had(shard)]

    def shard(self, key: str) -> Shard:
        """Return the shard.

        Raises:
            StepProtocolError: its chunk is not here.
        """
        shard = self._shards.get(key)
        if shard is None or shard.chunk is None:
            raise self.failed_shards.error_for(key)
        return shard

    def piece(self, key: str) -> Chunk | Slice:
        """Return the chunk or slice. Raises as `shard`."""
        chunk = self.shard(key).chunk
        assert chunk is not None
        return chunk

    def dense(self, key: str) -> Chunk:
        """Return the chunk.

        Raises:
            StepProtocolError: it is not here, or is a slice of a table.
        """
        if not isinstance(chunk := self.piece(key), Chunk):
            raise StepProtocolError(f"{key!r} is a slice of a table")
        return chunk

    def slice_of(self, key: str) -> Slice:
        """Return the slice.

        Raises:
            StepProtocolError: it is not here, or is no slice of a table.
        """
        found = self.piece(key)
        if not isinstance(found, Slice):
            raise StepProtocolError(f"{key!r} is no slice of a table")
        return found

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the shard's numbers. Raises as `shard`."""
        return self.piece(key).dtype

    def check_gradient(self, key: str, nbytes: int, dtype: torch.dtype | None) -> None:
        """Refuse a gradient that does not fit a shard.

        Args:
            key: the shard's.
            nbytes: of the gradient.
            dtype: of its elements; None: the values'.

        Raises:
            StepProtocolError: the shard is not here.
            ChunkError: the gradient does not fit it.
        """
        self.piece(key).check_gradient(nbytes, dtype)

    # ---- generations

    def enter(
        self,
        token: Token,
        members: Iterable[str],
        step: int,
        run_id: str,
        in_batches: bool = False,
        skipped: int = 0,
    ) -> int:
        """Begin a generation, or enter one as a further member; see `StepProtocol.enter`.

        Args:
            token: the generation's.
            members: ids of all its members.
            step: the step that it begins from; 0 where its members do not step together.
            run_id: of the state's history.
            in_batches: its members do not step together.
            skipped: how many of the steps so far changed nothing, where batches begin to be counted.

        Returns:
            The step that this server is at.

        Raises:
            StaleError: a newer generation has begun.
        """
        with self._lock:
            self.settle()
            before = self._protocol.version
            effects = self._protocol.enter(token, frozenset(members), step, run_id, in_batches)
            if Effect.FENCE in effects:
                self.snapshots.chunk_reads.clear()
            if {Effect.BEGIN_APPLIED_BATCHES, Effect.COUNT, Effect.FORGET}.intersection(effects):
                self._before_change(self._shards)
            for effect in effects:
                if effect is Effect.FENCE:
                    self._fence(StaleError(f"generation {token} has begun"))
                elif effect is Effect.ROLL_BACK:
                    self._roll_back(before)
                elif effect is Effect.DROP:
                    self._drop_sums()
                elif effect is Effect.BEGIN_APPLIED_BATCHES:
                    self.keep_where(lambda shard: shard.begin_applied_batches(skipped))
                elif effect is Effect.COUNT:
                    self.keep_where(lambda shard: shard.count_steps(self._protocol.version))
                elif effect is Effect.FORGET:
                    self._shards, self._step_specs, self.failed_shards = {}, {}, FailedShards()
            return self._protocol.version

    def resolve(self, token: Token, step_spec: StepSpec | None) -> None:
        """Decide the step that the last generation left open; see `StepProtocol.resolve`.

        Args:
            token: the generation's.
            step_spec: how the step is made; None: the caller does not know.

        Raises:
            StepProtocolError: it is needed, and not given.
        """
        with self._lock:
            if self._protocol.resolve(token, step_spec):
                self._make_step()

    def check_token(self, token: Token, in_batches: bool = False) -> None:
        """Refuse a request of a generation that is not the present one.

        Args:
            token: the generation's.
            in_batches: its members must not step together.

        Raises:
            StaleError: it is over.
            StepProtocolError: it has not entered, or (in_batches) its members step together.
        """
        with self._lock:
            self._protocol.check_token(token)
            if in_batches and not self._protocol.in_batches:
                raise StepProtocolError(
                    f"the members of generation {token} step together: it has no batches of single members"
                )

    def check_member(self, token: Token, member: str) -> None:
        """Refuse a request unless its member is one of the present generation, whose members do not step
        together.

        Args:
            token: the generation's.
            member: its id.

        Raises:
            StaleError: the generation is over.
            StepProtocolError: it is no such member, or no such generation.
        """
        with self._lock:
            self.check_token(token, in_batches=True)
            if member not in self._protocol.members:
                raise StepProtocolError(f"{member} is no member of generation {token}")

    def keep_where(self, change: Callable[[Shard], bool]) -> None:
        """Change every shard; hold those no more of which `change` says that they cannot be."""
        with self._lock:
            self._shards = {key: shard for key, shard in self._shards.items() if change(shard)}

    def _fence(self, error: Exception) -> None:
        """Send away whoever waits for something of the generation before (in the lock)."""
        self._fences += 1
        waiting = [done for _, done in self._prepares] + self._commits
        self._prepares, self._commits, self._asides = [], [], deque()
        self._adding, self._unclosed = 0, False
        self._measured, self._measuring = (-1, 0), 0
        self._unacknowledged, self._lost_backup = 0, ""
        for shard in self._shards.values():
            waiting += [done for _, done in shard.waiting]
            shard.waiting, shard.forward = [], []
        waiting += self._speculator.forget(self._shards.values())
        # Copies that are not whole are made anew, by who is told to.
        self.replicator.fence()
        self._shards = {key: shard for key, shard in self._shards.items() if shard.chunk is not None}
        for done in waiting:
            done(None, error)

    def _drop_sums(self) -> None:
        version = self._protocol.version
        for shard in self._shards.values():
            with shard.lock:
                shard.drop_sums(lambda step: step > version)
                shard.closed = (-1, 0)

    def _roll_back(self, version: int) -> None:
        """Forget the step after `version`, which was only tried."""
        self._step_specs.pop(version + 1, None)
        self.keep_where(lambda shard: shard.roll_back(version))

    # ---- shards that come and go

    def load(self, token: Token, key: str, version: int, chunk: Chunk | Slice) -> None:
        """Hold a shard from now on; sums that came before it are applied.

        Args:
            token: the generation's.
            key: the shard's.
            version: the step after which it is.
            chunk: its values and their state.

        Raises:
            StaleError: the generation is over.
        """
        with self._lock:
            self._protocol.check_token(token)
            self._before_change([key] if key in self._shards else [])
            shard = self._shards.setdefault(key, Shard())
            with shard.lock:
                shard.chunk, shard.version, shard.spare = chunk, version, None
                shard.speculative = SpeculativeCopy()
                shard.drop_sums(lambda step: step <= version)
            self.failed_shards.forget(key)
            self._bring([key], self._protocol.version, False)

    def load_part(
        self,
        token: Token,
        key: str,
        version: int,
        begin: Callable[[], Slice],
        at: int,
        total: int,
        memory: torch.Tensor,
    ) -> None:
        """Take in bytes of a slice; with the last ones it is held, as by `load`.

        Args:
            token: the generation's.
            key: the slice's.
            version: the step after which it is.
            begin: makes the slice that they are written into.
            at: number of the first byte.
            total: bytes of the whole slice.
            memory: the bytes (uint8).

        Raises:
            StepProtocolError: a part out of order, or one that cannot be taken in.
        """
        piece = None if at else begin()
        with self._lock:
            self._protocol.check_token(token)
            if piece is not None:
                if key in self._shards:
                    self._before_change([key])
                    with (shard := self._shards[key]).lock:
                        shard.chunk = None
                self.replicator.begin_incoming(key, Incoming(token, version, piece, total))
            incoming = self.replicator.expect_part(key, at, total)
        try:
            if incoming.write(memory):
                self._load_copy(key, incoming)
        except Exception as error:
            with self._lock:
                self.replicator.give_up(key, incoming)
            if isinstance(error, StepProtocolError | ChunkError):
                raise
            raise StepProtocolError(f"a copy of {key!r} cannot be made: {error!r}") from error

    def _load_copy(self, key: str, incoming: Incoming) -> None:
        """Hold a slice that is whole, after the updates that came while it was on its way."""
        incoming.piece.finish()
        while True:
            with self._lock:
                self._protocol.check_token(incoming.token)
                updates = self.replicator.take_updates(key, incoming)
                if not updates:
                    self.load(incoming.token, key, incoming.version, incoming.piece)
                    return
            with self._evictions_counted(incoming.piece):
                for update in updates:
                    update(incoming.piece)

    def arrange(
        self,
        token: Token,
        forward: Mapping[str, list[str]],
        fill: Mapping[str, list[str]],
        drop: Iterable[str],
    ) -> None:
        """Say where copies of shards are, from now on.

        Args:
            token: the generation's.
            forward: by key, the servers that the sums go to.
            fill: by key, the servers that a copy of the shard is sent to.
            drop: keys of the shards that are held here no more.

        Raises:
            StepProtocolError: a shard that is named is not here.
        """
        with self._lock:
            self._protocol.check_token(token)
            drop = [key for key in drop if key in self._shards]
            self._before_change(drop)
            for key in drop:
                del self._shards[key]
            for key in {*forward, *fill}:
                self.shard(key)
            for key, addresses in forward.items():
                self._shards[key].forward = list(addresses)
            for key, addresses in fill.items():
                for address in addresses:
                    self.replicator.want(key, address)
            self._work.notify_all()

    def give_up(self, key: str, why: Exception) -> StepProtocolError:
        """Hold a shard no more whose update failed; the next generation finds that out.

        Args:
            key: the shard's.
            why: error of the update.

        Returns:
            The error for those who ask for it.
        """
        with self._lock:
            shard, told = self._shards.pop(key, None), self.failed_shards.add(key, why)
        if shard is not None:
            for done in [done for _, done in shard.waiting] + shard.speculative.forget():
                done(None, told)
        return told

    def _before_change(self, keys: Iterable[str]) -> None:
        """Copy what a snapshot keeps of these shards, before they change or go (in the lock)."""
        for key in keys:
            shard = self._shards[key]
            with shard.lock:
                if shard.chunk is not None:
                    self.snapshots.before(key, shard.chunk, shard.version)

    # ---- a step: gradients

    def take_spare(self, key: str, nbytes: int, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Return unused memory for a gradient.

        The caller stages the gradient with it, or lets it go.

        Args:
            key: the shard's.
            nbytes: of the gradient.
            dtype: of its elements; None: the values'.

        Returns:
            uint8 [nbytes]; None: there is none.
        """
        shard = self._shards.get(key)
        if shard is None or shard.spare is None:
            return None
        with shard.lock:
            spare = shard.spare
            if spare is None or spare.nbytes != nbytes or dtype not in (None, spare.dtype):
                return None
            shard.spare = None
        return spare.view(torch.uint8)

    def stage(
        self,
        token: Token,
        step: int,
        member: str,
        key: str,
        gradient: torch.Tensor | SparseGradient,
        number: int = 0,
        own: bool = False,
    ) -> None:
        """Add a gradient to the sum of a backward pass of the step.

        Args:
            token: the generation's.
            step: its number.
            member: the sender.
            key: the chunk's.
            gradient: flat, of the chunk's size, or some of its elements.
            number: of the backward pass.
            own: it is in memory of `take_spare`, which is the shard's again; other memory is not kept.

        Raises:
            StepProtocolError: it does not belong here; see `StepProtocol.stage`.
        """
        which = (step, number)
        with self._lock:
            if isinstance(gradient, SparseGradient):
                self.dense(key)
            shard = self.shard(key)
            self._protocol.stage(token, step, member, key, number)
            fence, size, norm = self._fences, self._protocol.size, self._norms_wanted
            self._adding += 1
        whole = False
        try:
            with shard.lock:
                self._check_still(token, fence, key, shard)
                shard.add((fence, *which), which, gradient, own)
                whole = shard.added == size
                if whole and norm:
                    shard.measure(which)
        finally:
            with self._lock:
                if self._fences == fence:
                    self._adding -= 1
                    if whole:
                        self._close_sum(key, shard, which)
                    self._answer_prepares()

    def _check_still(self, token: Token, fence: int, key: str, shard: Shard) -> None:
        """Look again at what was found in `_lock`, in the shard's lock alone.

        Raises:
            StaleError: another generation has begun.
            StepProtocolError: the shard is not here any more.
        """
        if self._fences != fence:
            raise StaleError(f"generation {token} is over")
        if self._shards.get(key) is not shard or shard.chunk is None:
            raise self.failed_shards.error_for(key)

    def _close_sum(self, key: str, shard: Shard, which: Sum) -> None:
        """Send a sum that nothing more comes to, and make the step early if that is wanted (in the lock)."""
        if shard.closed != which and which in shard.sums:
            shard.closed = which
            for address in shard.forward:
                self._send_sum(address, which, key, shard.sums[which])
        self._speculate_if_wanted(key, shard, which[0])

    def check_sum(self, key: str, which: Sum, nbytes: int, dtype: torch.dtype) -> None:
        """Refuse a sum that cannot be taken in; nothing else bounds what another server may send.

        Args:
            key: the shard's.
            which: step and backward pass.
            nbytes: of the sum.
            dtype: of its elements.

        Raises:
            StepProtocolError: the shard is neither here nor on its way, or the step is far ahead.
            ChunkError: the sum does not fit the shard.
        """
        step, number = which
        if step > self._protocol.version + _SUMS_AHEAD or number >= BACKWARD_PASSES_LIMIT:
            raise StepProtocolError(
                f"a sum of step {step}, backward pass {number}, and step {self._protocol.version} is the last"
            )
        if not self.replicator.is_coming(key) and not self.failed_shards.has(key):
            self.check_gradient(key, nbytes, dtype)

    def take_sum(self, token: Token, which: Sum, key: str, total: torch.Tensor) -> None:
        """Keep the sum of all gradients of a shard, from the server that the workers send them to.

        Args:
            token: the generation's.
            which: step and backward pass.
            key: the shard's.
            total: flat; it is copied.

        Raises:
            StaleError: the generation is over.
        """
        kept = total.clone()
        with self._lock:
            self._protocol.check_token(token)
            if key not in self._shards and not self.replicator.is_coming(key):
                return  # it was given up here, which the next generation finds out
            shard, fence = self._shards.setdefault(key, Shard()), self._fences
        with shard.lock:
            if self._fences != fence:
                raise StaleError(f"generation {token} is over")
            shard.sums[which] = kept

    def _send_sum(self, address: str, which: Sum, key: str, total: torch.Tensor) -> None:
        """Send a sum to a server that keeps a copy; PREPARE is answered when it is there (in the lock)."""
        self._unacknowledged += 1
        token = self._protocol.token

        def done(error: Exception | None) -> None:
            with self._lock:
                if self._protocol.token != token:
                    return
                self._unacknowledged -= 1
                shard = self._shards.get(key)
                # A copy that was given up meanwhile, as there is no room for it, misses nothing.
                if error is not None and (shard is None or address in shard.forward):
                    self._lost_backup = f"{address}: {error}"
                self._answer_prepares()

        self._forward(address, which, key, total, done)

    # ---- a step: the two-phase commit

    def prepare(
        self, token: Token, step: int, member: str, count: int, norm: bool, done: Done, number: int = 0
    ) -> None:
        """Note that a member has sent all gradients of a backward pass.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            count: of gradients that it has sent to this server.
            norm: the sums of squares are wanted.
            done: gets the sums of squares over this server's sums, by their optimizer's first group (None
                unless `norm`), when all members have prepared and the copies are where they belong.
            number: of the backward pass.

        Raises:
            StepProtocolError: other gradients are here.
        """
        with self._lock:
            effects = self._protocol.prepare(token, step, member, count, number)
            self._prepares.append((norm, done))
            self._norms_wanted = norm
            # Where workers are in teams, not every member sends a gradient.
            self._unclosed |= Effect.PREPARED in effects
            self._answer_prepares()

    def _answer_prepares(self) -> None:
        """Answer those that have prepared, once all have and all that belongs to it is done (in the lock)."""
        if not self._protocol.complete or not self._prepares or self._adding:
            return
        which = (self._protocol.version + 1, self._protocol.backward_pass)
        if self._unclosed:
            self._unclosed = False
            for key in self._protocol.staged:
                if (shard := self._shards.get(key)) is not None:
                    self._close_sum(key, shard, which)
        error = (
            StepProtocolError(f"a copy could not be made: {self._lost_backup}") if self._lost_backup else None
        )
        norms: dict[int, float] | None = None
        if error is None and any(wanted for wanted, _ in self._prepares):
            if self._measuring or self._measure_rest(which):
                return
            try:
                norms = self._norms(which)
            except StepProtocolError as failure:
                error = failure
        if self._unacknowledged and error is None:
            return
        waiting, self._prepares = self._prepares, []
        for _, done in waiting:
            done(norms, error)

    def _measure_rest(self, which: Sum) -> bool:
        """Have the norms made that are not, of sums that are closed; return whether any are (in the lock).

        Mostly they are made as the sums close. Those of a job's first step are not, nor those of sums to
        which not every member adds.
        """
        if self._measured == which:
            return False
        self._measured = which
        shards = [(key, self._shards.get(key)) for key in self._protocol.staged]
        rest = [(key, shard) for key, shard in shards if shard is not None and which not in shard.norms]
        self._measuring = len(rest)
        for key, shard in rest:
            self._on_steps_thread(partial(self._measure, self._fences, key, shard, which))
        return bool(rest)

    def _measure(self, fence: int, key: str, shard: Shard, which: Sum) -> None:
        try:
            with shard.lock:
                if self._fences == fence:
                    shard.measure(which)
        finally:
            with self._lock:
                if self._fences == fence:
                    self._measuring -= 1
                    if not self._measuring:
                        self._answer_prepares()

    def _norms(self, which: Sum) -> dict[int, float]:
        """Return the sums of squares by optimizer, added in the order of the shards' keys (in the lock).

        Raises:
            StepProtocolError: a shard is not here any more, or its norm could not be made.
        """
        norms: dict[int, float] = {}
        for key in sorted(self._protocol.staged):
            first, found = self.piece(key).first, self._shards[key].norms.get(which)
            if found is None:
                raise StepProtocolError(
                    f"the norm of the sum of {key!r} could not be made: see this server's log"
                )
            norms[first] = norms.get(first, 0.0) + found
        return norms

    def try_step(self, token: Token, step: int, member: str) -> None:
        """Make a step that may be taken back; see `StepProtocol.try_step`.

        Args:
            token: the generation's.
            step: its number.
            member: one that has committed it.

        Raises:
            StepProtocolError: it has not.
        """
        with self._lock:
            if self._protocol.try_step(token, step, member):
                assert self._protocol.step_spec is not None
                self._step_specs[step] = self._protocol.step_spec
                self._bring(self._shards, step, True)

    def commit(self, token: Token, step: int, member: str, step_spec: StepSpec, done: Done) -> None:
        """Note that a member commits the step.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            step_spec: how the step is made.
            done: gets None when the step is decided here.

        Raises:
            StepProtocolError: some member has not prepared it.
        """
        with self._lock:
            effects = self._protocol.commit(token, step, member, step_spec)
            self._commits.append(done)
            if Effect.APPLY in effects:
                self._make_step()
                waiting, self._commits = self._commits, []
                for answer in waiting:
                    answer(None, None)

    def _make_step(self) -> None:
        """Have the decided step `version` made, with the shards in their order (in the lock)."""
        version, step_spec = self._protocol.version, self._protocol.step_spec
        assert step_spec is not None
        self.steps += 1
        self._step_specs[version] = step_spec
        if len(self._step_specs) > MAX_SPECS and not self.replicator.needs_specs:
            # Steps may be decided faster than they are made; shards are brought to them in their order.
            open_from = min((version, *self._todo.steps()))
            while len(self._step_specs) > MAX_SPECS and (oldest := min(self._step_specs)) < open_from:
                del self._step_specs[oldest]
        self._bring(self._shards, version, False)

    def _bring(self, keys: Iterable[str], step: int, trying: bool) -> None:
        """Have shards brought to a step (in the lock)."""
        for key in keys:
            self._todo.put(Job(key, step, trying))
        self._work.notify_all()

    # ---- values after a decided step

    def fetch(self, token: Token, step: int, key: str, done: Done) -> None:
        """Give the values of a chunk once they are those after a step.

        Args:
            token: the generation's.
            step: its number.
            key: the chunk's.
            done: gets the values.

        Raises:
            StepProtocolError: there is no such chunk here, or the step is another.
        """
        with self._lock:
            self._protocol.may_fetch(token, step)
            shard = self._dense_shard(key)
            if shard.version < step:
                shard.waiting.append((step, lambda _, error: done(shard.values, error)))
                return
        done(shard.values, None)

    def fetch_rows(self, token: Token, step: int, wanted: Sequence[tuple[str, Ids]], done: Done) -> None:
        """Give rows of slices once all of these are as they are after a step.

        Args:
            token: the generation's.
            step: its number.
            wanted: (slice's key, ids int64).
            done: gets the rows, float32 [n, dim], one slice after another.

        Raises:
            StepProtocolError: a slice is not here, or the step is another.
        """
        with self._lock:
            self._protocol.may_fetch(token, step)
            slices = [(self.slice_of(key), ids) for key, ids in wanted]
            late = {key for key, _ in wanted if self._shards[key].version < step}
            answer = RowGather(slices, len(late), done)
            for key in late:
                self._shards[key].waiting.append((step, answer))
        if not late:
            answer.give()

    def _dense_shard(self, key: str) -> Shard:
        shard = self.shard(key)
        if not isinstance(shard.chunk, Chunk):
            raise StepProtocolError(f"{key!r} is of a table, which is read by rows")
        return shard

    # ---- values before a step is decided (`speculation`)

    def expect(self, token: Token, step: int, member: str, step_spec: StepSpec) -> None:
        """Note how a member expects the step to be made; where members differ, nobody gets values early.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            step_spec: how it expects the step to be made.

        Raises:
            StepProtocolError: it is no member, or the step is another.
        """
        with self._lock:
            self._protocol.check_vote(token, step, member)
            refused = self._speculator.expect(step, step_spec, self._shards.values())
        for done in refused:
            done(None, not_expected(step))

    def fetch_speculative(self, token: Token, step: int, key: str, done: Done) -> None:
        """Give a chunk's values after a step, made as it is expected to be made, or as it was decided.

        Args:
            token: the generation's.
            step: its number.
            key: the chunk's.
            done: gets the values.

        Raises:
            StepProtocolError: it is not known how the step is expected to be made, or the chunk is not here.
        """
        with self._lock:
            self._protocol.may_fetch(token, step)
            shard = self._dense_shard(key)
            if shard.version < step:
                if self._speculator.spec_of(step) is None:
                    raise not_expected(step)
                shard.speculative.waiting.append((step, done))
                self._speculate_if_wanted(key, shard, step)
                return
            values = shard.values
        done(values, None)

    def _speculate_if_wanted(self, key: str, shard: Shard, step: int) -> None:
        """Have the step made early as soon as its sum is whole and somebody waits (in the lock)."""
        if is_wanted(shard, step):
            self._on_steps_thread(partial(self._speculate, key, step))

    def _speculate(self, key: str, step: int) -> None:
        with self._lock:
            shard, step_spec = self._shards.get(key), self._speculator.spec_of(step)
            # It may have been decided, or be over, since it was wanted.
            if shard is None or step_spec is None or shard.closed != (step, 0):
                return
        with shard.lock:
            if not speculate(shard, key, step, step_spec):
                return
            early = shard.speculative.chunk if shard.speculative.holds(step, step_spec) else None
        with self._lock:
            ready = shard.speculative.take_waiting(step)
        for done in ready:
            done(None if early is None else early.values, None if early is not None else not_expected(step))

    def add_substeps(self, token: Token, step: int, member: str, step_spec: StepSpec) -> None:
        """Note which substeps a member has made so far, whose gradients are here.

        Args:
            token: the generation's.
            step: its number.
            member: its id.
            step_spec: the substeps.

        Raises:
            StepProtocolError: gradients are missing, or another member has made others.
        """
        with self._lock:
            self._protocol.check_substeps(token, step, member, step_spec)
            self._speculator.add_substeps(step, step_spec)

    def fetch_intermediate(self, token: Token, step: int, key: str, count: int, done: Done) -> None:
        """Give a chunk's values after some substeps of a step that is not decided.

        The step before it is decided, and may still have to be made: its values may have been there early.

        Args:
            token: the generation's.
            step: its number.
            key: the chunk's.
            count: of substeps.
            done: gets the values.

        Raises:
            StepProtocolError: no member has told of so many, or the chunk is not here.
        """
        with self._lock:
            self._protocol.may_fetch(token, step)
            shard = self._dense_shard(key)
            step_spec = self._speculator.first_substeps(step, count)
            if shard.version < step - 1 == self._protocol.version:
                again = partial(self._fetch_intermediate_later, token, step, key, count, done)
                shard.waiting.append((step - 1, again))
                return
            fence = self._fences
        with shard.lock:
            self._check_still(token, fence, key, shard)
            values = intermediate_values(shard, step, step_spec)
        done(values, None)

    def _fetch_intermediate_later(
        self, token: Token, step: int, key: str, count: int, done: Done, _: Any, error: Exception | None
    ) -> None:
        """Answer now that the step before is made, or never will be here."""
        try:
            if error is not None:
                raise error
            self.fetch_intermediate(token, step, key, count, done)
        except Exception as failure:  # on the thread that makes the steps, which has no part in it
            done(
                None, failure if isinstance(failure, StepProtocolError) else StepProtocolError(repr(failure))
            )

    def fetch_intermediate_rows(
        self, token: Token, step: int, wanted: Sequence[tuple[str, Ids]], count: int, done: Done
    ) -> None:
        """Give rows of slices after some substeps of a step that is not decided.

        Args:
            token: the generation's.
            step: its number.
            wanted: (slice's key, ids int64).
            count: of substeps.
            done: gets the rows, float32 [n, dim], one slice after another.

        Raises:
            StepProtocolError: no member has told of so many, or a slice is not here.
        """
        with self._lock:
            self._protocol.may_fetch(token, step)
            step_spec, slices = self._speculator.first_substeps(step, count), list[tuple[HasRows, Ids]]()
            for key, ids in wanted:
                self.slice_of(key)
                slices.append((IntermediateRows(key, self._shards[key], step, step_spec), ids))
            before = step - 1 == self._protocol.version
            late = {key for key, _ in wanted if before and self._shards[key].version < step - 1}
            answer = RowGather(slices, len(late), done)
            for key in late:
                self._shards[key].waiting.append((step - 1, answer))
        if not late:
            answer.give()

    # ---- where workers do not step together: shards are updated as pushes come

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep everything as it is for the time of the block: other threads wait, this one may go on."""
        with self._lock:
            yield

    @contextmanager
    def locked(self, token: Token, key: str) -> Iterator[LockedShard]:
        """Lock a shard, so that nobody else changes it meanwhile, or reads it, but for rows of a slice.

        Args:
            token: the generation's.
            key: the shard's.

        Raises:
            StaleError: the generation is over.
            StepProtocolError: the shard is not here.
        """
        with self._lock:
            self._protocol.check_token(token)
            shard, fence = self.shard(key), self._fences
        with shard.lock:
            self._check_still(token, fence, key, shard)
            with self._evictions_counted(shard.chunk):
                yield LockedShard(shard)

    def before_push(self, key: str, chunk: Chunk | Slice) -> None:
        """Copy what a snapshot keeps of a locked shard, which is about to change.

        Args:
            key: the shard's.
            chunk: as it is now.
        """
        self.snapshots.before(key, chunk, self._shards[key].version)

    def check_pushed(self, key: str, nbytes: int, dtype: torch.dtype, selected: bool) -> None:
        """Refuse a gradient that does not fit, also of a slice that is on its way.

        Args:
            key: the shard's.
            nbytes: of the gradient.
            dtype: of its elements.
            selected: it is of some elements only.

        Raises:
            StepProtocolError: the shard is not here.
            ChunkError: the gradient does not fit the chunk.
            SparseGradientError: the elements do not fit the chunk.
        """
        incoming = self.replicator.incoming(key)
        chunk = incoming.piece if incoming else self.dense(key) if selected else self.piece(key)
        if isinstance(chunk, Slice):
            chunk.check_records(nbytes, dtype)
        elif selected:
            chunk.check_sparse(nbytes, dtype)
        else:
            chunk.check_gradient(nbytes, dtype)

    def postpone(self, token: Token, key: str, update: Later) -> bool:
        """Have an update made when a slice has come whole.

        Args:
            token: the generation's.
            key: the slice's.
            update: makes it.

        Returns:
            Whether the slice is on its way; if not, the update is not kept.
        """
        with self._lock:
            return self.replicator.postpone(token, key, update)

    def applied_batches(self, token: Token) -> dict[str, AppliedBatches | None]:
        """Return which batches are in each shard that is here, as copies."""
        with self._lock:
            self._protocol.check_token(token)
            keys = [key for key, shard in self._shards.items() if shard.chunk is not None]
        found = {}
        for key in keys:
            with self.locked(token, key) as shard:
                applied_batches = shard.chunk.applied_batches
                found[key] = None if applied_batches is None else applied_batches.copy()
        return found

    # ---- for those who read shards while training goes on

    def dump(
        self, token: Token, key: str, at: int = 0, most: int | None = None, reading: int = 0
    ) -> tuple[int, DumpPiece, int]:
        """Return a shard as it is now, or a part of it.

        Args:
            token: the generation's.
            key: the shard's.
            at: number of the first byte.
            most: bytes at most; None: all of them, in one.
            reading: which one goes on; 0: one begins.

        Returns:
            The version, the part, and the reading's number if there are more.

        Raises:
            StepProtocolError: the shard is not here, or another byte is next.
        """
        with self._lock:
            self._protocol.check_token(token)
            self.settle()
            shard = self.shard(key)
            with shard.lock:
                assert shard.chunk is not None
                if most is None:
                    return shard.version, part_of(shard.chunk, at, most), 0
                if not reading and at:
                    raise StepProtocolError(f"{key!r} is read in order: byte 0 is next, not {at}")
                if not reading:
                    reading = self.snapshots.chunk_reads.begin(key)
                part = self.snapshots.chunk_reads.take(reading, key, shard.chunk, at, most)
                more = at + part[1].nbytes < part[2]
                return shard.version, part, reading if more else 0

    def take_snapshot(self, token: Token, name: str, step: int, readers: int) -> None:
        """Keep the shards as they are after a step, which may still be made.

        Of members that ask alike, one may come when another one has entered the next generation already.

        Args:
            token: the generation's.
            name: of the snapshot.
            step: its number.
            readers: how many members will read it.

        Raises:
            StaleError: the generation is over, and there is no such snapshot.
            StepProtocolError: a shard is past that step.
        """
        with self._lock:
            if self.snapshots.has(name):
                return
            self._protocol.check_token(token)
            versions = [(key, s.version) for key, s in self._shards.items() if s.chunk is not None]
            self.snapshots.take(name, step, readers, versions)

    def describe_snapshot(self, name: str) -> dict[str, dict[str, Any]]:
        """Return what is said of each shard of the snapshot, by key."""
        snapshot = self.snapshots.find(name)
        return {
            key: self._of_snapshot(key, partial(describe_shard, snapshot, key))
            for key in sorted(snapshot.keys)
        }

    def read_snapshot(self, name: str, key: str, at: int = 0, most: int | None = None) -> DumpPiece:
        """Return a shard of the snapshot, or a part of it, once; see `snapshot.give`.

        Args:
            name: of the snapshot.
            key: the shard's.
            at: number of the first byte.
            most: bytes at most; None: all that follow.

        Raises:
            StepProtocolError: it is not kept, or another byte is next.
        """
        snapshot = self.snapshots.find(name)
        return self._of_snapshot(key, partial(give, snapshot, key, at=at, most=most))

    def _of_snapshot(self, key: str, look: Callable[[Chunk | Slice | None, int], Found | None]) -> Found:
        """Return what `look` finds once the shard has come so far."""
        end = time.monotonic() + _STEP_SECONDS
        while not self._closed and time.monotonic() < end:
            with self._lock:
                shard, done = self._shards.get(key), self._done
                found = look(None, -1) if shard is None else None
            if shard is not None:
                with shard.lock:
                    found = look(shard.chunk, shard.version)
            if found is not None:
                return found
            with self._lock:
                if self._done == done:
                    self._changed.wait(1.0)
        raise StepProtocolError(f"chunk {key!r} did not come to its step within {_STEP_SECONDS:g} s")

    # ---- the threads that make the steps

    def settle(self) -> None:
        """Wait until the decided steps are made."""
        with self._lock:
            while (self._todo or self._busy) and not self._closed:
                self._changed.wait(1.0)

    def _on_steps_thread(self, work: Callable[[], None]) -> None:
        """Have something done when no step is to be made (in the lock)."""
        self._asides.append(work)
        self._work.notify()

    def has_copy_to_send(self) -> bool:
        """Return whether a copy can be begun: of what stays, when nothing is left to be made."""
        with self._lock:
            # A new server knows nothing of a step that is only tried.
            settled = self._protocol.ready and not self._protocol.tried and not self._todo
            return settled and self.replicator.has_next()

    def _next_work(self) -> Job | Callable[[], None] | None:
        """Take what a thread is to do next; None: nothing, for now (in the lock)."""
        if (job := self._todo.take()) is not None:
            return job
        if self._asides:
            return self._asides.popleft()
        # Also while no copy may begin: a server that hangs counts as no copy, whatever the step's state.
        self.replicator.end_overdue()
        if self.has_copy_to_send() and (copy := self.replicator.take_next()) is not None:
            return partial(self._copy, *copy)
        return None

    def _work_for_ever(self) -> None:
        while True:
            work: Job | Callable[[], None] | None = None
            with self._lock:
                while not self._closed and (work := self._next_work()) is None:
                    self._work.wait(self.replicator.patience)
                if self._closed or work is None:
                    return
                self._busy += 1
            try:
                if isinstance(work, Job):
                    self.make_steps(work.key, work.step, work.trying)
                else:
                    work()
            except Exception as error:
                log.exception("a chunk is given up: %s", work)
                if isinstance(work, Job):
                    self.give_up(work.key, error)
            finally:
                with self._lock:
                    self._busy -= 1
                    self._done += 1
                    self._changed.notify_all()
                    if isinstance(work, Job) and self._todo.done(work):
                        self._work.notify()
                    if not self._todo and self.replicator.has_next():
                        self._work.notify()

    def make_steps(self, key: str, version: int, trying: bool) -> None:
        """Apply the sums of a shard up to a step, and answer the requests that wait for that.

        Args:
            key: the shard's.
            version: number of the last step.
            trying: keep what the shard was before the last of these steps.
        """
        with self._lock:
            shard = self._shards.get(key)
            behind = shard is not None and shard.version < version - 1
            step_specs = dict(self._step_specs) if behind else self._step_specs
        if shard is None or shard.chunk is None:
            return
        with shard.lock:
            if not trying:
                shard.before = None
            while shard.version < version:
                step = shard.version + 1
                totals, step_spec = shard.totals(step), step_specs.get(step)
                if step_spec is None or not totals.keys() >= {
                    part.backward_pass for part in step_spec.substeps
                }:
                    break  # a copy in the making that missed a step: it is not in the inventory
                self.snapshots.before(key, shard.chunk, shard.version)
                if trying and step == version:
                    shard.before = shard.chunk.dump()
                with self._evictions_counted(shard.chunk):
                    apply(shard, totals, step, step_spec)
                shard.version = step
                shard.drop_sums(lambda other: other <= shard.version)
                shard.spare = totals[0] if isinstance(shard.chunk, Chunk) and 0 in totals else None
        with self._lock:
            self.replicator.caught_up(key)
            ready = shard.take_waiting()
        for done in ready:
            done(None, None)

    def _copy(self, key: str, address: str) -> None:
        """Begin to send a shard to another server, which gets its sums from now on."""
        with self._lock:
            shard = self._shards.get(key)
            if shard is None or shard.chunk is None:
                return
            if self._todo or self.replicator.is_sending:
                self.replicator.want(key, address)
                return
            with shard.lock:
                counts = self.replicator.begin(key, shard, address)
            if counts:
                for which, total in shard.closed_sums(self._protocol.version + 1).items():
                    # Nobody waits for it any more who has prepared: the step may use the sum up meanwhile.
                    self._send_sum(address, which, key, total.clone())

    @contextmanager
    def _evictions_counted(self, piece: Chunk | Slice | None) -> Iterator[None]:
        """Count the rows that a slice lets go meanwhile, for metrics."""
        before = rows_evicted(piece)
        try:
            yield
        finally:
            more = rows_evicted(piece) - before
            if more:
                with self._counting:
                    self.evicted += more


def rows_evicted(piece: Chunk | Slice | None) -> int:
    """Return how many rows a slice has let go in its life, on whatever server."""
    return piece.table.evicted if isinstance(piece, Slice) else 0
