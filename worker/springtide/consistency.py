"""In which consistency a generation trains: the coordinator's word, which is one for all of its members.

The pod's environment says what the manifest said when the pod was made, so it counts for a coordinator that
names none.
"""

from __future__ import annotations

from springtide.environment import Settings
from springtide.errors import SpringtideError
from springtide_coordinator import coordinator_pb2 as pb


def staleness_bound(told: pb.Consistency, settings: Settings) -> int | None:
    """How many steps the fastest worker may be ahead of the slowest; None: any number.

    told: by Start. Raise SpringtideError when the members step together and this process was made not to, or
    the other way round: its exchange with the servers is of the other kind.
    """
    on_servers = settings.strategy == "ParameterServer"
    if told.mode and on_servers and (told.mode != "Synchronous") is not settings.asynchronous:
        raise SpringtideError(
            f"the job trains in consistency {told.mode}, and this pod was made for {settings.consistency}: a "
            "job goes neither to Synchronous nor from it; set spec.strategy.parameterServer.consistency back "
            "and delete the pod, or create a new job"
        )
    if not told.mode:
        return settings.staleness if settings.consistency == "BoundedStaleness" else None
    return max(1, told.staleness) if told.mode == "BoundedStaleness" else None
