"""In which consistency a generation trains: the coordinator's word, which is one for all of its members.

The pod's environment says what the manifest said when the pod was made, so it counts for a coordinator that
names none.
"""

from __future__ import annotations

from springtide.environment import Settings
from springtide_coordinator import coordinator_pb2 as pb


def staleness_bound(told: pb.Consistency, settings: Settings) -> int | None:
    """How many steps the fastest worker may be ahead of the slowest; None: any number.

    told: by Start.
    """
    if not told.mode:
        return settings.staleness if settings.consistency == "BoundedStaleness" else None
    return max(1, told.staleness) if told.mode == "BoundedStaleness" else None
