"""Moments of a step at which to strike, spread over all of it. PURE.

The cost of an event depends on the point of the step that it comes at, and a few events at independent random
points often miss whole phases. So the events of one kind share the step out: each comes at a random point of
its own part (stratified sampling, which does not change the mean and never spreads the result more).
"""

from __future__ import annotations

import math
import random


def spread(count: int, chooser: random.Random) -> list[float]:
    """Return points of a step, in [0, 1): one in each of equally long parts, in random order.

    Args:
        count: of events.
        chooser: of the points and of the order.
    """
    points = [(part + chooser.random()) / count for part in range(count)]
    chooser.shuffle(points)
    return points


def pause(point: float, commit: float, step: float, now: float) -> float:
    """Return for how long to wait until a step is at a point, in seconds: of this step, or of a later one.

    Args:
        point: of a step, in [0, 1).
        commit: when the newest step ended, in unix seconds.
        step: how long steps take, in seconds.
        now: in unix seconds.
    """
    wanted = commit + point * step
    return wanted + step * max(0, math.ceil((now - wanted) / step)) - now
