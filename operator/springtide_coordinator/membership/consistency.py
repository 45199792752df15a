"""The consistency of the next generation, and when a change of it is reason enough for one. PURE.

All members of a generation have one consistency, which Start names: so an edit of the manifest takes effect
at a step boundary, for all at once, whatever the pods' environments say. A new coordinator learns from the
members what they train in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Consistency
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName

SYNCHRONOUS: Final = "Synchronous"
BOUNDED: Final = "BoundedStaleness"
CAUSE: Final = "consistency"
MODES: Final = (SYNCHRONOUS, BOUNDED, "Asynchronous")


def next_consistency(m: Membership, members: Iterable[Record], at_epoch_end: bool) -> Consistency | None:
    """Return the consistency that the next generation trains in.

    The wanted one counts where these members can go over to it, the present one otherwise. The operator's
    wish counts more than reports of members, and those more than this process's environment, which may be
    older than either.

    Args:
        m: the state machine.
        members: of the next generation.
        at_epoch_end: whether the state that they begin from is one of common steps.

    Returns:
        None: the job has no servers, or nobody has named a consistency yet.
    """
    in_force, wanted = _in_force(m), _wanted(m)
    if in_force is None or wanted is None or _same_kind(in_force, wanted):
        return wanted
    follows = at_epoch_end if wanted.mode == SYNCHRONOUS else not _bound(members)
    return wanted if follows else in_force


def is_epoch_end(m: Membership, members: Iterable[Record], chosen: StateName | None) -> bool:
    """Return whether common steps can begin from a state: exactly the batches before it are in every chunk,
    and all that hold it are at the same place.

    In Synchronous servers count steps, and batches otherwise: each state of the former is one of the latter,
    but the other way round only where workers meet, at an epoch's end. A member that has stopped there
    reports it; that holds until batches are given out again. A fresh start begins from a state of either
    kind.

    Args:
        m: facts of the membership.
        members: records of those that take part.
        chosen: the state; None: a fresh start.
    """
    if chosen is None:
        return True
    current = m.current
    return any(
        record.at_epoch_end
        and record.state == chosen
        and (current is None or not keeps_applied_batches(m) or record.generation == current.name)
        for record in members
    )


def owners(
    participants: Sequence[Record], chosen: StateName | None, following: Consistency | None
) -> list[str]:
    """Return the ids of the holders whose own values become the others'.

    Without common steps some things are each worker's own (a GradScaler's scale): where such steps begin, one
    member's become all members'.

    Args:
        participants: records of the next generation's members.
        chosen: the state that it begins from; None: a fresh start.
        following: its consistency; None: it has no servers.
    """
    holders = sorted((r for r in participants if r.state == chosen), key=lambda r: r.info.rank_key)
    if following is not None and following.mode == SYNCHRONOUS:
        holders = [record for record in holders if not record.keeps_applied_batches] or holders[:1]
    return [record.info.id for record in holders]


def why_refused(m: Membership) -> str:
    """Why the wanted consistency does not follow; "": it is in force, or it comes."""
    in_force, wanted = _in_force(m), _wanted(m)
    if in_force is None or wanted is None or m.current is None or wanted.mode == SYNCHRONOUS:
        return ""
    return "" if _same_kind(in_force, wanted) else _bound(_members(m, m.current))


def why_epoch_end(m: Membership) -> str:
    """Why the members shall stop where they meet; "": they need not."""
    in_force, wanted = _in_force(m), _wanted(m)
    if in_force is None or wanted is None or in_force.mode == SYNCHRONOUS or wanted.mode != SYNCHRONOUS:
        return ""
    return f"consistency {in_force} becomes {wanted} at the end of the epoch"


def why_other_consistency(m: Membership, generation: Generation) -> tuple[str, str] | None:
    """Return why a boundary is to be asked for because the consistency is to change.

    Args:
        m: facts of the membership.
        generation: the current one.

    Returns:
        (cause, reason); None while it is right.
    """
    following = next_consistency(m, _members(m, generation), at_epoch_end=False)
    if generation.consistency is None or following == generation.consistency:
        return None
    return CAUSE, describe_change(generation.consistency, following)


def describe_change(old: Consistency | None, new: Consistency | None) -> str:
    """Describe a change of consistency in one sentence for people.

    Args:
        old: until then.
        new: from then on.
    """
    return f"consistency {old} becomes {new}"


def keeps_applied_batches(m: Membership) -> bool:
    """Whether the servers know what the members of the last generation have trained, whoever is lost."""
    in_force = _in_force(m)
    return in_force is not None and in_force.mode != SYNCHRONOUS


def _in_force(m: Membership) -> Consistency | None:
    return m.current.consistency if m.current is not None else None


def _wanted(m: Membership) -> Consistency | None:
    return m.consistency_wanted or _in_force(m) or m.consistency_at_first


def _same_kind(old: Consistency, new: Consistency) -> bool:
    return (old.mode == SYNCHRONOUS) is (new.mode == SYNCHRONOUS)


def _bound(members: Iterable[Record]) -> str:
    """Return the member whose script cannot train without common steps, and why; "" without one."""
    bound = next((record for record in members if record.bound_to_steps), None)
    return "" if bound is None else f"{bound.info.label}: {bound.bound_to_steps}"


def _members(m: Membership, generation: Generation) -> list[Record]:
    return [m.members[member] for member in generation.order if member in m.members]
