"""Moments from which a job's workers have limited time, as this process has seen them.

Status says when a job was halted or ended, in wall-clock time. A clock that jumps by minutes would use up
that time at once, and end workers that save. So the time is counted by the steady clock, from when the
operator first saw the fact. One that took over counts anew: workers get more time, never less.
"""

from __future__ import annotations

from dataclasses import replace

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import conditions
from springtide_operator.plan.observation import Observation


class FirstSeen:
    """Facts about one job, each with the time at which it was first seen; forgotten once it is so no more."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, float]] = {}

    def since(self, fact: str, value: object, now: float) -> float | None:
        """Return since when a fact has had its value.

        Args:
            fact: its name.
            value: the present one; None: it is not so.
            now: by the clock that all times are told by.

        Returns:
            None where it is not so.
        """
        if value is None:
            self._seen.pop(fact, None)
            return None
        if fact not in self._seen or self._seen[fact][0] != value:
            self._seen[fact] = value, now
        return self._seen[fact][1]


def with_first_seen(job: Job, observation: Observation, seen: FirstSeen) -> Observation:
    """Return the observation with the times, by its steady clock, from which it is counted how long workers
    may still save.

    Args:
        job: with its status.
        observation: of the job, with a steady clock.
        seen: of this process and this job; is changed in place.
    """
    now = observation.steady
    if now is None:
        return observation
    suspended = conditions.find(job.status, reasons.SUSPENDED) or {}
    halted = suspended.get("lastTransitionTime") if suspended.get("status") == "True" else None
    left = halted if not observation.live_pods else None
    return replace(
        observation,
        halted_since=seen.since("halted", halted, now),
        left_since=seen.since("left", left, now),
        ended_since=seen.since("ended", job.status.get("completionTime"), now),
    )
