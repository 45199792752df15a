"""A generation, and how the next one is composed from parked members."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Consistency, MemberInfo, ServerInfo, Start, Transfer
from springtide_protocol.names import GenerationName, StateName


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
    fenced: set[str] = field(default_factory=set)  # cut off for not parking: stay lost until they park
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
    unsettled: bool = False  # members say that chunks are still being copied between servers

    @property
    def adopted(self) -> bool:
        return self.start is None

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def complete(self) -> bool:
        """Whether all members have formed it and hold its state."""
        return self.adopted or len(self.formed) == len(self.members)

    @property
    def serving(self) -> tuple[ServerInfo, ...]:
        """The servers that it cannot do without."""
        return (*self.servers, *(info for info in self.leaving_servers if info.id in self.needed_servers))

    def close(self, reason: str, now: float) -> None:
        """Say that it is over; the first reason stays."""
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
        participants: parked members, in any order; not empty.
        chosen: the state all begin from, held by at least one participant; None starts anew from the
            initial state of the first member.
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
    given = [member for member, state in held.items() if state == chosen] if owners is None else owners
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
