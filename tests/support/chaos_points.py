"""The named points at which faults from a seed break a worker, by the kind of chaos and the seed's version.

A seed means what its version says, for ever: a new point gets a new version, and the lists of the old ones
stay as they are. Then kept seeds go on to draw the deeds that once found something. The rest of what a seed
draws (the kind of job with servers, whether it changes its consistency, and what is done to servers) has its
version, too.
"""

from __future__ import annotations

WORKERS_1 = (
    "backward",
    "body",
    "committed",
    "ended",
    "evaluation",
    "formed",
    "gradients",
    "prepared",
    "pushed",
    "reduced",
    "stepped",
    "stepping",
    "transfer",
)
CHECKPOINTS_1 = tuple(
    sorted((*WORKERS_1, "manifest", "pruned", "restore", "saved", "share", "shared", "staged"))
)
_ALSO_2 = ("asked", "receiving", "sending")
WORKERS_2 = tuple(sorted((*WORKERS_1, *_ALSO_2)))
CHECKPOINTS_2 = tuple(sorted((*CHECKPOINTS_1, *_ALSO_2)))
SERVERS_2 = tuple(sorted((*WORKERS_2, "leasing", "meeting")))
SERVERS_3 = tuple(sorted((*SERVERS_2, "pushing")))
SHARDS_5 = tuple(sorted((*CHECKPOINTS_2, "filling", "gathering")))
_ALSO_9 = ("feeding", "following")
WORKERS_9 = tuple(sorted((*WORKERS_2, *_ALSO_9)))
CHECKPOINTS_9 = tuple(sorted((*CHECKPOINTS_2, *_ALSO_9)))

VERSIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "workers": (WORKERS_1, *(WORKERS_2,) * 7, WORKERS_9),
    "checkpoints": (CHECKPOINTS_1, *(CHECKPOINTS_2,) * 7, CHECKPOINTS_9),
    "shards": (SHARDS_5,) * 9,
    "servers": (WORKERS_1, SERVERS_2, *(SERVERS_3,) * 7),
}
"""The sorted points of versions 1, 2, ... of each kind. A version may be a new one for some kinds only."""

NEWEST = 9

SELDOM = frozenset(
    [
        "asked",
        "feeding",
        "filling",
        "following",
        "leasing",
        "meeting",
        "receiving",
        "restore",
        "sending",
        "transfer",
    ]
)
"""Points that few steps have: from version 2 on, more of their faults are of any step."""


def points(kind: str, version: int) -> tuple[str, ...]:
    """Raise ValueError for a version that does not exist."""
    if not 1 <= version <= len(VERSIONS[kind]):
        raise ValueError(f"seeds of {kind} have versions 1 to {len(VERSIONS[kind])}, got {version}")
    return VERSIONS[kind][version - 1]


def chance_of_any_step(point: str, version: int) -> float:
    """Return the chance that a fault at the point is not bound to a certain step, but hits the next one."""
    return 0.6 if version >= 2 and point in SELDOM else 0.3
