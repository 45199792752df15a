"""A job in miniature: coordinators, workers, pods, the operator, faults; and what must always hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator_decisions import handle
from coordinator_worker_model import (
    LOOP_STEPS,
    BrokenPromise,
    Chain,
    Pod,
    Rendezvous,
    Session,
    Storage,
    Worker,
    fresh_info,
)

from springtide_coordinator.membership import (
    Connected,
    Disconnected,
    Event,
    Membership,
    ProcessEnded,
    Received,
    Settings,
    StoodStill,
    Synced,
    Tick,
    describe,
)
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import EndStream, Made, PodSeen, Send
from springtide_coordinator.membership.generation import Generation
from springtide_protocol.heartbeat import LIMIT, of_members
from springtide_protocol.names import GenerationName, Incarnation, StateName

NONE = GenerationName(Incarnation(0), 0)
_HEARTBEAT = of_members(LIMIT)
KEEPALIVE = _HEARTBEAT.ping_every + _HEARTBEAT.answer_within  # s until a stopped process is cut


@dataclass
class Coordinator:
    membership: Membership
    alive: bool = True
    taken: int = 0  # events since its last decisions


class World:
    """All of it. Each method is one event; the caller chooses their order."""

    def __init__(
        self,
        *,
        target: int = 3,
        minimum: int = 1,
        maximum: int = 4,
        last_step: int = 10_000,
        storage: Storage | None = None,
        turn: int = 1,
        limits: Sequence[int] = (0,),
        standby: int = 0,
    ) -> None:
        """Make the job.

        Args:
            target: workers wanted.
            minimum: workers needed.
            maximum: workers at most.
            last_step: of the script.
            storage: for checkpoints; None: there is none.
            turn: events that a coordinator takes in before it decides; time passing ends a turn.
            limits: largest groups that pods have room for, in turn; 0: not told.
            standby: workers that wait beyond those wanted.
        """
        self.standby = standby
        self.storage = storage
        self.turn = turn
        self.limits = limits
        self.suspended = False
        self.now = 1000.0
        self.target, self.minimum, self.maximum = target, minimum, maximum
        self.last_step = last_step
        self.coordinators: list[Coordinator] = []
        self.workers: dict[str, Worker] = {}
        self.pods: dict[str, Pod] = {}
        self.generations: dict[GenerationName, Rendezvous] = {}
        self.contents: dict[StateName, Chain] = {}
        self.operator_up = True
        self.sessions = 0
        self.number = 1  # of the newest incarnation that the operator made
        self.finished = False
        self.new_coordinator(1, 0)
        for _ in range(target + standby):
            self.new_pod()

    # ---- coordinators

    def new_coordinator(self, number: int, restart: int) -> int:
        membership = Membership(
            Incarnation(number, restart),
            started_at=self.now,
            target=self.target,
            minimum=self.minimum,
            maximum=self.maximum,
            standby=self.standby,
            settings=Settings(),
        )
        self.coordinators.append(Coordinator(membership))
        return len(self.coordinators) - 1

    def newest(self) -> int:
        alive = [i for i, c in enumerate(self.coordinators) if c.alive]
        return max(alive, key=lambda i: self.coordinators[i].membership.incarnation)

    def kill_coordinator(self, which: int) -> None:
        self.coordinators[which].alive = False
        for worker in self.workers.values():
            if worker.session is not None and worker.session.coordinator == which:
                worker.session.coordinator_gone = True

    def restart_coordinator(self) -> None:
        """The container is killed and comes back in place."""
        which = self.newest()
        old = self.coordinators[which].membership.incarnation
        self.kill_coordinator(which)
        self.new_coordinator(old.number, old.restart + 1)

    def second_coordinator(self) -> None:
        """The operator makes a new pod although the old one lives on somewhere."""
        self.number += 1
        self.new_coordinator(self.number, 0)

    def feed(self, which: int, event: Event) -> None:
        coordinator = self.coordinators[which]
        if not coordinator.alive:
            return
        coordinator.taken += 1
        put_off = coordinator.taken < self.turn and not isinstance(event, Tick)
        coordinator.taken *= put_off
        before = coordinator.membership.current
        effects = handle(coordinator.membership, event, self.now, put_off)
        lived = [one for one in (before, coordinator.membership.current) if one is not None]
        for effect in effects:
            if isinstance(effect, EndStream) and (session := self._session(effect.session)) is not None:
                session.coordinator_gone = True  # it is cut off before others go on without it
        for effect in effects:
            if isinstance(effect, Made):
                self._check_start(coordinator.membership, effect)
        for effect in effects:
            session = self._session(effect.session) if isinstance(effect, Send) else None
            if isinstance(effect, Send) and session is not None:
                if isinstance(effect.message, say.EndOk):
                    self._check_end(effect.message)
                if isinstance(effect.message, say.Leave):
                    self._check_leave(coordinator.membership, self.workers[effect.member])
                if isinstance(effect.message, say.Welcome):
                    self._check_loop(lived, effect.message.running_loop)
                if isinstance(effect.message, say.RunningLoop):
                    self._check_loop(lived, effect.message.stage)
                session.down.append(effect.message)
        describe(coordinator.membership, self.now)

    def _session(self, number: int) -> Session | None:
        for worker in self.workers.values():
            if worker.session is not None and worker.session.number == number:
                return worker.session
        return None

    # ---- the network

    def connect(self, worker: Worker, which: int) -> None:
        if not worker.runs or worker.session is not None or not self.coordinators[which].alive:
            return
        self.sessions += 1
        worker.session = Session(self.sessions, which, since=self.now)
        worker.session.up.append(worker.hello())

    def deliver_up(self, worker: Worker) -> None:
        session = worker.session
        if session is None:
            return
        if session.coordinator_gone or not self.coordinators[session.coordinator].alive:
            session.up.clear()
            session.coordinator_gone = True
            if session.worker_gone:
                worker.session = None
            return
        if session.up:
            message = session.up.popleft()
            event: Event
            if isinstance(message, say.Hello):
                event = Connected(session.number, message)
            else:
                event = Received(session.number, message)
            self.feed(session.coordinator, event)
        elif session.worker_gone:
            worker.session = None
            self.feed(session.coordinator, Disconnected(session.number))

    def deliver_down(self, worker: Worker) -> None:
        session = worker.session
        if session is None or not worker.runs:
            return
        if session.down:
            message = session.down.popleft()
            if isinstance(message, say.Welcome):
                if worker.newest is not None and message.incarnation < worker.newest:
                    self.break_stream(worker)
                    return
                session.welcomed = True
            worker.receive(message, self.generations)
        elif session.coordinator_gone:
            worker.session = None

    def break_stream(self, worker: Worker) -> None:
        """Break a stream: both sides hear of it, and messages under way are lost."""
        session = worker.session
        if session is None:
            return
        worker.session = None
        self.feed(session.coordinator, Disconnected(session.number))

    def end_lifeline(self, worker: Worker) -> None:
        """End a lifeline: as a rule the process is dead, but the network may also have ended it wrongly."""
        which, number = self.newest(), 0
        if worker.session is not None:
            which, number = worker.session.coordinator, worker.session.number
        self.feed(which, ProcessEnded(number, worker.info.id))

    # ---- workers and pods

    def new_pod(self) -> None:
        uid = f"u{len(self.pods)}"
        self.pods[uid] = pod = Pod(uid, slot=len(self.pods))
        self.add_process(pod)

    def add_process(self, pod: Pod) -> None:
        worker = Worker(fresh_info(len(self.workers), pod), self.last_step, storage=self.storage)
        worker.largest_group = self.limits[pod.slot % len(self.limits)]
        self.workers[worker.info.id] = worker

    def new_process(self, pod: Pod) -> None:
        """The launcher starts another process in the place of a dead one."""
        if pod.living and not any(w.alive for w in self.workers.values() if w.info.pod_uid == pod.uid):
            self.add_process(pod)

    def act(self, worker: Worker, unlucky: bool = False) -> None:
        if not worker.runs:
            return
        worker.act(self.workers, self.generations, unlucky)
        self.finished = self.finished or worker.outcome == "Finished"
        if worker.state is not None and worker.chain:
            known = self.contents.setdefault(worker.state, worker.chain)
            if known != worker.chain:
                raise BrokenPromise(f"two different states are named {worker.state}")

    def drift(self, worker: Worker) -> None:
        """Memory flips a bit in one of several: it is found at the next step, where all are to stop."""
        others = [self.workers[info.id] for info in worker.members if info.id != worker.info.id]
        if worker.standing is say.Standing.ACTIVE and others and not any(one.drifted for one in others):
            worker.drifted = True

    def crash(self, worker: Worker) -> None:
        if worker.alive:
            worker.stopped_at = None
            worker.die("Failed")

    def stop(self, worker: Worker) -> None:
        if worker.runs:
            worker.stopped_at = self.now

    def wake(self, worker: Worker) -> None:
        worker.stopped_at = None

    def delete_pod(self, pod: Pod, grace: float) -> None:
        if pod.living and not pod.leave_by:
            pod.leave_by = self.now + grace

    def stand_still(self, seconds: float) -> None:
        """All coordinators do; the streams of all that live are broken when they go on."""
        self.now += seconds
        for which in range(len(self.coordinators)):
            self.feed(which, StoodStill(seconds))
        for worker in self.workers.values():
            self.break_stream(worker)

    def elapse(self, seconds: float) -> None:
        """Time passes: keepalive cuts stopped processes, the kubelet kills what is overdue, all tick."""
        self.now += seconds
        for worker in list(self.workers.values()):
            pod = self.pods[worker.info.pod_uid]
            if worker.alive and pod.leave_by and self.now >= pod.leave_by:
                self.crash(worker)
            session = worker.session
            if (session and worker.stopped_at is not None and self.now - worker.stopped_at >= KEEPALIVE) or (
                session and not session.welcomed and self.now - session.since > 5
            ):
                self.break_stream(worker)
        for which in range(len(self.coordinators)):
            self.feed(which, Tick())

    def operator(self) -> None:
        """One round of the operator: dead pods go, missing ones are made, the coordinators are told."""
        if not self.operator_up:
            return
        for pod in self.pods.values():
            pod.living = pod.living and any(
                w.alive for w in self.workers.values() if w.info.pod_uid == pod.uid
            )
        staying = [pod for pod in self.pods.values() if pod.living and not pod.leave_by]
        if not self.finished and not self.suspended:
            for _ in range(self.target + self.standby - len(staying)):
                self.new_pod()
        living = tuple(
            PodSeen(pod.uid, f"pod-{pod.uid}", pod.slot, True, pod.leave_by)
            for pod in self.pods.values()
            if pod.living
        )
        for which in range(len(self.coordinators)):
            target = 0 if self.suspended else self.target
            by = self.now + 60.0 if self.suspended else 0.0
            sizes = target, self.minimum, self.maximum
            word = Synced(
                *sizes,
                living,
                number=self.number,
                suspend=self.suspended,
                suspend_by=by,
                standby=self.standby,
            )
            self.feed(which, word)

    # ---- what must hold

    def _check_seats(self, m: Membership, staying: int, members: set[str]) -> None:
        """No more than are wanted take part, and no fewer while somebody is ready."""
        if not m.target:
            return
        if staying > m.target:
            raise BrokenPromise(f"{staying} members, and {m.target} are wanted")
        idle = [
            record.info.id
            for record in m.connected()
            if record.parked and not record.leaving and not record.voided and record.info.id not in members
        ]
        if staying < m.target and idle and self.limits == (0,):
            raise BrokenPromise(f"{staying} of {m.target} members, and {idle} wait")

    def _alive_states(self) -> list[StateName]:
        return [w.state for w in self.workers.values() if w.alive and w.state is not None]

    def _check_start(self, m: Membership, made: Made) -> None:
        start = made.start
        if start.generation in self.generations:
            raise BrokenPromise(f"generation {start.generation} was made twice")
        self.generations[start.generation] = Rendezvous(start)
        staying = [info for info in start.members if not m.members[info.id].leaving]
        if len(staying) > self.maximum:
            raise BrokenPromise(f"{len(start.members)} members, the maximum is {self.maximum}")
        if self.standby:
            self._check_seats(m, len(staying), {info.id for info in start.members})
        for info in start.members:
            worker = self.workers[info.id]
            if 0 < worker.largest_group < len(start.members):
                raise BrokenPromise(f"{info.id} has no room for {len(start.members)} members")
            if worker.alive and worker.standing is not say.Standing.PARKED:
                raise BrokenPromise(f"{info.id} is taken into {start.generation} and has not parked")
        alive = self._alive_states()
        if start.fresh:
            # The very first coordinator may not have heard of a second one that has trained already.
            if alive and max(alive).step > 0 and not (m.incarnation.is_first and not m.state_existed):
                raise BrokenPromise(f"{start.generation} starts anew, and {max(alive)} is alive")
            return
        # A member that was cut off may have committed one step more than those that stayed.
        if alive and start.state.step < max(alive).step - 1:
            raise BrokenPromise(f"{start.generation} begins from {start.state}, and {max(alive)} is alive")
        last = max(self.workers[info.id].generation or NONE for info in start.members)
        for worker in self.workers.values():
            session = worker.session
            if (worker.generation or NONE) < last:
                continue  # it was cut off one step ahead of those that went on
            if session is None or self.coordinators[session.coordinator].membership is not m:
                continue
            heard = worker.runs and session.welcomed and not session.coordinator_gone
            more = worker.state is not None and worker.state > start.state
            if heard and more and not m.members[worker.info.id].dismissed:
                raise BrokenPromise(f"{worker.info.id} is connected and holds more than {start.state}")

    def _check_end(self, message: say.EndOk) -> None:
        common = self.generations[message.generation]
        missing = {info.id for info in common.start.members} - common.ended
        if missing:
            raise BrokenPromise(f"EndOk of {message.generation}, and {missing} have not ended")

    def _check_loop(self, lived: list[Generation], told: int | None) -> None:
        """Nobody is told of a later loop than the generation can be in: there is no way back from it.

        Args:
            lived: the generation at the beginning of the event, and the one at its end.
            told: number of the loop; None: nothing was told.
        """
        begun = 0
        for generation in lived:
            common = self.generations[generation.name]
            begun = max([begun, common.start.state.step, *(step - 1 for step in common.contributions)])
        if told is not None and told > begun // LOOP_STEPS:
            raise BrokenPromise(f"{lived[-1].name} has come to step {begun}, and one is told of loop {told}")

    def _check_leave(self, m: Membership, worker: Worker) -> None:
        if worker.state is None or m.finished or worker.state != max(self._alive_states(), default=None):
            return
        if any(
            w.alive and (w.generation or NONE) > (worker.generation or NONE) for w in self.workers.values()
        ):
            return  # it was cut off one step ahead of those that went on
        if self.storage is not None and worker.state in self.storage.whole:
            return
        # One that has just died counts while its coordinator cannot know it.
        others = [
            w
            for w in self.workers.values()
            if w is not worker and (w.alive or w.session is not None) and not w.leaving
        ]
        record = m.members[worker.info.id]
        due = record.leave_deadline(m.settings.leave_margin, m.settings.assumed_grace_period)
        given_up = m.saving is not None and m.saving.given_up and m.saving.state == worker.state
        wanted = self.storage is not None or not self.suspended  # else nobody is to stay
        if self.now < due and wanted and not given_up and not any(w.state == worker.state for w in others):
            raise BrokenPromise(f"{worker.info.id} leaves and nobody else holds {worker.state}")

    # ---- the end: no more faults

    def heal(self) -> None:
        """Everything works again, nobody suspends the job, and only the newest coordinator is left."""
        self.operator_up, self.suspended = True, False
        newest = self.newest()
        for which in range(len(self.coordinators)):
            if which != newest:
                self.kill_coordinator(which)
        for worker in self.workers.values():
            self.wake(worker)

    def round(self) -> None:
        """Everybody does what is due; 0.1 s pass."""
        newest = self.newest()
        for worker in list(self.workers.values()):
            self.connect(worker, newest)
            while worker.session is not None and (worker.session.up or worker.session.worker_gone):
                self.deliver_up(worker)
            while (
                worker.session is not None
                and worker.runs
                and (worker.session.down or worker.session.coordinator_gone)
            ):
                self.deliver_down(worker)
            self.act(worker)
            worker.report()
        self.elapse(0.1)

    def top(self) -> int:
        return max((state.step for state in self._alive_states()), default=0)

    def must_go_on(self, steps: int = 5, seconds: float = 120.0) -> None:
        """Check that the job, without faults, commits `steps` more steps or finishes."""
        deadline = self.now + seconds
        goal: int | None = None
        rounds = 0
        while self.now < deadline and not self.finished:
            if rounds % 10 == 0:
                self.operator()
            self.round()
            rounds += 1
            if goal is None and rounds > 30:
                goal = self.top() + steps
            if goal is not None and self.top() >= goal:
                return
        if not self.finished:
            m = self.coordinators[self.newest()].membership
            raise BrokenPromise(f"no progress for {seconds:g} s: {describe(m, self.now)}")
