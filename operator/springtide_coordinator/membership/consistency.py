"""In which consistency the next generation trains, and when that is reason enough for one. PURE.

All members of a generation have one consistency, which Start names: so an edit of the manifest takes effect
at a step boundary, for all at once, whatever the pods' environments say. A new coordinator learns from the
members what they train in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from .generation import Generation
from .members import Record
from .messages import Consistency
from .state import Membership

SYNCHRONOUS: Final = "Synchronous"
BOUNDED: Final = "BoundedStaleness"
MODES: Final = (SYNCHRONOUS, BOUNDED, "Asynchronous")


def next_consistency(m: Membership, members: Iterable[Record]) -> Consistency | None:
    """What is wanted, where these members can go over to it; else what the job trains in.

    None: no servers, or not told. The operator's word counts more than what members report, and that more
    than this process's environment, which may be older than either.
    """
    in_force, wanted = _in_force(m), _wanted(m)
    if in_force is None or wanted is None or why_not(in_force, wanted, members) == "":
        return wanted
    return in_force


def why_not(old: Consistency, new: Consistency, members: Iterable[Record]) -> str:
    """What keeps a job from going over at a step boundary; "": nothing does.

    In Synchronous servers count steps, and ranges otherwise: any state of the former is one of the latter,
    but not the other way round.
    """
    if (old.mode == SYNCHRONOUS) == (new.mode == SYNCHRONOUS):
        return ""
    if new.mode == SYNCHRONOUS:
        return f"a job cannot go over from {old.mode} to {SYNCHRONOUS}: create a new job"
    bound = next((record for record in members if record.bound_to_steps), None)
    return "" if bound is None else f"{bound.info.label}: {bound.bound_to_steps}"


def why_refused(m: Membership) -> str:
    """Why the wanted consistency does not follow; "": it is in force, or it comes."""
    in_force, wanted = _in_force(m), _wanted(m)
    if in_force is None or wanted is None or m.current is None:
        return ""
    return why_not(in_force, wanted, _members(m, m.current))


def why_other_consistency(m: Membership, generation: Generation) -> tuple[str, str] | None:
    """(cause, reason) of a boundary that is asked for because the consistency is to change."""
    following = next_consistency(m, _members(m, generation))
    if generation.consistency is None or following == generation.consistency:
        return None
    return "consistency", f"consistency {generation.consistency} becomes {following}"


def keeps_books(m: Membership) -> bool:
    """Whether the servers know what the members of the last generation have trained, whoever is lost."""
    in_force = _in_force(m)
    return in_force is not None and in_force.mode != SYNCHRONOUS


def _in_force(m: Membership) -> Consistency | None:
    return m.current.consistency if m.current is not None else None


def _wanted(m: Membership) -> Consistency | None:
    return m.consistency_wanted or _in_force(m) or m.consistency_at_first


def _members(m: Membership, generation: Generation) -> list[Record]:
    return [m.members[member] for member in generation.ids if member in m.members]
