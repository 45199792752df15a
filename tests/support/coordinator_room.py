"""The state machine with a few words to tell a story: who says what, what is answered, how time passes."""

from __future__ import annotations

from typing import TypeVar

from coordinator_decisions import handle

from springtide_coordinator.membership import (
    Connected,
    Disconnected,
    Event,
    Membership,
    Phase,
    Received,
    ServerConnected,
    Status,
    StoodStill,
    Synced,
    Tick,
    describe,
)
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import Effect, EndStream, PodSeen, Send
from springtide_protocol.names import GenerationName, Incarnation, StateName

Message = TypeVar("Message", bound=say.Outgoing)


def generation(number: int, incarnation: int = 1, restart: int = 0) -> GenerationName:
    return GenerationName(Incarnation(incarnation, restart), number)


def state(step: int, number: int = 1, incarnation: int = 1, restart: int = 0) -> StateName:
    return StateName(generation(number, incarnation, restart), step)


def info(member: str) -> say.MemberInfo:
    """Member `w3` is the only process of pod `pod-w3` with uid `w3` in slot 3."""
    digits = "".join(c for c in member if c.isdigit())
    return say.MemberInfo(member, pod_uid=member, pod_name=f"pod-{member}", slot=int(digits or 0))


def server(name: str, attempt: int = 0, pod: str = "") -> say.ServerInfo:
    """Server `s1` is the only process of pod `pod-s1` with uid `s1` in slot 1."""
    digits = "".join(c for c in name if c.isdigit())
    uid = pod or name
    return say.ServerInfo(
        name, uid, f"pod-{uid}", int(digits[:1] or 0), f"127.0.0.1:{7080 + attempt}", attempt
    )


class Room:
    """One coordinator, its members and its parameter servers."""

    def __init__(
        self,
        *,
        target: int = 2,
        minimum: int = 1,
        maximum: int = 8,
        incarnation: tuple[int, int] = (1, 0),
        servers: int = 0,
        standby: int = 0,
        processes_per_pod: int = 1,
    ) -> None:
        self.now = 1000.0
        self.m = Membership(
            Incarnation(*incarnation),
            started_at=self.now,
            target=target,
            minimum=minimum,
            maximum=maximum,
            servers_wanted=servers,
            standby=standby,
            processes_per_pod=processes_per_pod,
        )
        self.sessions: dict[str, int] = {}
        self.said: dict[str, list[say.Outgoing]] = {}
        self.disconnected: list[str] = []
        self.leaving: dict[str, float] = {}
        self.decides = True  # else decisions wait, as they do for the others of one turn of the loop
        self._last = 0

    def feed(self, event: Event) -> list[Effect]:
        effects = handle(self.m, event, self.now, put_off=not self.decides)
        for effect in effects:
            if isinstance(effect, Send):
                self.said.setdefault(effect.member, []).append(effect.message)
            elif isinstance(effect, EndStream):
                self.disconnected.append(effect.member)
        return effects

    # ---- what parameter servers do

    def serve(self, *names: str, attempt: int = 0, pod: str = "", **fields: object) -> None:
        """Connect servers, or open new streams for them."""
        for name in names:
            self._last += 1
            self.sessions[name] = self._last
            hello = say.ServerHello(server(name, attempt, pod), **fields)  # type: ignore[arg-type]
            self.feed(ServerConnected(self._last, hello))

    # ---- what members do

    def hello(
        self,
        member: str,
        standing: say.Standing = say.Standing.STARTING,
        *,
        as_info: say.MemberInfo | None = None,
        **fields: object,
    ) -> None:
        self._last += 1
        self.sessions[member] = self._last
        hello = say.Hello(as_info or info(member), standing, **fields)  # type: ignore[arg-type]
        self.feed(Connected(self._last, hello))

    def tell(self, member: str, message: say.Incoming) -> None:
        self.feed(Received(self.sessions[member], message))

    def park(
        self,
        member: str,
        reason: say.ParkReason = say.ParkReason.STANDBY,
        at: StateName | None = None,
        suspects: tuple[str, ...] = (),
        layout: str = "layout",
        reached: tuple[str, ...] = (),
        hands_over: bool = False,
    ) -> None:
        name = self.m.members[member].generation
        parked = say.Parked(
            reason, name, at, layout, "it failed", suspects, reached=reached, hands_over=hands_over
        )
        self.tell(member, parked)

    def lose(self, member: str) -> None:
        self.feed(Disconnected(self.sessions[member]))

    def train(self, *members: str) -> StateName:
        """The members start, and form their first generation; returns its state."""
        for member in members:
            self.hello(member)
        for member in members:
            self.park(member)
        return self.form()

    def form(self) -> StateName:
        current = self.m.current
        assert current is not None
        assert current.start is not None
        for member in current.order:
            self.tell(member, say.Formed(current.name))
        return current.start.state

    # ---- what else happens

    def stand_still(self, seconds: float) -> None:
        """The coordinator does nothing for so long, and goes on."""
        self.now += seconds
        self.feed(StoodStill(seconds))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def sync(
        self,
        *living: str,
        unstarted: tuple[str, ...] = (),
        unheard: tuple[str, ...] = (),
        target: int | None = None,
        number: int = 0,
        trained: bool = False,
        serving: tuple[str, ...] = (),
        servers: int | None = None,
        consistency: say.Consistency | None = None,
    ) -> None:
        pods = [
            PodSeen(uid, f"pod-{uid}", leave_by=self.leaving.get(uid, 0.0), unheard=uid in unheard)
            for uid in living
        ]
        pods += [PodSeen(uid, f"pod-{uid}", started=False) for uid in unstarted]
        wanted = self.m.target if target is None else target
        sizes = wanted, self.m.minimum, self.m.maximum
        word = Synced(
            *sizes,
            tuple(pods),
            number=number,
            trained=trained,
            servers=self.m.servers_wanted if servers is None else servers,
            living_servers=tuple(
                PodSeen(
                    uid,
                    f"pod-{uid}",
                    server(uid).slot,
                    leave_by=self.leaving.get(uid, 0.0),
                    unheard=uid in unheard,
                )
                for uid in serving
            ),
            consistency=consistency or self.m.consistency_wanted,
            standby=self.m.standby,
            processes_per_pod=self.m.processes_per_pod,
        )
        self.feed(word)

    # ---- what came of it

    def last(self, member: str, kind: type[Message]) -> Message:
        """The last message of that kind said to the member."""
        found = [message for message in self.said.get(member, []) if isinstance(message, kind)]
        assert found, f"{member} was told no {kind.__name__} but {self.said.get(member, [])}"
        return found[-1]

    def told(self, member: str, kind: type[say.Outgoing]) -> int:
        """How often."""
        return sum(isinstance(message, kind) for message in self.said.get(member, []))

    @property
    def members(self) -> tuple[str, ...]:
        """Return the members of the current generation, in rank order."""
        return self.m.current.order if self.m.current is not None else ()

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the servers of the current generation, in slot order."""
        return tuple(info.id for info in self.m.current.servers) if self.m.current is not None else ()

    @property
    def number(self) -> int:
        return self.m.current.name.number if self.m.current is not None else 0

    @property
    def status(self) -> Status:
        return describe(self.m, self.now)[1]

    @property
    def phase(self) -> Phase:
        return describe(self.m, self.now)[0]
