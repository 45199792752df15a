"""Records of a process and of a parameter server: their last reports, and the messages sent to them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from springtide_coordinator.membership.events import Effect, Send
from springtide_coordinator.membership.messages import MemberInfo, Outgoing, ParkReason, ServerInfo, Standing
from springtide_protocol.names import GenerationName, StateName
from springtide_protocol.versions import OWN, Speaks


@dataclass(slots=True)
class Record:
    """One process, as far as this coordinator has heard of it. Times are unix seconds."""

    info: MemberInfo
    order: int  # of arrival: the youngest has the greatest
    standing: Standing = Standing.STARTING
    session: int | None = None
    connected_at: float = 0.0
    disconnected_at: float | None = None
    ended: bool = False  # its lifeline has, since it connected last
    generation: GenerationName | None = None  # it is in, or was in last
    state: StateName | None = None  # at least this was committed here, by its last report
    layout_hash: str = ""
    park_reason: ParkReason = ParkReason.UNKNOWN
    parked_at: float = 0.0
    detail: str = ""
    suspects: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()  # ids of servers, when it parked
    leaving_since: float | None = None
    leave_by: float = 0.0
    leave_reason: str = ""
    at_stage: int | None = None  # of Ended
    ended_stages: int = 0  # loops it knows to be ended
    told_loop: int | None = None  # of the running generation, on this stream
    dismissed: str = ""  # Leave was said; the reason
    surplus: bool = False  # and it was that the job has finished
    goodbye: str = ""  # the outcome it said Bye with
    opaque: bool = False  # it has no state of ours that could be lost
    stop_seconds: float = 0.0  # so long its script may take to end when members change
    replaced: bool = False  # another process has its place
    voided: bool = False  # it held a state that the servers have lost, and cannot begin anew
    at_epoch_end: bool = False  # it has stopped where all met, and its state is one of common steps too
    keeps_applied_batches: bool = (
        False  # an older state than the newest loses nothing: the servers know what was trained
    )
    storage: bool = False  # it knows where to write checkpoints
    checkpoints: bool = False  # the same, and its state is one that can be saved
    bound_to_steps: str = ""  # why its script cannot train without common steps, as far as is known
    stuck: bool = False  # it has trained, and there is no checkpoint that it could go back to
    largest_group: int = 0  # processes of the largest generation that it can connect to; 0: not told
    hands_over: bool = False  # as in Parked
    follows: bool = False  # members were told to send it the state while it is not ready
    together: int = 1  # processes of its pod that train one model as one; see pods.py
    speaks: Speaks = OWN
    sent: set[Hashable] = field(default_factory=set)  # what was said once on this stream

    @property
    def connected(self) -> bool:
        return self.session is not None

    @property
    def parked(self) -> bool:
        """Whether it waits on a live stream for a Start and has not been told to leave."""
        return self.connected and self.standing is Standing.PARKED and not self.dismissed

    @property
    def can_go_back(self) -> bool:
        """Whether it begins from a checkpoint, if there is one, when nobody holds its state any more."""
        return self.checkpoints or self.storage

    @property
    def leaving(self) -> bool:
        return self.leaving_since is not None

    def asked_to_leave(self, now: float, reason: str, leave_by: float = 0.0) -> None:
        """Remember that the process is to go.

        Args:
            now: in unix seconds.
            reason: in words.
            leave_by: in unix seconds: at the latest; 0: unknown.
        """
        if self.leaving_since is None:
            self.leaving_since = now
            self.leave_reason = reason
        if leave_by:
            self.leave_by = leave_by

    def leave_deadline(self, margin: float, assumed_grace: float) -> float:
        """Return the unix time at which it must be let go, whatever it holds; infinite when it stays.

        Args:
            margin: seconds before the pod's own end.
            assumed_grace: seconds from the wish to leave to the pod's end, where that is not known.
        """
        if self.leaving_since is None:
            return float("inf")
        return (self.leave_by or self.leaving_since + assumed_grace) - margin


@dataclass(slots=True)
class ServerRecord:
    """Times are unix seconds."""

    info: ServerInfo
    order: int  # of arrival: the youngest has the greatest
    session: int | None = None
    disconnected_at: float | None = None
    leaving: str = ""  # why it is to go; "" while it stays
    replaced: bool = False  # another process has its place
    dismissed: bool = False  # ServerLeave was said
    speaks: Speaks = OWN
    sent: set[Hashable] = field(default_factory=set)  # what was said once on this stream

    @property
    def connected(self) -> bool:
        return self.session is not None

    @property
    def usable(self) -> bool:
        """Whether a generation may be made with it."""
        return self.connected and not self.replaced and not self.dismissed

    @property
    def newness(self) -> tuple[bool, int, int]:
        """The greatest of a slot is taken: one that stays before one that leaves, then the newest."""
        return (not self.leaving, self.info.attempt, self.order)


def once(record: Record | ServerRecord, key: Hashable, message: Outgoing) -> list[Effect]:
    """Send a message once on a member's stream; nothing without a stream.

    Args:
        record: of the member; it remembers the key.
        key: by which messages are the same.
        message: to send.

    Returns:
        The message, if it is to be sent.
    """
    if record.session is None or key in record.sent:
        return []
    record.sent.add(key)
    return [Send(record.session, record.info.id, message)]
