"""Events that go into the state machine and effects that come out of it."""

from __future__ import annotations

from dataclasses import dataclass

from springtide_coordinator.membership.messages import (
    Consistency,
    Hello,
    Incoming,
    Outgoing,
    ServerHello,
    Start,
)


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream was opened and said Hello; `session` is a number never used before."""

    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class ServerConnected:
    """A parameter server's stream was opened and said ServerHello; `session` as in Connected."""

    session: int
    hello: ServerHello


@dataclass(frozen=True, slots=True)
class Disconnected:
    session: int


@dataclass(frozen=True, slots=True)
class Received:
    session: int
    message: Incoming


@dataclass(frozen=True, slots=True)
class PodSeen:
    """A pod that may still have a process; `leave_by` is unix time in seconds, 0 when it stays.

    unheard: the operator looked for it, and nothing was heard of it nor of its node.
    """

    uid: str
    name: str = ""
    slot: int = 0
    started: bool = True
    leave_by: float = 0.0
    unheard: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """The operator's word: sizes in processes (0: unknown) and the whole lists of living pods."""

    target: int
    minimum: int
    maximum: int
    living: tuple[PodSeen, ...]
    observed: bool = True
    processes_per_pod: int = 1
    number: int = 0  # of the newest incarnation it made; 0: not told
    trained: bool = False  # the job has had a generation, and so a state
    pause: float = 0.0  # seconds until its next word at the latest; 0: not told
    suspend: bool = False  # all members are to leave
    suspend_by: float = 0.0  # unix time at which they leave whatever is saved; 0: not told
    saved: str = ""  # name of the checkpoint that the job was put away with, and that holds all there was
    servers: int = 0  # parameter servers wanted; 0: a strategy without
    living_servers: tuple[PodSeen, ...] = ()
    consistency: Consistency | None = None  # wanted; None: no parameters on servers
    hung: frozenset[str] = frozenset()  # uids of pods that hang and are replaced; not among the living
    standby: int = 0  # processes that are to wait beyond `target`


@dataclass(frozen=True, slots=True)
class StoodStill:
    """A standstill of this process for so many seconds, up to now, in which it received no sign of life
    either.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class FellSilent:
    """The member of a stream has said no heartbeat for so many seconds, which is longer than its limit."""

    session: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a stream has ended; the stream itself breaks about then, or much later."""

    session: int
    member: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    Connected
    | ServerConnected
    | Disconnected
    | Received
    | Synced
    | StoodStill
    | FellSilent
    | ProcessEnded
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` on the stream `session` of member (or parameter server) `member`."""

    session: int
    member: str
    message: Outgoing


@dataclass(frozen=True, slots=True)
class EndStream:
    """End the stream after what was sent on it; nothing that it still says is heard."""

    session: int
    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class Made:
    """A generation was made; `cause` is start, join, leave, failure, consistency or end."""

    start: Start
    cause: str
    state_lost: bool


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member or server of the running generation is lost; `reason` says how that is known."""

    member: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """EndOk was said for loop `stage`."""

    stage: int


Effect = Send | EndStream | Made | MemberLost | LoopEnded
