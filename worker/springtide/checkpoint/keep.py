"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Mapping

from springtide_protocol.names import StateName


def expendable(found: Mapping[StateName, bool], own: StateName, keep: int) -> list[StateName]:
    """The names to delete, oldest first, by the process that has just committed `own`.

    found: name -> whether it has a manifest. Of those up to `own` the `keep` newest whole ones stay. Nothing
    above `own` is touched; and nothing at all while there is a name of a later incarnation: its coordinator's
    job is somebody else's.
    """
    if any(name.generation.incarnation > own.generation.incarnation for name in found):
        return []
    older = sorted(name for name in found if name < own)
    whole = [name for name in older if found[name]]
    stay = set(whole[max(0, len(whole) - max(0, keep - 1)) :]) if keep > 1 else set()
    return [name for name in older if name not in stay]
