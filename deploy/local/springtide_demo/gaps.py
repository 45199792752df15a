"""The cost of an event: the longest pause between commits that it explains."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from springtide_demo.commits import Commit
from springtide_protocol.names import GenerationName

# How long to look for pauses after an event that causes no generation, in seconds.
QUIET_WINDOW_SECONDS = 10.0


@dataclass(frozen=True)
class Gap:
    """The longest pause in seconds, its end (unix s), and the generation that the event caused, if any."""

    seconds: float
    generation: GenerationName | None
    until: float


def gap_after(curve: Sequence[Commit], at: float, horizon: float) -> Gap:
    """Return the longest time between two consecutive commits that an event explains.

    It is counted from the last commit before the event until the first commit of the generation that the
    event caused, or over the ten seconds after the event when it caused none. The caused generation is the
    first that is newer than that of the last commit before the event and commits before the horizon.

    Args:
        curve: the surviving commits in order of their steps, thus of their times.
        at: time of the event, in unix seconds.
        horizon: of the next event or of the end, in unix seconds.

    Raises:
        ValueError: there is no commit before the event, or none after it.
    """
    times = [commit.unix_time for commit in curve]
    after = bisect_left(times, at)
    if after == 0:
        raise ValueError("no commit before the event: its gap cannot be measured")
    if after == len(curve):
        raise ValueError("no commit after the event: training had ended, or never went on")
    before = curve[after - 1].generation
    newer = next((index for index in range(after, len(curve)) if curve[index].generation > before), None)
    if newer is not None and times[newer] < horizon:
        caused, end = curve[newer].generation, newer + 1
    else:
        # The pause that reaches over the window's end began inside it: it counts.
        caused, end = None, min(len(curve), bisect_left(times, at + QUIET_WINDOW_SECONDS) + 1)
    window = times[after - 1 : end]
    seconds, until = max((later - earlier, later) for earlier, later in pairwise(window))
    return Gap(seconds, caused, until)
