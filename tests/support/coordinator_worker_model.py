"""A worker process as the protocol wants it, without tensors: what it holds is the chain of its commits.

It follows the rules of the worker library: a report is a promise, a step that is open is dropped by Prepare,
one that steps is finished, a reduction completes at a member only if every member contributed, and may
complete at some members only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from springtide_coordinator.membership import messages as say
from springtide_protocol.names import GenerationName, Incarnation, StateName

LOOP_STEPS = 3
"""Steps of each training loop, as those that come to the job are told of it; one loop ends the job."""

Chain = tuple[object, ...]  # (origin, name of step 1, name of step 2, ...)


class Phase(Enum):
    FORMING = 1
    IDLE = 2
    CONTRIBUTED = 3
    STEPPING = 4


class BrokenPromise(AssertionError):
    """An invariant of the whole system does not hold."""


@dataclass
class Pod:
    uid: str
    slot: int
    leave_by: float = 0.0
    living: bool = True


@dataclass
class Rendezvous:
    """The common actions of one generation's members."""

    start: say.Start
    joined: set[str] = field(default_factory=set)
    contributions: dict[int, dict[str, Chain]] = field(default_factory=dict)
    flags: dict[int, bool] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)


@dataclass
class Storage:
    """The place of checkpoints. shares: by state and attempt, the members that have written one; whole: with
    a manifest.
    """

    shares: dict[tuple[StateName, int], set[str]] = field(default_factory=dict)
    whole: set[StateName] = field(default_factory=set)


@dataclass
class Session:
    """Two ordered queues between a worker and a coordinator."""

    number: int
    coordinator: int
    up: deque[say.Hello | say.Incoming] = field(default_factory=deque)
    down: deque[say.Outgoing] = field(default_factory=deque)
    worker_gone: bool = False  # the coordinator hears of it when `up` is empty
    coordinator_gone: bool = False  # the worker hears of it when `down` is empty
    welcomed: bool = False
    since: float = 0.0


@dataclass
class Worker:
    info: say.MemberInfo
    last_step: int  # of the only loop
    alive: bool = True
    stopped_at: float | None = None
    standing: say.Standing = say.Standing.STARTING
    generation: GenerationName | None = None
    members: tuple[say.MemberInfo, ...] = ()
    state: StateName | None = None
    chain: Chain = ()
    newest: Incarnation | None = None
    phase: Phase = Phase.IDLE
    over: str = ""
    boundary_asked: bool = False
    boundary: bool = False
    leaving: bool = False
    ended_stages: int = 0
    session: Session | None = None
    promise: say.Parked | None = None
    depart: bool = False
    outcome: str = ""
    storage: Storage | None = None  # None: it saves nothing
    save: say.Save | None = None
    committed: StateName | None = None  # its last commit
    untold: bool = False  # of which its reporting thread has not told yet
    largest_group: int = 0  # processes of the largest group that it has room for; 0: it does not tell
    drifted: bool = False  # its state is not what its name says: it is to be sent it again

    @property
    def runs(self) -> bool:
        return self.alive and self.stopped_at is None

    def hello(self) -> say.Hello:
        return say.Hello(
            member=self.info,
            standing=self.standing,
            newest_incarnation=self.newest,
            generation=self.generation,
            members=self.members,
            state=self.state,
            layout_hash="" if self.standing is say.Standing.STARTING else "layout",
            leaving=self.leaving,
            ended_stage=self.ended_stages,
            checkpoints=self.storage is not None,
            largest_group=self.largest_group,
        )

    def send(self, message: say.Incoming) -> None:
        if self.session is not None:
            self.session.up.append(message)

    def park(self, reason: say.ParkReason, detail: str = "", suspects: tuple[str, ...] = ()) -> None:
        if self.drifted and reason is say.ParkReason.BOUNDARY:
            self.state, self.drifted = None, False  # the others hold it
        self.promise = say.Parked(
            reason,
            self.generation,
            self.state,
            "layout",
            detail,
            suspects,
            largest_group=self.largest_group,
        )
        self.standing = say.Standing.PARKED
        self.over, self.boundary, self.boundary_asked, self.save = "", False, False, None
        self.send(self.promise)

    # ---- the stream's thread

    def receive(self, message: say.Outgoing, generations: dict[GenerationName, Rendezvous]) -> None:
        match message:
            case say.Welcome():
                self.newest = message.incarnation
                self.untold = self.committed is not None
                if self.standing is say.Standing.PARKED and self.promise is not None:
                    self.send(self.promise)
                if self.standing is say.Standing.ENDED:
                    self._say_ended()
                if self.leaving:
                    self.send(say.Leaving("again"))
            case say.Prepare():
                if message.generation == self.generation and self.standing is not say.Standing.PARKED:
                    self.over = message.reason or "over"
            case say.Start():
                newer = self.generation is None or message.generation > self.generation
                inside = any(info.id == self.info.id for info in message.members)
                if self.standing is say.Standing.PARKED and newer and inside:
                    self.generation, self.members = message.generation, message.members
                    self.standing, self.phase = say.Standing.ACTIVE, Phase.FORMING
                    self.over, self.depart, self.promise = "", False, None
                    generations[message.generation].joined.add(self.info.id)
            case say.Boundary():
                if message.generation == self.generation and self.standing is say.Standing.ACTIVE:
                    self.boundary_asked = True
            case say.Save():
                if self.standing is say.Standing.PARKED and message.state == self.state:
                    self.save = message
            case say.Leave():
                self.depart = self.standing is say.Standing.PARKED
            case say.EndOk():
                if message.generation == self.generation and not self.over:
                    self.ended_stages = max(self.ended_stages, message.stage + 1)
            case say.Refused():
                if not message.retry:
                    self.die("Failed")

    def die(self, outcome: str) -> None:
        self.alive, self.outcome = False, outcome
        if self.session is not None:
            self.session.worker_gone = True

    def _say_ended(self) -> None:
        assert self.generation is not None
        assert self.state is not None
        self.send(say.Ended(self.generation, self.state, 0))

    def _write(self, save: say.Save, unlucky: bool) -> None:
        """The own share; the first writer adds the manifest when all shares are there."""
        assert self.storage is not None
        shares = self.storage.shares.setdefault((save.state, save.attempt), set())
        if unlucky and self.info.id not in shares:
            self.send(say.Checkpointed(save.state, "storage is full", 1.0, "leaving"))
            self.save = None
            return
        shares.add(self.info.id)
        if self.info.id != save.writers[0]:
            self.save = None
        elif shares >= set(save.writers):
            self.storage.whole.add(save.state)
            self.send(say.Checkpointed(save.state, "", 1.0, "leaving"))
            self.save = None

    # ---- the reporting thread

    def report(self) -> None:
        """Tell of the last commit, whatever the script's thread has said since."""
        if self.runs and self.untold and self.session is not None:
            assert self.committed is not None
            self.untold = False
            self.send(say.Progressed(self.committed, (self.committed.step - 1) // LOOP_STEPS))

    # ---- the script's thread: one small move

    def act(
        self, workers: dict[str, Worker], generations: dict[GenerationName, Rendezvous], unlucky: bool
    ) -> None:
        """`unlucky`: where a peer is broken, the reduction fails here although it could have completed."""
        match self.standing:
            case say.Standing.STARTING:
                self.park(say.ParkReason.STANDBY)
            case say.Standing.PARKED:
                if self.depart:
                    self.send(say.Bye("Left"))
                    self.die("Left")
                elif self.save is not None:
                    self._write(self.save, unlucky)
            case say.Standing.AFTER:
                self.send(say.Bye("Finished"))
                self.die("Finished")
            case say.Standing.ENDED:
                if self.ended_stages:
                    self.standing = say.Standing.AFTER
                elif self.over:
                    self.park(say.ParkReason.DROPPED)
            case say.Standing.ACTIVE:
                self._train(workers, generations, unlucky)

    def _train(
        self, workers: dict[str, Worker], generations: dict[GenerationName, Rendezvous], unlucky: bool
    ) -> None:
        assert self.generation is not None
        common = generations[self.generation]
        if self.phase is Phase.STEPPING:
            self._commit(common)
            return
        if self.over:
            self.park(say.ParkReason.DROPPED)
            return
        broken = self._broken(workers)
        if self.phase is Phase.FORMING:
            if broken:
                self.park(say.ParkReason.FORMATION_FAILED, "a peer is gone", tuple(broken))
            elif len(common.joined) == len(self.members):
                self._begin(common, workers)
            return
        if self.phase is Phase.IDLE:
            assert self.state is not None
            if self.state.step >= self.last_step:
                common.ended.add(self.info.id)
                self.standing = say.Standing.ENDED
                self._say_ended()
                return
            step = self.state.step + 1
            others = common.contributions.setdefault(step, {})
            if any(chain != self.chain for chain in others.values()):
                raise BrokenPromise(
                    f"{self.info.id} reduces step {step} of {self.generation} with another history"
                )
            others[self.info.id] = self.chain
            common.flags[step] = common.flags.get(step, False) or self.boundary_asked or self.drifted
            self.phase = Phase.CONTRIBUTED
            return
        step = self.state.step + 1 if self.state is not None else 1
        if len(common.contributions[step]) == len(self.members) and not (broken and unlucky):
            self.phase = Phase.STEPPING
        elif broken:
            self.park(say.ParkReason.REDUCTION_FAILED, "a peer is gone", tuple(broken))

    def _broken(self, workers: dict[str, Worker]) -> list[str]:
        """Members that have left this generation: their sockets are shut."""
        found = []
        for info in self.members:
            other = workers[info.id]
            left = other.generation == self.generation and other.standing is say.Standing.PARKED
            newer = (
                other.generation is not None
                and self.generation is not None
                and other.generation > self.generation
            )
            if not other.alive or left or newer:
                found.append(info.id)
        return found

    def _begin(self, common: Rendezvous, workers: dict[str, Worker]) -> None:
        start = common.start
        mine = [t.holder for t in start.transfers if t.receiver == self.info.id]
        if start.fresh and start.members[0].id == self.info.id:
            self.state, self.chain = start.state, (f"initial of {start.generation}",)
        elif mine:
            holder = workers[mine[0]]
            if holder.state != start.state:
                if start.fresh:
                    return  # the source has not begun yet
                raise BrokenPromise(f"{mine[0]} shall send {start.state} and holds {holder.state}")
            self.state, self.chain = start.state, holder.chain
        elif self.state != start.state:
            raise BrokenPromise(f"{self.info.id} shall begin from {start.state} and holds {self.state}")
        self.phase = Phase.IDLE
        self.drifted = self.drifted and not mine
        self.send(say.Formed(start.generation))

    def _commit(self, common: Rendezvous) -> None:
        assert self.state is not None
        assert self.generation is not None
        name = StateName(self.generation, self.state.step + 1)
        self.state, self.chain, self.phase = name, (*self.chain, name), Phase.IDLE
        if len(self.chain) - 1 != name.step:
            raise BrokenPromise(f"{self.info.id} counts {len(self.chain) - 1} steps at {name}")
        self.committed, self.untold = name, True
        if common.flags[name.step]:
            self.boundary = True
        if self.boundary:
            self.park(say.ParkReason.BOUNDARY)


def fresh_info(number: int, pod: Pod) -> say.MemberInfo:
    return replace(say.MemberInfo(f"p{number}"), pod_uid=pod.uid, pod_name=f"pod-{pod.uid}", slot=pod.slot)
