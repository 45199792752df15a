"""Incidents: workers that end together for one cause are one restart decision.

An incident begins with the first of them and takes in, for ten seconds, every other slot that ends for the
same cause. A slot that ends again begins the next one: a crash loop counts each time, two hundred workers
that lose their data at once count once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from springtide_operator.plan.clock import parse_time, timestamp

TOGETHER_SECONDS = 10.0
KEPT = 8


@dataclass(frozen=True)
class Incident:
    """`time`: unix seconds of its beginning. `slots`: those that it has taken in."""

    cause: str
    time: float
    slots: frozenset[int]

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Incident:
        return cls(
            entry.get("cause", ""), parse_time(entry.get("time")) or 0.0, frozenset(entry.get("slots") or [])
        )

    def to_status(self) -> dict[str, Any]:
        return {"cause": self.cause, "time": timestamp(self.time), "slots": sorted(self.slots)}

    def is_open(self, now: float) -> bool:
        return 0.0 <= now - self.time < TOGETHER_SECONDS


def open_ones(incidents: dict[str, Incident], now: float) -> dict[str, Incident]:
    """Without those that take nobody in any more."""
    return {cause: incident for cause, incident in incidents.items() if incident.is_open(now)}


def take_in(
    incidents: dict[str, Incident], cause: str, slots: Iterable[int], now: float
) -> tuple[dict[str, Incident], bool]:
    """(incidents afterwards, whether these ends are a new decision)."""
    slots = frozenset(slots)
    incidents = open_ones(incidents, now)
    known = incidents.get(cause)
    if known is not None and not slots & known.slots:
        return {**incidents, cause: Incident(cause, known.time, known.slots | slots)}, False
    others = [item for item in incidents.items() if item[0] != cause][-(KEPT - 1) :]
    return {**dict(others), cause: Incident(cause, now, slots)}, True
