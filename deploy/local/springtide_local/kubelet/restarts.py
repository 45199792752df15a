"""How long a container waits before it is started again: at once the first time, then 10 s doubling to 300
s (kubelet's CrashLoopBackOff).
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY = 10.0
LONGEST_DELAY = 300.0


@dataclass(frozen=True)
class Backoff:
    """`delay` seconds after an event, last raised at `updated`. Forgotten when nothing happened for twice
    the longest delay.
    """

    delay: float = 0.0
    updated: float = 0.0

    def ready_at(self, event: float) -> float:
        """The earliest moment for the next try, when the last one ended at `event`."""
        if self.delay == 0.0 or self._expired(event):
            return event
        return event + self.delay

    def next(self, event: float, now: float) -> Backoff:
        """Return the backoff after a try at `now` that follows one which ended at `event`.

        Args:
            event: when the last try ended, in seconds.
            now: seconds on the same clock.
        """
        if self.delay == 0.0 or self._expired(event):
            return Backoff(FIRST_DELAY, now)
        return Backoff(min(2 * self.delay, LONGEST_DELAY), now)

    def _expired(self, event: float) -> bool:
        return event - self.updated > 2 * LONGEST_DELAY


def describe(seconds: float) -> str:
    """Write a duration as Go prints it in the kubelet's messages: `10s`, `1m20s`, `5m0s`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def should_restart(policy: str, exit_code: int) -> bool:
    """Return whether the pod's restartPolicy (Always, OnFailure or Never) restarts a container.

    Args:
        policy: the pod's.
        exit_code: of the container's process.
    """
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)
