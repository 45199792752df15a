"""Two kinds of retries: pods that ended badly, and creations that the API server refused.

The backoff of a role's pods grows exponentially, and decays with healthy time and with healthy lives. Refused
creations (quota, PodSecurity, webhooks, throttling) are shown and retried ever more slowly; they never fail
the job.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from springtide_operator.plan.observation import Observation, Refusal, is_transient
from springtide_operator.plan.values import parse_time, timestamp

LIMIT_SECONDS = 300.0
DECAY_SECONDS = 300.0
QUICK_SECONDS = 10.0  # a pod that lives shorter than this feeds the backoff, whoever ended it
HEALTHY_SECONDS = 300.0  # a life this long is healthy, also where nobody says that the pod did its work
LOOP_COUNT = 3  # from so many on it is called a loop


def delay(count: int) -> float:
    """Seconds before the next pod: none after the first bad end, then 1, 2, 4, ... 300."""
    return 0.0 if count <= 1 else float(min(LIMIT_SECONDS, 2.0 ** min(count - 2, 20)))


def decayed(count: int, last: float, now: float) -> int:
    """Return the bad ends that still count: one is forgotten for every five minutes without one.

    Args:
        count: bad ends until then.
        last: time of the newest, in unix seconds.
        now: in unix seconds.
    """
    return max(0, count - int(max(0.0, now - last) // DECAY_SECONDS))


@dataclass(frozen=True)
class Backoff:
    """`count` recent bad ends, the newest at `last`; no new pod before `until` (unix seconds)."""

    count: int = 0
    last: float = 0.0
    until: float = 0.0

    def raised(self, now: float) -> Backoff:
        """Return the backoff after one more bad end, at unix time `now`."""
        count = decayed(self.count, self.last, now) + 1
        return Backoff(count, now, now + delay(count))

    def eased(self, now: float) -> Backoff:
        """Return the backoff after the end of a pod that had been healthy: one bad end less."""
        return replace(self, count=max(0, decayed(self.count, self.last, now) - 1))

    def healthy(self, lived: float, worked: bool, now: float) -> bool:
        """Return whether a pod's end is no part of a loop: it did its work, for longer than the present
        delay.

        A loop of pods that work for T seconds thus settles at delays of about T, and does half of the work
        that it could; ends from outside, however many, hold up nobody.

        Args:
            lived: seconds that the pod lived.
            worked: it did its work.
            now: in unix seconds.
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


NOT_PODS = ("secret", "service", "networkpolicy", "podgroup", "workload")
PODS = ("worker", "standby", "coordinator", "server")
RETRY_LIMIT_SECONDS = 60.0
TRANSIENT_LIMIT_SECONDS = 5.0


def refuse(
    previous: Refusal | None,
    code: int,
    message: str,
    now: float,
    terminating: bool = False,
    generation: int = 0,
) -> Refusal:
    """Return the refusal after one more no.

    It waits 1, 2, 4, ... 60 s (at most 5 s when the server did not get to an answer; for ever when the
    namespace is being deleted, which is never taken back).

    Args:
        previous: the last no of the same role; None: this is the first.
        code: of HTTP; 0 without an answer.
        message: of the API server.
        now: in unix seconds.
        terminating: the namespace is being deleted.
        generation: of the job's spec that was refused.
    """
    if terminating:
        return Refusal(code, message, math.inf, now, terminating=True, generation=generation)
    since = previous.since if previous is not None else now
    waited = max(0.0, now - since)
    limit = TRANSIENT_LIMIT_SECONDS if is_transient(code) else RETRY_LIMIT_SECONDS
    return Refusal(code, message, now + min(limit, max(1.0, waited)), since, generation=generation)


def room_was_made(refusals: Mapping[str, Refusal], now: float) -> dict[str, Refusal]:
    """Return refusals of pods with an earlier retry, since a pod was deleted and a quota may have room soon.

    Args:
        refusals: by role.
        now: unix seconds.
    """
    return {
        role: replace(refusal, retry_at=min(refusal.retry_at, now + 1.0))
        if role in PODS and not refusal.terminating
        else refusal
        for role, refusal in refusals.items()
    }


def answers_to(refusals: Mapping[str, Refusal], generation: int) -> dict[str, Refusal]:
    """Return the refusals that hold for the job as it is: a spec that was invalid before an edit may be right
    now, and is asked for at once.

    Args:
        refusals: by role.
        generation: of the object now.
    """
    return {
        role: refusal
        for role, refusal in refusals.items()
        if not refusal.invalid or refusal.generation in (0, generation)
    }


def held_back(observation: Observation, role: str, now: float) -> bool:
    """Return whether the next try of a role's creation has to wait.

    Args:
        observation: with the refusals.
        role: under which refusals are filed.
        now: in unix seconds.
    """
    if namespace_goes(observation) or (observation.pods_wait and role not in NOT_PODS):
        return True
    refusal = observation.refusals.get(role)
    return refusal is not None and now < refusal.retry_at


def namespace_goes(observation: Observation) -> bool:
    """The API server has said that the namespace is being deleted."""
    return any(refusal.terminating for refusal in observation.refusals.values())
