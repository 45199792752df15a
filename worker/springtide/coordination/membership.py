"""Keep what this process is as a member of the job: what the coordinator has said, and what it has promised.

Two threads meet here. The thread of the coordinator's stream writes down what arrives and drops the open step
when its generation is over; it never waits. The script's thread, when it stands in the library, parks, waits
and leaves. All fields are guarded by one condition.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from springtide.checkpoint.shares import Share
from springtide.comm.descriptors import room_for_group, why_too_few
from springtide.comm.store_entries import Entries, Publish
from springtide.coordination.newcomer import Move, Newcomer, next_move
from springtide.coordination.park_reply import Leave, MoveOn, ParkReply, Save, Start
from springtide.errors import SpringtideError
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import (
    generation_from_proto,
    generation_to_proto,
    incarnation_from_proto,
    incarnation_to_proto,
    required_generation,
    required_state,
    speaks_from_proto,
    speaks_to_proto,
    state_from_proto,
    state_to_proto,
)
from springtide_protocol.names import WITHOUT_JOB, GenerationName, Incarnation, StateName, process_label
from springtide_protocol.store_entries import unpack
from springtide_protocol.versions import FOLLOW, OWN

log = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_LOG_STANDBY_SECONDS = 600.0
_EARLY_ENTRIES = 1024

Send = Callable[[pb.WorkerMessage], None]
Entered = Callable[[], list[tuple[str, bytes]]]
"""Gives keys and values of store entries; what nobody asks for is never unpacked."""


class Membership:
    """Hold the state of this process in its job.

    Its methods alone write the fields, and hold the lock. Others may read a fact without it: each is one
    reference, replaced as a whole.
    """

    def __init__(
        self,
        settings: Settings,
        send: Send,
        on_over: Callable[[str], None],
        on_boundary: Callable[[], None],
        make_store: Callable[[Publish, Sequence[str], float], Entries] = Entries,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin outside of all generations.

        Args:
            settings: of the process.
            send: queues a message on the stream; what is queued while there is no stream may be lost, since
                Hello repeats what matters.
            on_over: is told why the current generation is over, from the stream's thread.
            on_boundary: is to stop the process after the step; called from the stream's thread.
            make_store: makes the store of a generation, through which its members meet.
            on_wait: is called again and again while the script's thread waits.
        """
        self._make_store = make_store
        self._settings = settings
        self._send = send
        self._on_over = on_over
        self._on_boundary = on_boundary
        self._changed = threading.Condition()
        self._me = pb.Member(
            id=settings.process_id,
            pod_uid=settings.pod_uid,
            pod_name=settings.pod_name,
            local_rank=settings.local_rank,
            address=settings.pod_ip,
            slot=settings.slot,
        )
        # The generation, as Start named it.
        self._generation: GenerationName | None = None
        self._members: list[pb.Member] = []
        self._servers: list[pb.Server] = []
        self._consistency = pb.Consistency()
        self._store: Entries | None = None  # while its group forms
        self._over = ""  # why it has ended
        # What this process is in it, as Hello says.
        self._standing = pb.STARTING
        self._state: StateName | None = None
        self._layout_hash = ""
        self._together = 1  # processes of its pod that train as one with it, itself included
        self._leaving = ""
        self._ended_stages = 0
        self._at_epoch_end = False
        self._bound_to_steps = ""
        self._storage = False  # whether it knows where to write checkpoints
        self._checkpoints = False  # the same, while its state is one to save
        self._keeps_applied_batches = False  # whether its state is of workers that do not step together
        # What its servers hold, for Formed.
        self._needed_servers: list[str] = []
        self._unsettled = False
        self._copies = 0
        self._largest_group = 0  # processes that it had room for before its first generation
        self._wanted = 0  # processes: the most that a coordinator said the job wants
        # Messages that a new stream repeats.
        self._promise: pb.Parked | None = None
        self._ended: pb.Ended | None = None
        self._formed: pb.Formed | None = None
        self._checkpoint: pb.Checkpoint | None = None
        self._memory: pb.Memory | None = None
        # Replies to a parked process that the script's thread has not taken yet.
        self._start: Start | None = None
        self._leave: Leave | None = None
        self._save: Save | None = None
        # Of a store whose Start has not come.
        self._entries_ahead: list[tuple[pb.GenerationName, Entered]] = []
        # The coordinator.
        self._connected = False
        self._newest = Incarnation(0)
        self._known: StateName | None = None
        self._training = 0  # processes in a running generation, when this one came
        self._stands_by = False  # they were as many as the job wants
        self._running_loop: int | None = None  # of the job, as newcomers are told; None: not told
        self._can_follow = False  # the coordinator has members send to those that follow
        self._feeding: int | None = None  # how many it has told to; None: no answer
        self._fatal = ""  # why there will be no stream any more
        self._on_epochs_end: Callable[[], None] = lambda: None
        self._on_wait = on_wait

    # ---- facts, which any thread may read without the lock

    @property
    def me(self) -> pb.Member:
        """Return this process as the coordinator names it."""
        return self._me

    @property
    def standing(self) -> int:
        """Return where the process stands: a `pb.Standing`."""
        return self._standing

    @property
    def generation(self) -> GenerationName | None:
        """Return the present generation; None before the first one."""
        return self._generation

    @property
    def members(self) -> Sequence[pb.Member]:
        """Return the members of the generation, in rank order."""
        return self._members

    @property
    def servers(self) -> Sequence[pb.Server]:
        """Return the parameter servers of the generation."""
        return self._servers

    @property
    def consistency(self) -> pb.Consistency:
        """Return the consistency that the generation was started with."""
        return self._consistency

    @property
    def state(self) -> StateName | None:
        """Return the name of the state that this process holds; None for none."""
        return self._state

    @property
    def layout_hash(self) -> str:
        """Return the hash of what the script trains; "" while that is not known."""
        return self._layout_hash

    @property
    def leaving(self) -> str:
        """Return why this process has been asked to go; "" while it has not."""
        return self._leaving

    @property
    def ended_stages(self) -> int:
        """Return how many loops are known to have ended."""
        return self._ended_stages

    @property
    def connected(self) -> bool:
        """Return whether there is a stream to the coordinator."""
        return self._connected

    @property
    def checkpoints(self) -> bool:
        """Return whether the state is one to save, and there is a place for it."""
        return self._checkpoints

    @property
    def keeps_applied_batches(self) -> bool:
        """Return whether workers do not step together."""
        return self._keeps_applied_batches

    @property
    def storage(self) -> bool:
        """Return whether there is a place for checkpoints."""
        return self._storage

    @property
    def bound_to_steps(self) -> str:
        """Return why the script cannot train without common steps; "" if it can."""
        return self._bound_to_steps

    @property
    def at_epoch_end(self) -> bool:
        """Return whether all members have stopped at an epoch's end."""
        return self._at_epoch_end

    @property
    def wanted(self) -> int:
        """Return how many processes the job wants, as far as a coordinator has said; 0: it has not."""
        return self._wanted

    @property
    def known(self) -> StateName | None:
        """Return the newest state that the coordinator knows of."""
        return self._known

    # ---- the stream's thread

    def hello(self) -> pb.Hello:
        """Return the first message of every stream: what this process is at this moment."""
        with self._changed:
            self._measure_room()
            message = pb.Hello(
                protocol_version=OWN.oldest,
                speaks=speaks_to_proto(OWN),
                member=self._me,
                newest_incarnation=incarnation_to_proto(self._newest),
                members=self._members,
                servers=self._servers,
                consistency=self._consistency,
                standing=self._standing,
                layout_hash=self._layout_hash,
                together=self._together if self._together > 1 else 0,
                leaving=bool(self._leaving),
                ended_stage=self._ended_stages,
                checkpoints=self._checkpoints,
                keeps_applied_batches=self._keeps_applied_batches,
                storage=self._storage,
                bound_to_steps=self._bound_to_steps,
                at_epoch_end=self._at_epoch_end,
                largest_group=self._largest_group,
            )
            if self._generation is not None:
                message.generation.CopyFrom(generation_to_proto(self._generation))
            if self._state is not None:
                message.state.CopyFrom(state_to_proto(self._state))
            return message

    def receive(self, message: pb.CoordinatorMessage) -> None:
        """Take a message of the coordinator's; what does not concern the present generation is ignored."""
        match message.WhichOneof("message"):
            case "welcome":
                self._welcomed(message.welcome)
            case "prepare":
                self._prepare(message.prepare)
            case "start":
                self._started(message.start)
            case "store_entry":  # of a coordinator of the last release
                entry = message.store_entry
                self._take_entries(entry.generation, lambda: [(entry.key, entry.value)])
            case "store_entries":
                several = message.store_entries
                self._take_entries(several.generation, lambda: unpack(several.packed))
            case "boundary":
                with self._changed:
                    asked = self._standing == pb.ACTIVE and self._is_current(message.boundary.generation)
                    on_epochs_end = self._on_epochs_end
                if asked and message.boundary.at_epochs_end:
                    on_epochs_end()
                elif asked:
                    self._on_boundary()
            case "leave":
                with self._changed:
                    if self._standing == pb.PARKED:
                        self._leave = Leave(message.leave.reason, message.leave.finished)
                        self._changed.notify_all()
            case "save":
                self._save_asked(message.save)
            case "end_ok":
                self._end_ok(message.end_ok)
            case "refused":
                self._refused(message.refused)
            case "feeding":
                with self._changed:
                    self._feeding = message.feeding.count
                    self._changed.notify_all()
            case "running_loop":
                with self._changed:
                    self._running_loop = message.running_loop.stage
                    self._changed.notify_all()
            case "known":
                with self._changed:
                    self._known = state_from_proto(message.known.state)

    def disconnected(self) -> None:
        """Note that the stream is broken."""
        with self._changed:
            self._connected = False
            self._changed.notify_all()

    def _welcomed(self, message: pb.Welcome) -> None:
        with self._changed:
            incarnation = incarnation_from_proto(message.incarnation)
            if incarnation > self._newest:
                self._newest = incarnation
            self._known = state_from_proto(message.known)
            self._connected, self._training = True, message.training
            self._stands_by = 0 < message.wanted <= message.training
            if message.HasField("running_loop"):  # a coordinator that is new may have to learn it first
                self._running_loop = message.running_loop.stage
            told = speaks_from_proto(message.speaks, message.protocol_version)
            self._can_follow = message.training > 0 and FOLLOW in told.capabilities
            if message.wanted > self._wanted:
                self._wanted = message.wanted
                if why := why_too_few(self._wanted):
                    log.warning("%s", why)
            # Hello told where this process stands, but not why, nor what is on which servers.
            if self._formed is not None and self._servers:
                self._send(pb.WorkerMessage(formed=self._formed))
            if self._standing == pb.PARKED and self._promise is not None:
                self._send(pb.WorkerMessage(parked=self._promise))
            if self._standing == pb.ENDED and self._ended is not None:
                self._send(pb.WorkerMessage(ended=self._ended))
            if self._leaving:
                self._send(pb.WorkerMessage(leaving=pb.Leaving(reason=self._leaving)))
            if self._checkpoint is not None:
                self._send(pb.WorkerMessage(checkpoint=self._checkpoint))
            if self._memory is not None:
                self._send(pb.WorkerMessage(memory=self._memory))
            self._changed.notify_all()

    def _measure_room(self) -> None:
        """Count how large a group there is room for, before there is any that takes some of it."""
        if self._generation is None:
            self._largest_group = room_for_group()

    def _save_asked(self, message: pb.Save) -> None:
        with self._changed:
            state = required_state(message.state, "Save.state")
            if self._standing != pb.PARKED or state != self._state or self._me.id not in message.writers:
                log.warning("ignoring the wish for a checkpoint of %s: this process does not hold it", state)
                return
            known = {member.id: _label(member) for member in self._members}
            writers = tuple(known.get(writer, writer) for writer in message.writers)
            index = list(message.writers).index(self._me.id)
            self._save = Save(state, Share(index, writers, f"-leaving-{message.attempt}"))
            self._changed.notify_all()

    def _prepare(self, message: pb.Prepare) -> None:
        with self._changed:
            if not self._is_current(message.generation) or self._over or self._standing == pb.PARKED:
                return
            self._over = message.reason or "the coordinator ended the generation"
            reason, store = self._over, self._store
            self._changed.notify_all()
        if store is not None:
            store.cancel(reason)
        self._on_over(reason)

    def _started(self, message: pb.Start) -> None:
        with self._changed:
            generation = required_generation(message.generation, "Start.generation")
            newer = self._generation is None or generation > self._generation
            if self._standing != pb.PARKED or not newer or generation.incarnation < self._newest:
                log.warning(
                    "ignoring the start of generation %s: this process does not wait for it", generation
                )
                return
            if all(member.id != self._me.id for member in message.members):
                log.warning("ignoring the start of generation %s: this process is not in it", generation)
                return
            self._generation = generation
            self._members = list(message.members)
            self._servers = [*message.servers, *message.leaving_servers]
            self._consistency = message.consistency
            self._at_epoch_end = self._at_epoch_end and message.consistency.mode == "Synchronous"
            self._needed_servers, self._unsettled, self._formed = [], False, None
            # From here on the process may train in the new generation: the promise is kept and over.
            self._standing = pb.ACTIVE
            self._promise = None
            self._over = ""
            owners = [member.pod_name or member.id for member in self._members]
            name = generation_to_proto(generation)
            self._store = self._make_store(
                lambda key, value: self._send(
                    pb.WorkerMessage(store_set=pb.StoreEntry(generation=name, key=key, value=value))
                ),
                owners,
                self._settings.formation_seconds,
            )
            for name_ahead, entries in self._entries_ahead:
                if self._is_current(name_ahead):
                    self._store.deliver(entries())
            self._entries_ahead = []
            self._start = Start(message, generation, self._store)
            self._changed.notify_all()

    def _take_entries(self, generation: pb.GenerationName, entries: Entered) -> None:
        with self._changed:
            store = self._store if self._is_current(generation) else None
            # Of a generation that is formed, or over, entries may still come; nobody asks for them.
            if self._is_to_come(generation) and len(self._entries_ahead) < _EARLY_ENTRIES:
                self._entries_ahead.append((generation, entries))
        if store is not None:
            store.deliver(entries())

    def _end_ok(self, message: pb.EndOk) -> None:
        with self._changed:
            if self._is_current(message.generation) and not self._over:
                self._end_stages(message.stage + 1)

    def _refused(self, message: pb.Refused) -> None:
        if message.retry:
            log.warning("the coordinator refused this process for now: %s", message.reason)
            return
        self.session_over(f"the coordinator refused this worker: {message.reason or 'no reason given'}")

    def session_over(self, reason: str) -> None:
        """Give up membership, because no stream will come any more. Any thread."""
        with self._changed:
            if self._fatal:
                return
            self._fatal = reason
            store = self._store
            self._changed.notify_all()
        if store is not None:
            store.cancel(reason)
        self._on_over(reason)

    def _is_to_come(self, name: pb.GenerationName) -> bool:
        generation = generation_from_proto(name)
        return generation is not None and (self._generation is None or generation > self._generation)

    def _is_current(self, name: pb.GenerationName) -> bool:
        return self._generation is not None and generation_from_proto(name) == self._generation

    def _end_stages(self, count: int) -> None:
        if count > self._ended_stages:
            self._ended_stages = count
            self._changed.notify_all()

    # ---- the script's thread

    @property
    def over(self) -> str:
        """Return why the generation is over; "" while it goes on.

        Raise SpringtideError when the coordinator refused the process.
        """
        with self._changed:
            self._check_fatal()
            return self._over

    def check(self) -> None:
        """Raise SpringtideError when the coordinator has refused this process for good."""
        with self._changed:
            self._check_fatal()

    def await_welcome(self, seconds: float) -> int:
        """Wait for the welcome; return how many processes trained then, 0 when it does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._connected or bool(self._fatal), seconds)
            return self._training if self._connected else 0

    def newcomers_move(self, stage: int) -> Move | None:
        """Return what this process does next while it has not been a member; None once it has.

        Args:
            stage: ordinal of the training loop that its script is at.
        """
        with self._changed:
            return self._newcomers_move(stage)

    def _newcomers_move(self, stage: int) -> Move | None:
        started = self._start is not None
        answered = started or self._leave is not None
        if self._state is not None or (self._generation is not None and not started):
            return None
        return next_move(Newcomer(stage, self._running_loop, self._promise is not None, answered))

    @property
    def stands_by(self) -> bool:
        """Return whether as many processes trained as the job wants, when the coordinator said welcome."""
        with self._changed:
            return self._stands_by

    @property
    def can_follow(self) -> bool:
        """Return whether processes trained when the coordinator said welcome, and can send their state."""
        with self._changed:
            return self._can_follow

    def follow(self, port: int, secret: bytes, seconds: float) -> int:
        """Ask for the state while others train, before this process parks.

        Args:
            port: on which it listens, at its address.
            secret: by which it knows the members that send.
            seconds: to wait for the answer.

        Returns:
            How many members were told to send; 0 without an answer.
        """
        with self._changed:
            self._feeding = None
            self._send(pb.WorkerMessage(follow=pb.Follow(port=port, secret=secret)))
            self._changed.wait_for(lambda: self._feeding is not None or bool(self._fatal), seconds)
            return self._feeding or 0

    def hold(self, state: StateName) -> None:
        """Note that this process holds the whole state of that name."""
        with self._changed:
            self._state = state

    def forget(self) -> None:
        """Note that this process holds no state: it is to be sent one."""
        with self._changed:
            self._state = None

    def use_servers(
        self, staying: Collection[str], servers: Collection[str], settled: bool, copies: int
    ) -> None:
        """Note on which servers the generation's chunks are. Call it before `formed`.

        Args:
            staying: servers that the coordinator wants to keep.
            servers: those that hold the chunks.
            settled: nothing is being copied.
            copies: servers that hold each chunk, at least.
        """
        with self._changed:
            self._copies = copies
            self._needed_servers = [server for server in servers if server not in staying]
            self._unsettled = not settled
            self._servers = [s for s in self._servers if s.id in {*staying, *servers}]

    def train(self) -> None:
        """Note that the process is in a training loop of its generation again."""
        with self._changed:
            if self._standing == pb.AFTER:
                self._standing = pb.ACTIVE

    def stages_ended(self, count: int) -> None:
        """Note that loops 0..count-1 have ended: a peer or the received state is past them."""
        with self._changed:
            self._end_stages(count)

    def park(
        self,
        reason: int,
        detail: str = "",
        addresses: Sequence[str] = (),
        cannot_go_back: bool = False,
        reached: Sequence[str] = (),
        hands_over: bool = False,
    ) -> None:
        """Promise to commit nothing before the next Start.

        Call it only with the script's thread in the library.

        Args:
            reason: a `pb.ParkReason`.
            detail: the reason in words.
            addresses: of peers and servers that may have failed.
            cannot_go_back: there is no older state that this process could take in the place of its own.
            reached: ids of the servers that it reaches.
            hands_over: others may lack a part of what it holds, which it hands over before it leaves.
        """
        with self._changed:
            self._measure_room()
            suspects = [m.id for m in self._members if m.address in addresses and m.id != self._me.id]
            suspects += [s.id for s in self._servers if s.address.rpartition(":")[0].strip("[]") in addresses]
            promise = pb.Parked(
                reason=reason,  # type: ignore[arg-type]
                layout_hash=self._layout_hash,
                together=self._together if self._together > 1 else 0,
                detail=detail[:1000],
                suspects=suspects,
                cannot_go_back=cannot_go_back,
                reached=reached,
                hands_over=hands_over,
                at_epoch_end=self._at_epoch_end,
                largest_group=self._largest_group,
            )
            if self._generation is not None:
                promise.generation.CopyFrom(generation_to_proto(self._generation))
            if self._state is not None:
                promise.state.CopyFrom(state_to_proto(self._state))
            self._standing = pb.PARKED
            self._promise, self._start, self._leave, self._store = promise, None, None, None
            self._save = None
            self._send(pb.WorkerMessage(parked=promise))

    def await_start(
        self, can_save: Callable[[], bool] = lambda: False, newcomer_at: int | None = None
    ) -> ParkReply:
        """Wait for the coordinator's reply: start a generation, leave, or save the state first.

        Args:
            can_save: a wish to save waits until it holds.
            newcomer_at: ordinal of the loop in which a process waits that has not been a member, and goes on
                when the job is in a later one; None: this process waits for a reply in any case.

        Raises:
            SpringtideError: the process was refused.
        """

        def answer() -> ParkReply | None:
            # A Start that was accepted ends the promise, so it comes first.
            if found := self._start or self._leave or (self._save if self._save and can_save() else None):
                return found
            if newcomer_at is not None and self._newcomers_move(newcomer_at) is Move.PASS:
                return MoveOn(self._running_loop or 0)
            return None

        with self._changed:
            self._wait_for(lambda: answer() is not None, "the next generation")
            found = answer()
            assert found is not None
            if not isinstance(found, MoveOn):
                self._start = self._save = None
            return found

    def formed(
        self,
        group_seconds: float,
        transfer_seconds: float,
        transfer_bytes: int,
        restored: pb.Restored | None = None,
    ) -> None:
        """Tell the coordinator that the generation is formed and this process holds its state.

        Args:
            group_seconds: the group's formation took so long.
            transfer_seconds: the state's transfer took so long.
            transfer_bytes: that this process sent or received.
            restored: the checkpoint that the generation goes on from, if this process has read one.
        """
        with self._changed:
            assert self._generation is not None
            self._store, self._at_epoch_end = None, False
            if self._consistency.mode:
                # Its state is of this generation now.
                self._keeps_applied_batches = self._consistency.mode != "Synchronous"
                self._checkpoints = self._storage and not self._keeps_applied_batches
            self._formed = pb.Formed(
                generation=generation_to_proto(self._generation),
                needed_servers=self._needed_servers,
                servers_unsettled=self._unsettled,
                server_copies=self._copies,
            )
            first = pb.Formed(
                group_seconds=group_seconds,
                transfer_seconds=transfer_seconds,
                transfer_bytes=transfer_bytes,
                restored=restored,
            )
            first.MergeFrom(self._formed)
            self._send(pb.WorkerMessage(formed=first))

    def use_storage(self, able: bool, keeps_applied_batches: bool) -> None:
        """Note what is known of checkpoints before the first generation.

        Args:
            able: there is a place for checkpoints.
            keeps_applied_batches: workers do not step together.
        """
        with self._changed:
            self._storage, self._keeps_applied_batches, self._checkpoints = (
                able,
                keeps_applied_batches,
                able and not keeps_applied_batches,
            )

    def set_layout(self, layout_hash: str, together: int = 1) -> None:
        """Note what the script trains.

        Args:
            layout_hash: which all members must have in common.
            together: processes of this pod that train it as one, and come and go together.
        """
        with self._changed:
            self._layout_hash, self._together = layout_hash, together

    def mark_epoch_end(self) -> None:
        """Note that all members have stopped at an epoch's end and hold the same state."""
        with self._changed:
            self._at_epoch_end = True

    def call_at_epochs_end(self, listener: Callable[[], None]) -> None:
        """Have the stream's thread call this when the members are asked to stop at the epoch's end."""
        with self._changed:
            self._on_epochs_end = listener

    def bind_to_steps(self, reason: str) -> None:
        """Note why the script cannot train without common steps, as far as is known; "" if it can."""
        with self._changed:
            self._bound_to_steps = reason
            if reason:
                self._send(pb.WorkerMessage(bound_to_steps=pb.BoundToSteps(reason=reason[:1000])))

    def await_end(self, stage: int, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait at the end of a loop until all members stand there.

        Args:
            stage: number of the loop, from 0.
            unless: asked twice a second; the wait ends when it holds.

        Returns:
            False when the generation is over instead, or `unless` holds.
        """
        with self._changed:
            known = self._ended_stages > stage
            if self._over and not known:
                return False
            if self._generation is not None and self._state is not None:
                self._ended = pb.Ended(
                    generation=generation_to_proto(self._generation),
                    state=state_to_proto(self._state),
                    stage=stage,
                )
                # Also when the end is known already: the coordinator may not know where this one stands.
                self._send(pb.WorkerMessage(ended=self._ended))
            if known:
                self._standing = pb.AFTER
                return True
            self._standing = pb.ENDED
            self._wait_for(
                lambda: self._ended_stages > stage or bool(self._over) or unless(),
                "the other members at the end of the loop",
            )
            if self._ended_stages > stage:
                self._standing = pb.AFTER
                return True
            self._standing = pb.ACTIVE
            return False

    def leave(self, reason: str) -> None:
        """Note why this process has been asked to go, and say so as soon as there is a stream. Any thread."""
        with self._changed:
            self._leaving = self._leaving or reason
            self._send(pb.WorkerMessage(leaving=pb.Leaving(reason=self._leaving)))

    def report_checkpoint(self, message: pb.Checkpoint) -> None:
        """Report to the coordinator, and to the next one, what became of the last checkpoint. Any thread."""
        with self._changed:
            self._checkpoint = message
            self._send(pb.WorkerMessage(checkpoint=message))

    def report_memory(self, message: pb.Memory) -> None:
        """Report to the coordinator, and to the next one, what memory the model takes. Any thread."""
        with self._changed:
            self._memory = message
            self._send(pb.WorkerMessage(memory=message))

    def labels(self) -> list[str]:
        """Return the names of all members of the generation, in rank order. Any thread."""
        with self._changed:
            return [_label(member) for member in self._members]

    def local_ranks(self) -> dict[str, int]:
        """Return the number of each member in its pod, by its name. Any thread."""
        with self._changed:
            return {_label(member): member.local_rank for member in self._members}

    def others(self) -> list[str]:
        """Return the names of the other members of the generation."""
        with self._changed:
            return [member.pod_name or member.id for member in self._members if member.id != self._me.id]

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        began = said = time.monotonic()
        pause = _LOG_EVERY_SECONDS
        while not condition():
            self._check_fatal()
            self._on_wait()
            # Short waits, so that signals are handled.
            self._changed.wait(0.5)
            now = time.monotonic()
            if now - said >= pause:
                said = now
                if self._stands_by and self._generation is None and self._connected:
                    pause = min(2 * pause, _LOG_STANDBY_SECONDS)
                    log.info(
                        "standing by for %.0f s: as many processes train as are wanted, and this one takes"
                        " the place of the next that is lost or leaves",
                        now - began,
                    )
                    continue
                through = (
                    ""
                    if self._connected
                    else f"; the coordinator at {self._settings.coordinator} cannot be reached"
                )
                names = (
                    ", ".join(m.pod_name or m.id for m in self._members if m.id != self._me.id) or "none yet"
                )
                log.warning("waiting for %s for %.0f s (members: %s)%s", what, now - began, names, through)

    def _check_fatal(self) -> None:
        if self._fatal:
            raise SpringtideError(self._fatal)


def generation_of(membership: Membership | None) -> GenerationName:
    """Return the name of the present generation, or what stands for it before the first one and alone."""
    if membership is None or membership.generation is None:
        return WITHOUT_JOB
    return membership.generation


def _label(member: pb.Member) -> str:
    return process_label(member.pod_name, member.id, member.local_rank)
