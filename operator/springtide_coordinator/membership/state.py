"""Everything the state machine knows, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from springtide_coordinator.membership.events import PodSeen
from springtide_coordinator.membership.generation import ComplaintRow, Generation
from springtide_coordinator.membership.members import Record, ServerRecord
from springtide_coordinator.membership.messages import Consistency, MemberInfo, ServerInfo
from springtide_coordinator.membership.settings import Settings
from springtide_protocol.names import GenerationName, Incarnation, StateName


@dataclass(frozen=True, slots=True)
class Status:
    """The job's phase in words: `reason` is a CamelCase constant, `message` one sentence for people."""

    reason: str
    message: str
    waiting_for: tuple[str, ...] = ()


@dataclass(slots=True)
class Saving:
    """A checkpoint of the state that its last holders write before they leave."""

    state: StateName
    writers: tuple[str, ...]  # member ids, in rank order
    attempt: int = 1
    failed: str = ""
    given_up: bool = False


@dataclass(slots=True)
class Membership:
    """The coordinator's memory. Times are unix seconds, sizes are processes (0: unknown)."""

    incarnation: Incarnation
    started_at: float
    target: int = 0
    minimum: int = 0
    maximum: int = 0
    standby: int = 0  # that are to wait beyond `target`; with any, no more than `target` train
    settings: Settings = field(default_factory=Settings)

    members: dict[str, Record] = field(default_factory=dict)
    sessions: dict[int, str] = field(default_factory=dict)
    current: Generation | None = None
    generations: int = 0  # greatest number of a generation that was made or reported
    arrivals: int = 0

    servers_wanted: int = 0
    consistency_wanted: Consistency | None = None  # by the operator; None: not told
    consistency_at_first: Consistency | None = None  # until it is told
    servers: dict[str, ServerRecord] = field(default_factory=dict)
    server_sessions: dict[int, str] = field(default_factory=dict)
    known_servers: dict[str, ServerInfo] = field(default_factory=dict)  # every one that said ServerHello
    living_servers: dict[str, PodSeen] = field(default_factory=dict)
    lost_servers: list[str] = field(default_factory=list)  # names, since a generation was formed

    living: dict[str, PodSeen] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)  # uids of pods that the operator listed and lists no more
    hung: frozenset[str] = frozenset()  # uids of pods that the operator replaces since they hang
    processes_per_pod: int = 1
    operator_synced_at: float | None = None
    operator_pause: float = 0.0  # seconds within which it means to call again; 0: it did not say
    operator_synced: bool = False  # it listed the living pods after this incarnation began

    settled: bool = False  # who may hold state is known; see adoption.py
    known_members: dict[str, MemberInfo] = field(default_factory=dict)  # every process that ever said Hello
    named: dict[str, MemberInfo] = field(default_factory=dict)  # by reports of other processes too
    former: tuple[str, ...] = ()  # uids of pods that earlier generations had, the newest last
    known: StateName | None = None  # newest commit told of
    state_existed: bool = False  # some process has held state
    void: StateName | None = None  # the servers have lost it: it and older ones are held by nobody
    void_found_by: GenerationName | None = None
    void_reason: str = ""

    suspended: bool = False  # the operator wants all members to leave
    suspend_by: float = 0.0  # unix time at which they leave whatever is saved; 0: not told
    saved: StateName | None = None  # newest state that is on storage, by name or under another one
    saving: Saving | None = None
    save_seconds: float = 0.0  # that the last checkpoint took
    put_away_with: str = ""  # name of the checkpoint that holds all there was, when the job was put away
    resumes: str = ""  # the same, of the fresh start that is being made
    asleep_since: float = 0.0  # this process stood still from then
    awake_since: float | None = None  # until then; None: it never did
    minimum_since: float | None = None
    complaints: ComplaintRow = field(default_factory=ComplaintRow)
    excluded: dict[str, str] = field(default_factory=dict)
    superseded: str = ""
    finished: bool = False  # a process said so
    finished_at: float = 0.0
    ended_stages: int = 0  # the most loops that any process has known to be ended
    running_loop: int | None = None  # of the current generation; None: not known. See running_loop.py
    states_lost: int = 0
    blocked: Status | None = None  # why no generation could be made; None: nothing is waited for

    places: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # (pod uid, local rank) -> members
    layouts: set[str] = field(default_factory=set)  # of all members, and maybe of some that are forgotten
    peers: set[str] = field(default_factory=set)  # what they exchange with each other, likewise
    undecided: bool = True  # facts have changed since the last decisions
    quiet: bool = False  # time alone changes no decision

    def connected(self) -> Iterator[Record]:
        """All members with a live stream, oldest first."""
        return (record for record in self.members.values() if record.connected)

    def server_connected(self, server: str) -> bool:
        return server in self.servers and self.servers[server].connected

    def in_current(self, member: str) -> bool:
        return self.current is not None and member in self.current.ids

    def deaf(self, now: float) -> bool:
        """Whether the operator has not been heard for too long."""
        return now - (self.operator_synced_at or self.started_at) > self.patience

    @property
    def patience(self) -> float:
        """Seconds of silence after which the operator counts as unreachable: one call may fail."""
        return max(self.settings.operator_silence, 2.5 * self.operator_pause)

    def next_name(self) -> GenerationName:
        """The name of the generation to make; used once."""
        self.generations += 1
        return GenerationName(self.incarnation, self.generations)
