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
from springtide.coordination.park_reply import Leave, ParkReply, Save, Start
from springtide.environment import Settings
from springtide.errors import SpringtideError
from springtide.exchange.entries import Entries, Publish
from springtide_protocol import PROTOCOL_VERSION
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import (
    generation_from_proto,
    generation_to_proto,
    incarnation_from_proto,
    incarnation_to_proto,
    required_generation,
    required_state,
    state_from_proto,
    state_to_proto,
)
from springtide_protocol.names import WITHOUT_JOB, GenerationName, Incarnation, StateName, process_label

log = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 10.0
_OLD_ENTRIES = 1024

Send = Callable[[pb.WorkerMessage], None]


class Membership:
    """Hold the state of this process in its job.

    Fields are written by the methods of this class, which hold the lock. Others may read one field without
    it: each is one reference, replaced as a whole.
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
        self.me = pb.Member(
            id=settings.process_id,
            pod_uid=settings.pod_uid,
            pod_name=settings.pod_name,
            local_rank=settings.local_rank,
            address=settings.pod_ip,
            slot=settings.slot,
        )
        self.standing = pb.STARTING
        self.generation: GenerationName | None = None
        self.members: list[pb.Member] = []
        self.servers: list[pb.Server] = []
        self.consistency = pb.Consistency()
        self._needed_servers: list[str] = []
        self._unsettled = False
        self._copies = 0
        self.state: StateName | None = None
        self.layout_hash = ""
        self.leaving = ""
        self.ended_stages = 0
        self.connected = False
        self.checkpoints = self.books = False
        self.storage = False
        """Whether it knows where to write checkpoints; `checkpoints` only while its state is one to save."""
        self.bound_to_steps = ""
        self.cut = False
        """Whether all have stopped at an epoch's end, as in Hello."""
        self._on_epochs_end: Callable[[], None] = lambda: None
        self._training = 0  # processes in a running generation, when this one came
        self.known: StateName | None = None
        self._on_wait = on_wait
        self._newest = Incarnation(0)
        self._over = ""
        self._fatal = ""
        self._promise: pb.Parked | None = None
        self._ended: pb.Ended | None = None
        self._formed: pb.Formed | None = None
        self._start: Start | None = None
        self._leave: Leave | None = None
        self._store: Entries | None = None
        self._save: Save | None = None
        self._checkpoint: pb.Checkpoint | None = None
        self._early: list[pb.StoreEntry] = []

    # ---- the stream's thread

    def hello(self) -> pb.Hello:
        """Return the first message of every stream: what this process is at this moment."""
        with self._changed:
            message = pb.Hello(
                protocol_version=PROTOCOL_VERSION,
                member=self.me,
                newest_incarnation=incarnation_to_proto(self._newest),
                members=self.members,
                servers=self.servers,
                consistency=self.consistency,
                standing=self.standing,
                layout_hash=self.layout_hash,
                leaving=bool(self.leaving),
                ended_stage=self.ended_stages,
                checkpoints=self.checkpoints,
                books=self.books,
                storage=self.storage,
                bound_to_steps=self.bound_to_steps,
                cut=self.cut,
            )
            if self.generation is not None:
                message.generation.CopyFrom(generation_to_proto(self.generation))
            if self.state is not None:
                message.state.CopyFrom(state_to_proto(self.state))
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
            case "store_entry":
                self._store_entry(message.store_entry)
            case "boundary":
                with self._changed:
                    asked = self.standing == pb.ACTIVE and self._is_current(message.boundary.generation)
                    on_epochs_end = self._on_epochs_end
                if asked and message.boundary.at_epochs_end:
                    on_epochs_end()
                elif asked:
                    self._on_boundary()
            case "leave":
                with self._changed:
                    if self.standing == pb.PARKED:
                        self._leave = Leave(message.leave.reason, message.leave.finished)
                        self._changed.notify_all()
            case "save":
                self._save_asked(message.save)
            case "end_ok":
                self._end_ok(message.end_ok)
            case "refused":
                self._refused(message.refused)
            case "known":
                with self._changed:
                    self.known = state_from_proto(message.known.state)

    def disconnected(self) -> None:
        """Note that the stream is broken."""
        with self._changed:
            self.connected = False
            self._changed.notify_all()

    def _welcomed(self, message: pb.Welcome) -> None:
        with self._changed:
            incarnation = incarnation_from_proto(message.incarnation)
            if incarnation > self._newest:
                self._newest = incarnation
            self.known = state_from_proto(message.known)
            self.connected, self._training = True, message.training
            # Hello told where this process stands, but not why, nor what is on which servers.
            if self._formed is not None and self.servers:
                self._send(pb.WorkerMessage(formed=self._formed))
            if self.standing == pb.PARKED and self._promise is not None:
                self._send(pb.WorkerMessage(parked=self._promise))
            if self.standing == pb.ENDED and self._ended is not None:
                self._send(pb.WorkerMessage(ended=self._ended))
            if self.leaving:
                self._send(pb.WorkerMessage(leaving=pb.Leaving(reason=self.leaving)))
            if self._checkpoint is not None:
                self._send(pb.WorkerMessage(checkpoint=self._checkpoint))
            self._changed.notify_all()

    def _save_asked(self, message: pb.Save) -> None:
        with self._changed:
            state = required_state(message.state, "Save.state")
            if self.standing != pb.PARKED or state != self.state or self.me.id not in message.writers:
                log.warning("ignoring the wish for a checkpoint of %s: this process does not hold it", state)
                return
            known = {member.id: _label(member) for member in self.members}
            writers = tuple(known.get(writer, writer) for writer in message.writers)
            index = list(message.writers).index(self.me.id)
            self._save = Save(state, Share(index, writers, f"-leaving-{message.attempt}"))
            self._changed.notify_all()

    def _prepare(self, message: pb.Prepare) -> None:
        with self._changed:
            if not self._is_current(message.generation) or self._over or self.standing == pb.PARKED:
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
            newer = self.generation is None or generation > self.generation
            if self.standing != pb.PARKED or not newer or generation.incarnation < self._newest:
                log.warning(
                    "ignoring the start of generation %s: this process does not wait for it", generation
                )
                return
            if all(member.id != self.me.id for member in message.members):
                log.warning("ignoring the start of generation %s: this process is not in it", generation)
                return
            self.generation = generation
            self.members = list(message.members)
            self.servers = [*message.servers, *message.leaving_servers]
            self.consistency = message.consistency
            self.cut = self.cut and message.consistency.mode == "Synchronous"
            self._needed_servers, self._unsettled, self._formed = [], False, None
            # From here on the process may train in the new generation: the promise is kept and over.
            self.standing = pb.ACTIVE
            self._promise = None
            self._over = ""
            owners = [member.pod_name or member.id for member in self.members]
            name = generation_to_proto(generation)
            self._store = self._make_store(
                lambda key, value: self._send(
                    pb.WorkerMessage(store_set=pb.StoreEntry(generation=name, key=key, value=value))
                ),
                owners,
                self._settings.formation_seconds,
            )
            for entry in self._early:
                if self._is_current(entry.generation):
                    self._store.deliver(entry.key, entry.value)
            self._early = []
            self._start = Start(message, generation, self._store)
            self._changed.notify_all()

    def _store_entry(self, message: pb.StoreEntry) -> None:
        with self._changed:
            store = self._store if self._is_current(message.generation) else None
            if store is None and len(self._early) < _OLD_ENTRIES:
                self._early.append(message)
        if store is not None:
            store.deliver(message.key, message.value)

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

    def _is_current(self, name: pb.GenerationName) -> bool:
        return self.generation is not None and generation_from_proto(name) == self.generation

    def _end_stages(self, count: int) -> None:
        if count > self.ended_stages:
            self.ended_stages = count
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
            self._changed.wait_for(lambda: self.connected or bool(self._fatal), seconds)
            return self._training if self.connected else 0

    def hold(self, state: StateName) -> None:
        """Note that this process holds the whole state of that name."""
        with self._changed:
            self.state = state

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
            self.servers = [s for s in self.servers if s.id in {*staying, *servers}]

    def train(self) -> None:
        """Note that the process is in a training loop of its generation again."""
        with self._changed:
            if self.standing == pb.AFTER:
                self.standing = pb.ACTIVE

    def stages_ended(self, count: int) -> None:
        """Note that loops 0..count-1 have ended: a peer or the received state is past them."""
        with self._changed:
            self._end_stages(count)

    def park(
        self, reason: int, detail: str = "", addresses: Sequence[str] = (), cannot_go_back: bool = False
    ) -> None:
        """Promise to commit nothing before the next Start.

        Call it only with the script's thread in the library.

        Args:
            reason: a `pb.ParkReason`.
            detail: the reason in words.
            addresses: of peers and servers that may have failed.
            cannot_go_back: there is no older state that this process could take in the place of its own.
        """
        with self._changed:
            suspects = [m.id for m in self.members if m.address in addresses and m.id != self.me.id]
            suspects += [s.id for s in self.servers if s.address.rpartition(":")[0].strip("[]") in addresses]
            promise = pb.Parked(
                reason=reason,  # type: ignore[arg-type]
                layout_hash=self.layout_hash,
                detail=detail[:1000],
                suspects=suspects,
                cannot_go_back=cannot_go_back,
                cut=self.cut,
            )
            if self.generation is not None:
                promise.generation.CopyFrom(generation_to_proto(self.generation))
            if self.state is not None:
                promise.state.CopyFrom(state_to_proto(self.state))
            self.standing = pb.PARKED
            self._promise, self._start, self._leave, self._store = promise, None, None, None
            self._save = None
            self._send(pb.WorkerMessage(parked=promise))

    def await_start(self, can_save: Callable[[], bool] = lambda: False) -> ParkReply:
        """Wait for the coordinator's reply: start a generation, leave, or save the state first.

        A wish to save waits until `can_save` holds. Raise SpringtideError if refused.
        """

        def answer() -> ParkReply | None:
            # A Start that was accepted ends the promise, so it comes first.
            return self._start or self._leave or (self._save if self._save and can_save() else None)

        with self._changed:
            self._wait_for(lambda: answer() is not None, "the next generation")
            found = answer()
            assert found is not None
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
            assert self.generation is not None
            self._store, self.cut = None, False
            if self.consistency.mode:
                # Its state is of this generation now.
                self.books = self.consistency.mode != "Synchronous"
                self.checkpoints = self.storage and not self.books
            self._formed = pb.Formed(
                generation=generation_to_proto(self.generation),
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

    def use_storage(self, able: bool, books: bool) -> None:
        """Note what is known of checkpoints before the first generation.

        Args:
            able: there is a place for checkpoints.
            books: workers do not step together.
        """
        with self._changed:
            self.storage, self.books, self.checkpoints = able, books, able and not books

    def set_layout(self, layout_hash: str) -> None:
        """Note the hash of what the script trains, which all members must have in common."""
        with self._changed:
            self.layout_hash = layout_hash

    def mark_epoch_cut(self) -> None:
        """Note that all members have stopped at an epoch's end and hold the same state."""
        with self._changed:
            self.cut = True

    def call_at_epochs_end(self, listener: Callable[[], None]) -> None:
        """Have the stream's thread call this when the members are asked to stop at the epoch's end."""
        with self._changed:
            self._on_epochs_end = listener

    def bind_to_steps(self, reason: str) -> None:
        """Note why the script cannot train without common steps, as far as is known; "" if it can."""
        with self._changed:
            self.bound_to_steps = reason
            if reason:
                self._send(pb.WorkerMessage(bound_to_steps=pb.BoundToSteps(reason=reason[:1000])))

    def await_end(self, stage: int, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait at the end of loop `stage` until all members stand there.

        Return False when the generation is over instead, or `unless` holds (asked twice a second).
        """
        with self._changed:
            known = self.ended_stages > stage
            if self._over and not known:
                return False
            if self.generation is not None and self.state is not None:
                self._ended = pb.Ended(
                    generation=generation_to_proto(self.generation),
                    state=state_to_proto(self.state),
                    stage=stage,
                )
                # Also when the end is known already: the coordinator may not know where this one stands.
                self._send(pb.WorkerMessage(ended=self._ended))
            if known:
                self.standing = pb.AFTER
                return True
            self.standing = pb.ENDED
            self._wait_for(
                lambda: self.ended_stages > stage or bool(self._over) or unless(),
                "the other members at the end of the loop",
            )
            if self.ended_stages > stage:
                self.standing = pb.AFTER
                return True
            self.standing = pb.ACTIVE
            return False

    def leave(self, reason: str) -> None:
        """Note why this process has been asked to go, and say so as soon as there is a stream. Any thread."""
        with self._changed:
            self.leaving = self.leaving or reason
            self._send(pb.WorkerMessage(leaving=pb.Leaving(reason=self.leaving)))

    def report_checkpoint(self, message: pb.Checkpoint) -> None:
        """Report to the coordinator, and to the next one, what became of the last checkpoint. Any thread."""
        with self._changed:
            self._checkpoint = message
            self._send(pb.WorkerMessage(checkpoint=message))

    def labels(self) -> list[str]:
        """Return the names of all members of the generation, in rank order. Any thread."""
        with self._changed:
            return [_label(member) for member in self.members]

    def others(self) -> list[str]:
        """Return the names of the other members of the generation."""
        with self._changed:
            return [member.pod_name or member.id for member in self.members if member.id != self.me.id]

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        began = said = time.monotonic()
        while not condition():
            self._check_fatal()
            self._on_wait()
            # Short waits, so that signals are handled.
            self._changed.wait(0.5)
            now = time.monotonic()
            if now - said >= _LOG_EVERY_SECONDS:
                said = now
                through = (
                    ""
                    if self.connected
                    else f"; the coordinator at {self._settings.coordinator} cannot be reached"
                )
                names = (
                    ", ".join(m.pod_name or m.id for m in self.members if m.id != self.me.id) or "none yet"
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
