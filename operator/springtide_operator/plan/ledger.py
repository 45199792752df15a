"""What must survive the operator: attempts, counts and incarnation, kept in status and raised there before
use.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any


def timestamp(unix: float) -> str:
    """RFC 3339 with whole seconds, as the Kubernetes API writes it."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str | None) -> float | None:
    """Unix seconds; None for nothing or nonsense."""
    if not text:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


@dataclass(frozen=True)
class Slot:
    """The newest pod of one slot."""

    attempt: int
    uid: str | None = None
    ended: str | None = None

    def to_status(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"attempt": self.attempt}
        if self.uid:
            entry["uid"] = self.uid
        if self.ended:
            entry["ended"] = self.ended
        return entry


@dataclass
class Ledger:
    """Changed in place by the policies of one round, in their order; written to status before any action."""

    slots: dict[int, Slot] = field(default_factory=dict)
    failures: int = 0
    preemptions: int = 0
    backoff_count: int = 0
    backoff_last: float = 0.0
    backoff_until: float = 0.0
    last_failure: dict[str, Any] | None = None
    incarnation: int = 0
    address: str = ""

    @classmethod
    def from_status(cls, status: dict[str, Any]) -> Ledger:
        restarts = status.get("restarts") or {}
        backoff = status.get("backoff") or {}
        coordinator = status.get("coordinator") or {}
        return cls(
            slots={
                int(number): Slot(entry.get("attempt", 0), entry.get("uid"), entry.get("ended"))
                for number, entry in (status.get("slots") or {}).items()
            },
            failures=restarts.get("failures", 0),
            preemptions=restarts.get("preemptions", 0),
            backoff_count=backoff.get("count", 0),
            backoff_last=parse_time(backoff.get("lastTime")) or 0.0,
            backoff_until=parse_time(backoff.get("until")) or 0.0,
            last_failure=status.get("lastFailure"),
            incarnation=coordinator.get("incarnation", 0),
            address=coordinator.get("address", ""),
        )

    def to_status(self) -> dict[str, Any]:
        """The keys of status that this ledger owns."""
        result: dict[str, Any] = {
            "slots": {str(number): self.slots[number].to_status() for number in sorted(self.slots)},
            "restarts": {
                "failures": self.failures,
                "preemptions": self.preemptions,
                "total": self.failures + self.preemptions,
            },
        }
        if self.backoff_count:
            result["backoff"] = {
                "count": self.backoff_count,
                "lastTime": timestamp(self.backoff_last),
                "until": timestamp(self.backoff_until),
            }
        if self.last_failure:
            result["lastFailure"] = self.last_failure
        return result

    def end(self, slot: int, kind: str) -> None:
        self.slots[slot] = replace(self.slots[slot], ended=kind)
