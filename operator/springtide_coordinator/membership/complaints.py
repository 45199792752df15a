"""A failed reduction is a complaint, not a proof.

When generation after generation ends with complaints although every stream is alive (two members that cannot
reach each other), the member most complained of is cut off; of equals the youngest.

A parameter server that most members complain of is cut off when others have copies of all that it holds.
Without copies it is not, because that would go with it. A member that complains of servers which most others
reach is cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import ServerInfo


@dataclass(slots=True)
class ComplaintRow:
    """Generations in a row that ended with complaints and without a loss."""

    length: int = 0
    accused: Counter[str] = field(default_factory=Counter)
    details: dict[str, str] = field(default_factory=dict)  # accused -> last complaint about it
    of_servers: Counter[str] = field(default_factory=Counter)  # member -> complaints
    by: dict[str, Counter[str]] = field(default_factory=dict)  # server -> member -> complaints of it
    said: dict[str, str] = field(default_factory=dict)  # label of a member -> its last complaint

    def reset(self) -> None:
        self.length = 0
        self.accused.clear()
        self.details.clear()
        self.of_servers.clear()
        self.by.clear()
        self.said.clear()

    def record(
        self, members: Sequence[Record], lived: float, healthy: float, servers: Collection[str] = ()
    ) -> None:
        """Count a generation that ended by complaints.

        Args:
            members: its members, with the reasons they parked for.
            lived: seconds from its start to its end; above `healthy` seconds a new row begins.
            servers: ids of its parameter servers.
        """
        if lived > healthy:
            self.reset()
        self.length += 1
        ids = {member.info.id for member in members}
        for member in members:
            if not member.park_reason.is_complaint:
                continue
            self.said[member.info.label] = member.detail or member.park_reason.name
            for suspect in set(member.suspects) & ids - {member.info.id}:
                self.accused[suspect] += 1
                self.details[suspect] = f"{member.info.label}: {member.detail or member.park_reason.name}"
            for server in set(member.suspects) & set(servers):
                self.by.setdefault(server, Counter())[member.info.id] += 1
                self.details[server] = f"{member.info.label}: {member.detail or member.park_reason.name}"
            if set(member.suspects) & set(servers):
                self.of_servers[member.info.id] += 1
                self.details.setdefault(
                    member.info.id, f"it says: {member.detail or member.park_reason.name}"
                )

    def unreached(self, members: Sequence[Record], servers: Sequence[ServerInfo]) -> list[ServerInfo]:
        """The servers that most members complain of, those with most complaints first."""
        ids = {member.info.id for member in members}
        most = [info for info in servers if 2 * len(ids & self.by.get(info.id, Counter()).keys()) > len(ids)]
        return sorted(most, key=lambda info: -self.by[info.id].total())

    def worst(self, members: Sequence[Record]) -> tuple[Record, str] | None:
        """The member to cut off and why; None when most of them complain of parameter servers.

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
            self.accused.update(self.of_servers)
        worst = max(members, key=lambda member: (self.accused[member.info.id], member.order))
        count = self.accused[worst.info.id]
        detail = self.details.get(worst.info.id, f"no member was named, it is the youngest; {said}")
        return worst, (
            f"{self.length} generations in a row failed while all members were connected;"
            f" {worst.info.label} was complained of {count} times ({detail})."
            " Check that pods can reach each other (network policy, interfaces, firewalls)."
        )
