"""Which checkpoints may go."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from springtide_protocol.names import StateName


def expendable(found: Mapping[StateName, bool], own: StateName, keep: int) -> list[StateName]:
    """Return the checkpoints to delete, oldest first.

    Of those up to `own` the `keep` newest whole ones stay. Nothing above `own` is touched; and nothing at all
    while there is a name of a later incarnation: its coordinator's job is somebody else's.

    Args:
        found: the checkpoints that are there, and whether each has a manifest.
        own: the one that the calling process has just committed.
        keep: how many are to stay, `own` among them.
    """
    if any(name.generation.incarnation > own.generation.incarnation for name in found):
        return []
    older = sorted(name for name in found if name < own)
    whole = [name for name in older if found[name]]
    stay = set(whole[max(0, len(whole) - max(0, keep - 1)) :]) if keep > 1 else set()
    return [name for name in older if name not in stay]


def unreferenced(
    files: Collection[str], found: Collection[StateName], own: StateName, referenced: Collection[str]
) -> list[str]:
    """Return the files of what does not train that no checkpoint needs any more.

    None while there is a checkpoint above `own`, whole or begun: its files may not be in a manifest yet.

    Args:
        files: that are there; listed before the checkpoints were.
        found: names of all checkpoints.
        own: of the one that was just committed.
        referenced: files that a manifest refers to.
    """
    if any(name > own for name in found):
        return []
    return sorted(set(files) - set(referenced))
