"""A job with parameter servers in miniature: each server holds its share of the newest state, nothing else
does. Shards that are not yet where a generation wants them are copied while it trains: until then it goes on
with those who hold them. Messages arrive at once and in order; the caller decides what happens in between.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from coordinator_decisions import handle

from springtide_coordinator.membership import (
    Connected,
    Disconnected,
    Event,
    Membership,
    Received,
    ServerConnected,
    Synced,
    Tick,
)
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import EndStream, Made, PodSeen, Send
from springtide_protocol.names import GenerationName, Incarnation, StateName


class BrokenPromise(AssertionError):
    """Something that must always hold does not."""


@dataclass
class Pod:
    uid: str
    slot: int
    attempt: int = 0
    leave_by: float = 0.0


@dataclass
class Process:
    """A worker or a server. `session`: its stream to the newest coordinator, None while it is broken."""

    id: str
    pod: Pod
    alive: bool = True
    session: int | None = None


@dataclass
class Server(Process):
    holds: StateName | None = None
    died_at: float = 0.0
    leaving: bool = False

    @property
    def info(self) -> say.ServerInfo:
        pod = self.pod
        return say.ServerInfo(self.id, pod.uid, pod.uid, pod.slot, "10.0.0.1:7080", pod.attempt)


@dataclass
class Worker(Process):
    standing: say.Standing = say.Standing.STARTING
    state: StateName | None = None
    generation: GenerationName | None = None
    members: tuple[say.MemberInfo, ...] = ()
    servers: tuple[say.ServerInfo, ...] = ()
    formed: bool = False
    told: say.Formed | None = None
    parked: say.Parked | None = None

    @property
    def info(self) -> say.MemberInfo:
        return say.MemberInfo(self.id, self.pod.uid, self.pod.uid, 0, "10.0.0.2", self.pod.slot)


@dataclass
class World:
    wanted: int = 2
    target: int = 2
    now: float = 1000.0
    operator_up: bool = True
    workers: dict[str, Worker] = field(default_factory=dict)
    servers: dict[str, Server] = field(default_factory=dict)
    shares: dict[StateName, frozenset[str]] = field(default_factory=dict)  # who held it when it was new
    names: set[GenerationName] = field(default_factory=set)
    void: set[StateName] = field(default_factory=set)
    told_void: set[StateName] = field(default_factory=set)  # as far as this coordinator was told
    replication: int = 1
    copies: dict[StateName, int] = field(default_factory=dict)  # servers that hold each part of it
    copies_take_long: bool = False
    copying: dict[GenerationName, frozenset[str]] = field(default_factory=dict)  # the servers used meanwhile
    before: set[str] = field(default_factory=set)  # servers of the last Start
    commits: int = 0
    turn: int = 1  # events that the coordinator takes in before it decides, if so many have come
    _made: int = 0

    def __post_init__(self) -> None:
        self.incarnation = Incarnation(1)
        self.m = self._coordinator()
        self._events: deque[Event] = deque()
        self._busy = False
        self.operator()

    # ---- the coordinator

    def _coordinator(self) -> Membership:
        return Membership(
            self.incarnation,
            started_at=self.now,
            target=self.target,
            minimum=1,
            maximum=4,
            servers_wanted=self.wanted,
        )

    def restart_coordinator(self) -> None:
        self.incarnation = Incarnation(1, self.incarnation.restart + 1)
        self.m = self._coordinator()
        self.told_void.clear()
        self._events.clear()
        for process in (*self.workers.values(), *self.servers.values()):
            process.session = None

    def feed(self, event: Event) -> None:
        """Let the coordinator take it in, and everybody what it says to that, until all is said."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        taken = 0
        while self._events:
            event = self._events.popleft()
            taken = taken + 1 if self._events and taken + 1 < self.turn else 0
            effects = handle(self.m, event, self.now, put_off=taken > 0)
            for effect in effects:
                if isinstance(effect, Made):
                    self._check(effect.start)
            for effect in effects:
                match effect:
                    case Send():
                        self._told(effect)
                    case EndStream():
                        for process in (*self.workers.values(), *self.servers.values()):
                            if process.session == effect.session:
                                process.session = None
        self._busy = False

    def _check(self, start: say.Start) -> None:
        if start.generation in self.names:
            raise BrokenPromise(f"two generations are named {start.generation}")
        self.names.add(start.generation)
        slots, wanted = [server.slot for server in start.servers], list(range(self.m.servers_wanted))
        there = {server.id for server in (*start.servers, *start.leaving_servers)}
        # One to come is not waited for, while copies suffice or none is missing that served before.
        incomplete = (
            (self.replication > 1 or self.before <= there)
            and slots
            and set(slots) <= set(wanted)
            and slots == sorted(set(slots))
        )
        if slots != wanted and not incomplete:
            raise BrokenPromise(f"{start.generation} has the servers {start.servers}")
        self.before = {server.id for server in start.servers}
        for info in start.servers:
            if self.servers[info.id].session is None:
                raise BrokenPromise(f"{start.generation} has {info.id}, which is not connected")
        if start.state in self.told_void:
            raise BrokenPromise(f"{start.generation} begins from {start.state}, which is lost")

    def _told(self, effect: Send) -> None:
        worker, server = self.workers.get(effect.member), self.servers.get(effect.member)
        refused = isinstance(effect.message, say.Refused) and not effect.message.retry
        if server is not None and (refused or isinstance(effect.message, say.ServerLeave)):
            self.kill_server(server)
        if worker is not None and worker.alive and worker.session == effect.session:
            self._worker_told(worker, effect.message)

    # ---- workers

    def _worker_told(self, worker: Worker, message: say.Outgoing) -> None:
        match message:
            case say.Start():
                worker.standing, worker.formed, worker.parked = say.Standing.ACTIVE, False, None
                worker.generation, worker.members = message.generation, message.members
                worker.servers = message.servers
                self._form(worker, message)
            case say.Prepare():
                if worker.standing is say.Standing.ACTIVE and message.generation == worker.generation:
                    self._park(worker, say.ParkReason.DROPPED)
            case say.Boundary():
                if worker.standing is say.Standing.ACTIVE and message.generation == worker.generation:
                    self._park(worker, say.ParkReason.BOUNDARY)
            case say.Leave():
                self._say(worker, say.Bye("Left"))
                self.kill_worker(worker)
            case say.Refused(retry=False):
                self.kill_worker(worker)

    def _form(self, worker: Worker, start: say.Start) -> None:
        """Servers and workers see to it that the servers of the generation hold its state."""
        serving = [self.servers[info.id] for info in start.servers]
        dead = tuple(server.id for server in serving if not server.alive)
        if dead:
            self._park(worker, say.ParkReason.FORMATION_FAILED, dead)
            return
        ids = frozenset(server.id for server in serving)
        copies = min(self.replication, len(ids))
        right = start.fresh or (
            self.shares[start.state] == ids
            and self.copies[start.state] == copies
            and all(server.holds == start.state for server in serving)
        )
        if not right:
            asked = {info.id for info in (*start.servers, *start.leaving_servers)}
            having = {i for i in asked if self.servers[i].alive and self.servers[i].holds == start.state}
            missing = len(self.shares[start.state] - having)
            if missing >= self.copies[start.state]:
                self.void.add(start.state)
                if worker.session is not None:
                    self.told_void.add(start.state)
                self._park(worker, say.ParkReason.SERVERS_LACK_STATE)
                return
            if self.copies_take_long or start.generation in self.copying:
                self.copying[start.generation] = self.shares[start.state] & having
                copies = self.copies[start.state] - missing
        used = self.copying.get(start.generation, ids)
        self.shares[start.state], self.copies[start.state] = used, copies
        for server in used:
            self.servers[server].holds = start.state
        worker.state, worker.formed = start.state, True
        everybody = (*start.servers, *start.leaving_servers)
        worker.servers = tuple(info for info in everybody if info.id in used | ids)
        needed = tuple(sorted(used - ids))
        worker.told = say.Formed(start.generation, needed, start.generation in self.copying, copies)
        self._say(worker, worker.told)

    def copied(self) -> None:
        """Let all copies arrive: the members stop at a boundary, for a generation that uses them."""
        self.copies_take_long = False
        for worker in list(self.workers.values()):
            trains = worker.alive and worker.standing is say.Standing.ACTIVE and worker.formed
            if trains and worker.generation in self.copying:
                self._park(worker, say.ParkReason.BOUNDARY)

    def _park(self, worker: Worker, reason: say.ParkReason, suspects: tuple[str, ...] = ()) -> None:
        worker.standing = say.Standing.PARKED
        worker.parked = say.Parked(reason, worker.generation, worker.state, "layout", "", suspects)
        self._say(worker, worker.parked)

    def _say(self, worker: Worker, message: say.Incoming) -> None:
        if worker.session is not None:
            self.feed(Received(worker.session, message))

    def step(self) -> None:
        """The workers of the newest generation commit a step, if they and their servers are all there."""
        active = [w for w in self.workers.values() if w.alive and w.standing is say.Standing.ACTIVE]
        if not active:
            return
        name = max(w.generation for w in active if w.generation is not None)
        first = next(w for w in active if w.generation == name)
        members = [self.workers[info.id] for info in first.members]
        used = self.copying.get(name, frozenset(info.id for info in first.servers))
        serving = [self.servers[server] for server in used]
        if not all(w.alive and w.formed and w in active and w.generation == name for w in members):
            return
        if dead := tuple(server.id for server in serving if not server.alive):
            for worker in members:
                self._park(worker, say.ParkReason.REDUCTION_FAILED, dead)
            return
        states = {w.state for w in members} | {server.holds for server in serving}
        if len(states) != 1 or first.state is None:
            raise BrokenPromise(f"workers and servers of {name} hold {states}")
        state = StateName(name, first.state.step + 1)
        self.shares[state], self.copies[state] = frozenset(used), self.copies[first.state]
        self.commits += 1
        for server in serving:
            server.holds = state
        for worker in members:
            worker.state = state
        self._say(first, say.Progressed(state))

    # ---- what happens to processes

    def _new(self) -> int:
        self._made += 1
        return self._made

    def start_server(self, pod: Pod) -> None:
        server = Server(f"s{self._new()}", pod)
        self.servers[server.id] = server
        self.connect_server(server)

    def connect_server(self, server: Server) -> None:
        if server.alive and server.session is None:
            server.session = self._new()
            self.feed(ServerConnected(server.session, say.ServerHello(server.info, leaving=server.leaving)))

    def connect(self, process: Process) -> None:
        if isinstance(process, Server):
            self.connect_server(process)
        elif isinstance(process, Worker):
            self.connect_worker(process)

    def connect_worker(self, worker: Worker) -> None:
        if not worker.alive or worker.session is not None:
            return
        worker.session = self._new()
        hello = say.Hello(
            worker.info,
            worker.standing,
            generation=worker.generation,
            members=worker.members,
            state=worker.state,
            servers=worker.servers,
        )
        self.feed(Connected(worker.session, hello))
        if worker.standing is say.Standing.STARTING:
            self._park(worker, say.ParkReason.STANDBY)
        elif worker.parked is not None and worker.standing is say.Standing.PARKED:
            self._say(worker, worker.parked)
        elif worker.formed and worker.told is not None:
            self._say(worker, worker.told)

    def break_stream(self, process: Process) -> None:
        session, process.session = process.session, None
        if session is not None:
            self.feed(Disconnected(session))

    def kill_server(self, server: Server) -> None:
        if server.alive:
            server.alive, server.holds, server.died_at = False, None, self.now
            self.break_stream(server)

    def kill_worker(self, worker: Worker) -> None:
        worker.alive = False
        self.break_stream(worker)

    def delete_server_pod(self, server: Server) -> None:
        if server.alive and not server.pod.leave_by:
            server.pod.leave_by, server.leaving = self.now + 120, True
            if server.session is not None:
                self.feed(Received(server.session, say.ServerLeaving("SIGTERM")))

    def elapse(self, seconds: float) -> None:
        self.now += seconds
        for server in list(self.servers.values()):
            if server.pod.leave_by and self.now >= server.pod.leave_by:
                self.kill_server(server)
        self.feed(Tick())
        self._losses_end_generations()

    def _losses_end_generations(self) -> None:
        current, m = self.m.current, self.m
        if current is None or current.closing or m.deaf(self.now):
            return
        for info in current.serving:
            server, record = self.servers[info.id], m.servers.get(info.id)
            late = self.now - server.died_at > m.settings.grace
            if record is not None and not server.alive and late:
                raise BrokenPromise(f"{current.name} goes on without {info.id}")

    def operator(self) -> None:
        """One round: what lacks is made, what was scaled down goes, the coordinator is told."""
        if not self.operator_up:
            return
        for slot in range(self.target):
            if not any(w.alive and w.pod.slot == slot for w in self.workers.values()):
                worker = Worker(f"w{self._new()}", Pod(f"wp{self._made}", slot))
                self.workers[worker.id] = worker
                self.connect_worker(worker)
        servers = [s for s in self.servers.values() if s.alive or not s.pod.leave_by]
        for slot in range(self.wanted):
            pods = [s.pod for s in servers if s.pod.slot == slot]
            if not any(not pod.leave_by for pod in pods):
                before = [s.pod.attempt for s in self.servers.values() if s.pod.slot == slot]
                self.start_server(Pod(f"sp{self._new()}", slot, 1 + max(before or [-1])))
        for server in servers:
            if server.pod.slot >= self.wanted and server.alive:
                self.delete_server_pod(server)
        living = tuple(PodSeen(w.pod.uid, w.pod.uid, w.pod.slot) for w in self.workers.values() if w.alive)
        pods = {s.pod.uid: s.pod for s in self.servers.values() if s.alive or not s.pod.leave_by}
        serving = tuple(PodSeen(p.uid, p.uid, p.slot, True, p.leave_by) for p in pods.values())
        self.feed(Synced(self.target, 1, 4, living, servers=self.wanted, living_servers=serving))

    def restart_containers(self) -> None:
        """Pods that are to stay get a new process where theirs died."""
        for pod in {id(s.pod): s.pod for s in self.servers.values()}.values():
            if not pod.leave_by and not any(s.alive for s in self.servers.values() if s.pod is pod):
                self.start_server(pod)

    def reconnect(self) -> None:
        for server in list(self.servers.values()):
            self.connect_server(server)
        for worker in list(self.workers.values()):
            self.connect_worker(worker)

    def must_go_on(self) -> None:
        """Undisturbed, the job trains with the servers that are wanted."""
        self.operator_up = True
        reached = None
        for _ in range(60):
            self.restart_containers()
            self.reconnect()
            self.operator()
            self.elapse(1.0)
            self.step()
            self.copied()
            current = self.m.current
            settled = current is not None and len(current.servers) == self.wanted and not current.closing
            if not settled:
                reached = None
            elif reached is None:
                reached = self.commits
            elif self.commits >= reached + 3:
                return
        raise BrokenPromise(f"it does not go on: {self.m.blocked}, {self.m.current}")
