"""Agree on the order in which buckets leave: the one in which backward fills them.

The layout goes by the order in which parameters were registered. A model that registers its head first fills
last what the layout sends first, and all else would wait for it. All members have to send in one order, so in
the first steps of each group the commit vote carries the order that its first member has seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide.comm.buckets import Buckets
from springtide.comm.process_group import Group

TRIES = 4
"""Steps of a group in which the first member may tell; a script that fills no bucket whole has no order."""


class BucketOrder:
    """Used by the script's thread."""

    def __init__(self, buckets: Buckets, travels: bool) -> None:
        """Make it for one model.

        Args:
            buckets: of the model.
            travels: whether the buckets are summed over the members, and not on servers.
        """
        self._buckets = buckets
        self._count = len(buckets.layout.members) if travels and buckets.may_reorder else 0
        self._group: Group | None = None
        self._tries = 0

    def begin(self, group: Group) -> None:
        """Begin a step; in a new group, whose members may have none in common, in the layout's order."""
        if group is not self._group:
            self._group, self._tries = group, TRIES if group.size > 1 and self._count > 1 else 0
            self._buckets.use_order(range(self._count or len(self._buckets.layout.members)))

    def vote(self, group: Group) -> list[float]:
        """Return what this member puts into the vote: equally many numbers on all, or none."""
        if not self._tries:
            return []
        filled = self._buckets.filled()
        if group.rank or len(filled) < self._count:
            return [0.0] * self._count
        return [float(bucket + 1) for bucket in filled]

    def take(self, total: Sequence[float]) -> None:
        """Take the sum of what all members have put in: the next step's order, if the first one had one."""
        if not total:
            return
        order = [int(number) - 1 for number in total]
        self._tries -= 1
        if sorted(order) == list(range(self._count)):
            self._tries = 0
            self._buckets.use_order(order)
