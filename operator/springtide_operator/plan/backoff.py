"""Exponential backoff of one role's pods, that decays with healthy time and with healthy lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from springtide_operator.plan.clock import parse_time, timestamp

LIMIT_SECONDS = 300.0
DECAY_SECONDS = 300.0
QUICK_SECONDS = 10.0  # a pod that lives shorter than this feeds the backoff, whoever ended it
HEALTHY_SECONDS = 300.0  # a life this long is healthy, also where nobody says that the pod did its work
LOOP_COUNT = 3  # from so many on it is called a loop


def delay(count: int) -> float:
    """Seconds before the next pod: none after the first bad end, then 1, 2, 4, ... 300."""
    return 0.0 if count <= 1 else float(min(LIMIT_SECONDS, 2.0 ** min(count - 2, 20)))


def decayed(count: int, last: float, now: float) -> int:
    """One bad end is forgotten for every five minutes without one."""
    return max(0, count - int(max(0.0, now - last) // DECAY_SECONDS))


@dataclass(frozen=True)
class Backoff:
    """`count` recent bad ends, the newest at `last`; no new pod before `until` (unix seconds)."""

    count: int = 0
    last: float = 0.0
    until: float = 0.0

    def raised(self, now: float) -> Backoff:
        """After one more bad end."""
        count = decayed(self.count, self.last, now) + 1
        return Backoff(count, now, now + delay(count))

    def eased(self, now: float) -> Backoff:
        """After the end of a pod that had been healthy: one bad end less."""
        return replace(self, count=max(0, decayed(self.count, self.last, now) - 1))

    def healthy(self, lived: float, worked: bool, now: float) -> bool:
        """Whether a pod's end is no part of a loop: it did its work, for longer than the present delay.

        A loop of pods that work for T seconds thus settles at delays of about T, and does half of the work
        that it could; ends from outside, however many, hold up nobody.
        """
        if lived >= HEALTHY_SECONDS:
            return True
        return worked and lived >= max(QUICK_SECONDS, delay(decayed(self.count, self.last, now)))

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Backoff:
        last, until = parse_time(entry.get("lastTime")), parse_time(entry.get("until"))
        return cls(entry.get("count", 0), last or 0.0, until or 0.0)

    def to_status(self) -> dict[str, Any]:
        return {"count": self.count, "lastTime": timestamp(self.last), "until": timestamp(self.until)}
