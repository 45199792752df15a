"""Time of a checkpoint: it is taken by all members after the same step, or by none.

Each member puts one number into the commit vote: a wish, or that it cannot. The sum decides, alike on all.
The last step of a loop is saved without a wish.
"""

from __future__ import annotations

WISH = 1.0
BUSY = -float(1 << 12)
"""Answer of a member that still writes the last one. More than all wishes together."""
UNABLE = -float(1 << 30)
"""Answer of a member that was told no place: no checkpoint can be whole. More than all that are busy."""
FIRST_RETRY_SECONDS = 15.0
INTERVAL = "interval"
"""Why one is taken that `take` decided on by its sum alone: nobody was busy."""


def contribution(able: bool, busy: bool, due: bool) -> float:
    """Return a member's number for the commit vote.

    Args:
        able: it knows where to save.
        busy: it still writes the last checkpoint.
        due: it wishes for one after this step.
    """
    if not able:
        return UNABLE
    return BUSY if busy else WISH * due


def take(total: float, ended: bool) -> bool:
    """Return whether all save the state after this step.

    Args:
        total: sum of the members' numbers in the commit vote.
        ended: it is the last step of its loop.
    """
    return total > 0 or (ended and total > UNABLE / 2)


def due(now: float, last: float, interval: float, failures: int) -> bool:
    """Return whether the first member wishes for a checkpoint.

    After a failure it comes sooner than the interval, and then less and less often.

    Args:
        now: monotonic time in seconds.
        last: when the last one was taken, or training began.
        interval: seconds between two, as the job asks for.
        failures: in a row since the last whole one.
    """
    wait = interval
    if failures:
        wait = min(interval, FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 20))
    return now - last >= wait
