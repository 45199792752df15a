"""In which consistency the next generation trains, and when that is reason enough for one. PURE.

All members of a generation have one consistency, which Start names: so an edit of the manifest takes effect
at a step boundary, for all at once, whatever the pods' environments say. A new coordinator learns from the
members what they train in.
"""

from __future__ import annotations

from typing import Final

from .generation import Generation
from .messages import Consistency
from .state import Membership

SYNCHRONOUS: Final = "Synchronous"
BOUNDED: Final = "BoundedStaleness"
MODES: Final = (SYNCHRONOUS, BOUNDED, "Asynchronous")


def next_consistency(m: Membership) -> Consistency | None:
    """What is wanted, where the job can go over to it; else what it trains in. None: no servers, or not told.

    The operator's word counts more than what members report, and that more than this process's environment,
    which may be older than either.
    """
    in_force = m.current.consistency if m.current is not None else None
    wanted = m.consistency_wanted or in_force or m.consistency_at_first
    if in_force is None or wanted is None or can_switch(in_force, wanted):
        return wanted
    return in_force


def can_switch(old: Consistency, new: Consistency) -> bool:
    """Whether a job can go over: servers count steps in Synchronous, and ranges otherwise."""
    return (old.mode == SYNCHRONOUS) == (new.mode == SYNCHRONOUS)


def why_other_consistency(m: Membership, generation: Generation) -> tuple[str, str] | None:
    """(cause, reason) of a boundary that is asked for because the consistency is to change."""
    following = next_consistency(m)
    if generation.consistency is None or following == generation.consistency:
        return None
    return "consistency", f"consistency {generation.consistency} becomes {following}"
