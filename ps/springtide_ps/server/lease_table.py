"""Leases of batches and the staleness clock of one generation: they say which member has to wait. PURE.

A lease spares work, it does not keep anything right: a batch counts once in each chunk because the chunk says
so (`applied.AppliedBatches`). So leases are forgotten with their generation, and the next one begins from
what the chunks have. A member's clock is the number of its steps that all chunks have.

A member asks for its next batch while its last one is still on its way to the chunks (*sent*): what it gets
is one that it has not worked on, and for the bound the sent one counts as a step that it is ahead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from springtide_ps.params.applied import IntervalSet


class LeaseError(ValueError):
    """A request that does not belong to this generation's batches."""


@dataclass(frozen=True, slots=True)
class Granted:
    number: int


@dataclass(frozen=True, slots=True)
class Over:
    """All batches of the window are finished."""


@dataclass(frozen=True, slots=True)
class Wait:
    reason: str


Decision = Granted | Over | Wait


@dataclass
class Leases:
    """bound: how many steps the fastest member may be ahead of the slowest; None: any number.

    finished: batches that every chunk has. clocks: steps made by each member; one without an entry gets no
    lease.
    """

    bound: int | None
    finished: IntervalSet
    clocks: dict[str, int]
    leased: dict[int, str] = field(default_factory=dict)

    def done(self, member: str, number: int) -> None:
        """Note that every chunk has a batch.

        Args:
            member: the one that worked on it.
            number: of the batch.

        Raises:
            LeaseError: it is no member.
        """
        self._check(member)
        if self.leased.get(number) == member:
            del self.leased[number]
            self.clocks[member] += 1
        self.finished.add(number)

    def ask(self, member: str, first: int, stop: int, sent: Collection[int] = ()) -> Decision:
        """Decide which batch a member works on; one that it holds already it gets again.

        Args:
            member: the one that asks.
            first: number of the first batch of the window.
            stop: number of the batch after the last.
            sent: batches that it has worked on, and that some chunks may lack.

        Raises:
            LeaseError: it is no member.
        """
        self._check(member)
        own = [n for n, who in self.leased.items() if who == member]
        under_way = sum(n in sent for n in own)
        held = [n for n in own if first <= n < stop and n not in sent]
        if held:
            return Granted(min(held))
        missing = self.finished.missing(first, stop)
        free = next((number for number in missing if number not in self.leased), None)
        if free is None:
            if self.finished.count(first, stop) == stop - first:
                return Over()
            rest = sorted((n, who) for n, who in self.leased.items() if first <= n < stop)
            return Wait(
                "the last batches are worked on: " + ", ".join(f"{n} by {who}" for n, who in rest[:5])
            )
        steps = {**self.clocks, member: self.clocks[member] + under_way}
        slowest = min(steps, key=lambda other: (steps[other], other))
        ahead = steps[member] + 1 - steps[slowest]
        if self.bound is not None and ahead > self.bound:
            return Wait(f"another step would be {ahead} ahead of {slowest}, and {self.bound} are allowed")
        self.leased[free] = member
        return Granted(free)

    def _check(self, member: str) -> None:
        if member not in self.clocks:
            raise LeaseError(f"{member} is no member of this generation")


def starting_clocks(reported: Mapping[str, int | None]) -> dict[str, int]:
    """Clocks of a new generation. reported: what each member brings along, None for a joiner.

    Joiners start at the minimum: neither are they waited for, nor may they run ahead.
    """
    known = [clock for clock in reported.values() if clock is not None]
    least = min(known, default=0)
    return {member: least if clock is None else clock for member, clock in reported.items()}
