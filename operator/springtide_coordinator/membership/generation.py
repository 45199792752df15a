"""A generation, how the next one is composed from parked members, and a row of failed ones.

A failed reduction is a complaint, not a proof. When generation after generation ends with complaints although
every stream is alive (two members that cannot reach each other), the member most complained of is cut off; of
equals the youngest.

A parameter server that most members complain of is cut off when others have copies of all that it holds.
Without copies it is not, because that would go with it. A member that complains of a server is cut off when
at least as many others reach it: they say so when they park. Silence is no evidence, since a member that has
just joined, or whose generation ended by another's complaint, may not have found out yet.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Consistency, MemberInfo, ServerInfo, Start, Transfer
from springtide_protocol.names import GenerationName, StateName

_OF_NETWORK = re.compile(
    r"connect|closed by peer|reset|refused|unreach|no route|timed? ?-?out|socket|gloo|nccl|no sign of life|"
    r"REDUCTION_FAILED|FORMATION_FAILED",
    re.IGNORECASE,
)
"""Words about the network in what members say of a generation that failed; a bare reason says nothing of
another cause.
"""


@dataclass(slots=True)
class Generation:
    """The newest generation this coordinator knows: made by it, or adopted from reports."""

    name: GenerationName
    members: tuple[MemberInfo, ...]  # in rank order
    made_at: float
    base: StateName | None  # what every formed member holds at least; of an adopted one: as far as reported
    start: Start | None = None  # None: adopted
    formed: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)  # member id -> how that is known
    fenced: dict[str, str] = field(default_factory=dict)  # why they were cut off: lost until they park
    closing: str = ""  # why it is over; "" while it goes on
    closing_at: float = 0.0
    boundary: str = ""  # why its members shall stop at the same step
    boundary_cause: str = ""
    complained: bool = False  # it ended by a complaint
    began_anew: bool = False  # it began without the state that the job had, which is counted as lost
    ended_stage: int | None = None  # EndOk was said for this loop
    ended_state: StateName | None = None  # at which it ended, as far as known
    servers: tuple[ServerInfo, ...] = ()  # in slot order
    lost_servers: dict[str, str] = field(default_factory=dict)  # server id -> how that is known
    leaving_servers: tuple[ServerInfo, ...] = ()  # that it may ask for the state while it forms
    needed_servers: set[str] = field(default_factory=set)  # of those: still serve, until their part is copied
    copies: int = 1  # of its servers that hold each chunk, at least
    copies_before: int = 1  # the same, while it is not complete
    consistency: Consistency | None = None  # of an adopted one: as far as reported
    steps_in: str = ""  # which standbys it has in the places of whom, in words
    unsettled: bool = False  # members say that chunks are still being copied between servers
    order: tuple[str, ...] = field(init=False)  # ids of the members, in rank order
    ids: frozenset[str] = field(init=False)  # the same, to look one up

    def __post_init__(self) -> None:
        self.order = tuple(member.id for member in self.members)
        self.ids = frozenset(self.order)

    @property
    def adopted(self) -> bool:
        return self.start is None

    @property
    def complete(self) -> bool:
        """Whether all members have formed it and hold its state."""
        return self.adopted or len(self.formed) == len(self.members)

    @property
    def serving(self) -> tuple[ServerInfo, ...]:
        """The servers that it cannot do without."""
        return (*self.servers, *(info for info in self.leaving_servers if info.id in self.needed_servers))

    def close(self, reason: str, now: float) -> None:
        """Say that the generation is over; the first reason stays.

        Args:
            reason: in words.
            now: in unix seconds.
        """
        if not self.closing:
            self.closing, self.closing_at = reason, now


def compose(
    name: GenerationName,
    participants: Sequence[Record],
    chosen: StateName | None,
    reason: str,
    servers: tuple[ServerInfo, ...] = (),
    leaving_servers: tuple[ServerInfo, ...] = (),
    had_state: bool = False,
    consistency: Consistency | None = None,
    owners: Collection[str] | None = None,
) -> Start:
    """Make the Start of generation `name`: ranks, the state, and who sends it to whom.

    Args:
        name: of the generation.
        participants: parked members, in any order; not empty.
        chosen: the state all begin from, held by at least one participant; None starts anew from the initial
            state of the first member.
        reason: of the generation, in words.
        servers: its parameter servers, in order.
        leaving_servers: servers that it does not have and that may hold the state.
        had_state: with None: the job had state.
        consistency: in which the members train; None without parameters on servers.
        owners: holders of the state, from whom the other members get it; None: all holders.
    """
    members = tuple(sorted((record.info for record in participants), key=lambda info: info.rank_key))
    if chosen is None:
        source = members[0].id
        transfers = tuple(Transfer(info.id, source) for info in members[1:])
        return Start(
            name,
            members,
            StateName(name, 0),
            transfers,
            True,
            reason,
            servers,
            had_state=had_state,
            consistency=consistency,
        )
    held = {record.info.id: record.state for record in participants}
    given = {member for member, state in held.items() if state == chosen} if owners is None else set(owners)
    holders = [info.id for info in members if info.id in given]
    receivers = [info.id for info in members if info.id not in given]
    transfers = tuple(Transfer(receiver, holders[i % len(holders)]) for i, receiver in enumerate(receivers))
    return Start(
        name,
        members,
        chosen,
        transfers,
        False,
        reason,
        servers,
        leaving_servers,
        consistency=consistency,
    )


@dataclass(slots=True)
class ComplaintRow:
    """Generations in a row that ended with complaints and without a loss."""

    length: int = 0
    accused: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)  # accused -> last complaint about it
    of_servers: Counter[str] = field(default_factory=Counter)  # member -> complaints
    by: dict[str, Counter[str]] = field(default_factory=dict)  # server -> member -> complaints of it
    reached: dict[str, set[str]] = field(default_factory=dict)  # server -> members of the last generation
    said: dict[str, str] = field(default_factory=dict)  # label of a member -> its last complaint

    def reset(self) -> None:
        self.length = 0
        self.accused.clear()
        self.details.clear()
        self.of_servers.clear()
        self.by.clear()
        self.reached.clear()
        self.said.clear()

    def record(
        self, members: Sequence[Record], lived: float, healthy: float, servers: Collection[str] = ()
    ) -> None:
        """Count a generation that ended by complaints.

        Args:
            members: its members, with the reasons they parked for.
            lived: seconds from its start to its end.
            healthy: seconds above which a new row begins.
            servers: ids of its parameter servers.
        """
        if lived > healthy:
            self.reset()
        self.length += 1
        self.reached.clear()
        ids = {member.info.id for member in members}
        # One that complains of a server shuts its group: that others lose it then says nothing more.
        explained = {member.info.id for member in members if set(member.suspects) & set(servers)}
        for member in members:
            told = member.detail or member.park_reason.name
            for server in set(member.reached) & set(servers):
                self.reached.setdefault(server, set()).add(member.info.id)
            # Of servers also those may complain whose generation was over before they could say so.
            for server in set(member.suspects) & set(servers):
                self.by.setdefault(server, Counter())[member.info.id] += 1
                self.details[server] = f"{member.info.label}: {told}"
            if set(member.suspects) & set(servers):
                self.of_servers[member.info.id] += 1
                self.details.setdefault(member.info.id, f"it says: {told}")
            if not member.park_reason.is_complaint:
                continue
            self.said[member.info.label] = told
            for suspect in (set(member.suspects) & ids) - explained - {member.info.id}:
                self.accused[suspect] += 1
                self.details[suspect] = f"{member.info.label}: {told}"

    def unreached(self, members: Sequence[Record], servers: Sequence[ServerInfo]) -> list[ServerInfo]:
        """Return the servers that most members complain of, those with most complaints first.

        Args:
            members: records of the generation's members.
            servers: of the generation.
        """
        ids = {member.info.id for member in members}
        most = [info for info in servers if 2 * len(ids & self.by.get(info.id, Counter()).keys()) > len(ids)]
        return sorted(most, key=lambda info: -self.by[info.id].total())

    def worst(self, members: Sequence[Record]) -> tuple[Record, str] | None:
        """The member to cut off and why; None when most of them complain of parameter servers, or some do and
        no others reach these.

        One that is alone is cut off only while it has nothing to lose: it is what keeps itself from training.
        """
        if not members or 2 * len(self.of_servers) > len(members):
            return None
        said = "; ".join(f"{label} says: {text[:300]}" for label, text in list(self.said.items())[:3])
        if len(members) == 1:
            alone = members[0]
            if alone.state is not None:
                return None
            return alone, f"{alone.info.label} alone failed {self.length} times in a row to begin; {said}"
        if self.of_servers and not self.accused:
            self.accused.update({m: n for m, n in self.of_servers.items() if self._contradicted(m)})
            if not self.accused:
                return None
        worst = max(members, key=lambda member: (self.accused[member.info.id], member.order))
        count = self.accused[worst.info.id]
        detail = self.details.get(worst.info.id, f"no member was named, it is the youngest; {said}")
        return worst, (
            f"{self.length} generations in a row failed while all members were connected;"
            f" {worst.info.label} was complained of {count} times ({detail})."
            f" {_advice([detail, *self.said.values()])}"
        )

    def _contradicted(self, member: str) -> bool:
        """Return whether at least as many reach a server that this member complains of as complain of it."""
        return any(
            len(self.reached.get(server, set()) - complaining.keys()) >= len(complaining)
            for server, complaining in self.by.items()
            if member in complaining
        )


def _advice(said: Collection[str]) -> str:
    """Return what to look at, by what members say: only some of it comes from the network."""
    if any(_OF_NETWORK.search(text) for text in said):
        return "Check that pods can reach each other (network policy, interfaces, firewalls)."
    return "That is what to mend; the logs of these workers say more."
