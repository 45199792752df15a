"""Messages of members and the coordinator's replies, as plain values.

The shapes follow `coordinator.proto`; `wire.py` converts. An unset field is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from springtide_protocol.names import GenerationName, Incarnation, StateName, process_label
from springtide_protocol.versions import OWN, Agreement, Speaks


class Standing(StrEnum):
    """State of a process at this moment; AFTER: it runs the script behind a loop that ended."""

    STARTING = "starting"
    PARKED = "parked"
    ACTIVE = "active"
    ENDED = "ended"
    AFTER = "after"


class ParkReason(Enum):
    """Why a process parked; UNKNOWN after a reconnection that told only that it is parked."""

    UNKNOWN = 0
    STANDBY = 1
    DROPPED = 2
    REDUCTION_FAILED = 3
    BOUNDARY = 4
    FORMATION_FAILED = 5
    SERVERS_LACK_STATE = 6

    @property
    def is_complaint(self) -> bool:
        """Whether the process says that a peer or the way to it is broken."""
        return self in (ParkReason.REDUCTION_FAILED, ParkReason.FORMATION_FAILED)


@dataclass(frozen=True, slots=True)
class MemberInfo:
    """Identity of a process; the id is random and made once per process."""

    id: str
    pod_uid: str = ""
    pod_name: str = ""
    local_rank: int = 0
    address: str = ""
    slot: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """Return its pod and rank there, which no two processes have at a time."""
        return (self.pod_uid, self.local_rank)

    @property
    def rank_key(self) -> tuple[int, int, str]:
        """Ranks are given in this order."""
        return (self.slot, self.local_rank, self.id)

    @property
    def label(self) -> str:
        """The name that people know."""
        return process_label(self.pod_name, self.id, self.local_rank)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A parameter server's process; the id is random and made once per process, the address is `ip:port`."""

    id: str
    pod_uid: str = ""
    pod_name: str = ""
    slot: int = 0
    address: str = ""
    attempt: int = 0

    @property
    def label(self) -> str:
        """The name that people know."""
        return self.pod_name or self.id


@dataclass(frozen=True, slots=True)
class Consistency:
    """How workers whose parameters are on servers keep in step.

    mode: Synchronous, BoundedStaleness or Asynchronous. staleness: steps that the fastest worker may be ahead
    of the slowest, with BoundedStaleness; 0 otherwise.
    """

    mode: str
    staleness: int = 0

    def __str__(self) -> str:
        return f"{self.mode} ({self.staleness} steps)" if self.staleness else self.mode


# ---- worker -> coordinator ----


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a stream: who the process is and what it is at this moment."""

    member: MemberInfo
    standing: Standing
    speaks: Speaks = OWN
    newest_incarnation: Incarnation | None = None
    generation: GenerationName | None = None
    members: tuple[MemberInfo, ...] = ()
    state: StateName | None = None
    layout_hash: str = ""
    leaving: bool = False
    ended_stage: int = 0
    servers: tuple[ServerInfo, ...] = ()
    opaque: bool = False  # commits no steps and holds no state: its script keeps its own
    stop_seconds: float = 0.0  # so long its script may take to end when members change
    checkpoints: bool = False
    keeps_applied_batches: bool = (
        False  # what was trained is written down beside the parameters, on the servers
    )
    consistency: Consistency | None = None  # of `generation`
    storage: bool = False  # it knows where to write checkpoints; `checkpoints`: and its state is one to save
    bound_to_steps: str = ""  # why its script cannot train without common steps, as far as is known
    at_epoch_end: bool = (
        False  # its state is an epoch's end, where all have stopped and no range was given out since
    )
    largest_group: int = 0  # processes of the largest generation that it can connect to; 0: not told
    together: int = 1  # processes of its pod that train one model as one


@dataclass(frozen=True, slots=True)
class Parked:
    """A promise: nothing older than the next Start commits after it."""

    reason: ParkReason
    generation: GenerationName | None = None
    state: StateName | None = None
    layout_hash: str = ""
    detail: str = ""
    suspects: tuple[str, ...] = ()
    cannot_go_back: bool = False  # there is no checkpoint that it could take in the place of its state
    at_epoch_end: bool = False  # as in Hello
    reached: tuple[str, ...] = ()  # ids of the servers that it has heard in the generation
    largest_group: int = 0  # as in Hello
    together: int = 1  # as in Hello
    hands_over: bool = False  # before it leaves, it has to hand a part of its state over in a generation


@dataclass(frozen=True, slots=True)
class Formed:
    """The member has the generation's group and the state that Start named.

    restored: name of the checkpoint that it took the state of a fresh start from.
    """

    generation: GenerationName
    needed_servers: tuple[str, ...] = ()  # ids of leaving servers that still serve chunks
    servers_unsettled: bool = False  # chunks are still being copied
    server_copies: int = 1  # servers that hold each chunk, at least
    restored: str = ""


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """Result of a checkpoint: whole, unless there is an error; seconds that it took."""

    state: StateName
    error: str = ""
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Progressed:
    """The newest commit that a Progress told of, and the training loop that it is of; None: not told."""

    state: StateName
    loop: int | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    """The process has been asked to go."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The cursor stands at the end of loop `stage`."""

    generation: GenerationName
    state: StateName
    stage: int


@dataclass(frozen=True, slots=True)
class BoundToSteps:
    """Report that the script of this process cannot train without common steps."""

    reason: str


@dataclass(frozen=True, slots=True)
class Follow:
    """The process is about to join, and takes the state at `port` from those that know the secret."""

    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class Bye:
    """The process exits after this; outcome is Finished, Left or Failed."""

    outcome: str
    detail: str = ""


# ---- parameter server -> coordinator ----


@dataclass(frozen=True, slots=True)
class ServerHello:
    """First message of a parameter server's stream."""

    server: ServerInfo
    speaks: Speaks = OWN
    newest_incarnation: Incarnation | None = None
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class ServerLeaving:
    """The server has been asked to go, and serves on until it is let go."""

    reason: str = ""


Incoming = (
    Parked
    | Formed
    | Checkpointed
    | Progressed
    | Leaving
    | Ended
    | BoundToSteps
    | Follow
    | Bye
    | ServerLeaving
)


# ---- coordinator -> worker ----


@dataclass(frozen=True, slots=True)
class Welcome:
    """Admission of a process to the coordinator's stream.

    agreement: what both understand. running_loop: as in RunningLoop; None where that is not known.
    """

    incarnation: Incarnation
    agreement: Agreement
    running_loop: int | None = None


@dataclass(frozen=True, slots=True)
class RunningLoop:
    """Tell a process that has not been a member which training loop the generation is in, from 0."""

    stage: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """Order to all members: the generation is over, so drop the open step and park."""

    generation: GenerationName
    reason: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """`receiver` lacks the state and gets it from `holder` (member ids)."""

    receiver: str
    holder: str


@dataclass(frozen=True, slots=True)
class Start:
    """The next generation: members in rank order, the state that all begin from, and who sends it to whom."""

    generation: GenerationName
    members: tuple[MemberInfo, ...]
    state: StateName
    transfers: tuple[Transfer, ...]
    fresh: bool
    reason: str
    servers: tuple[ServerInfo, ...] = ()  # in slot order, one per slot
    leaving_servers: tuple[ServerInfo, ...] = ()  # connected, not in `servers`, may hold the state
    had_state: bool = False  # with fresh: the job had state, which may be on storage
    consistency: Consistency | None = None  # None: no parameters on servers
    minimum: int = 0  # the fewest processes that a generation may have; 0: unknown


@dataclass(frozen=True, slots=True)
class Boundary:
    """Order to stop between two steps, since members come or go.

    at_epochs_end: not after this step, but where all meet who do not step together.
    """

    generation: GenerationName
    reason: str
    at_epochs_end: bool = False


@dataclass(frozen=True, slots=True)
class Save:
    """Order to a parked member: write the state that all writers hold; another attempt writes other files."""

    state: StateName
    writers: tuple[str, ...]
    attempt: int


@dataclass(frozen=True, slots=True)
class Feed:
    """Order to a member that trains: send share `index` of `count` to a process that is about to join."""

    follower: str  # its id
    address: str
    secret: bytes
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Feeding:
    """Answer to Follow: so many members were told to send the state."""

    count: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Permission to end: nobody needs what the process holds."""

    reason: str
    finished: bool = False  # the job has


@dataclass(frozen=True, slots=True)
class EndOk:
    """Answer to all members: each of them has ended this training loop, so it is over."""

    generation: GenerationName
    stage: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Answer to a process that is not admitted. retry: it may ask again later."""

    reason: str
    retry: bool


@dataclass(frozen=True, slots=True)
class ServerLeave:
    """Permission for a parameter server that is leaving: nothing that it holds is needed any more."""

    reason: str


Outgoing = (
    Welcome
    | RunningLoop
    | Prepare
    | Start
    | Boundary
    | Save
    | Feed
    | Feeding
    | Leave
    | EndOk
    | Refused
    | ServerLeave
)
