"""Pods whose processes train one model together: they take part in a generation as a whole, or not at all.

Such a process says how many of its pod train as one (`together`). Each holds another part of the state, so a
state is there when, for each local rank, some process holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName


def whole(pool: Iterable[Record]) -> list[Record]:
    """Return the processes of a pool without those whose pod is there in part only, in the pool's order.

    Args:
        pool: records; those that train by themselves stay.
    """
    records = list(pool)
    there: dict[str, set[int]] = {}
    for record in records:
        if record.together > 1:
            there.setdefault(record.info.pod_uid, set()).add(record.info.local_rank)
    return [r for r in records if r.together < 2 or len(there[r.info.pod_uid]) >= r.together]


def states_there(pool: Sequence[Record]) -> list[StateName]:
    """Return the states that a pool holds as a whole: of pods that train as one, with all local ranks.

    Args:
        pool: records of all that may take part.
    """
    holders: dict[StateName, list[Record]] = {}
    for record in pool:
        if record.state is not None:
            holders.setdefault(record.state, []).append(record)
    found = []
    for state, records in holders.items():
        together = max(record.together for record in records)
        if together < 2 or len({record.info.local_rank for record in records}) >= together:
            found.append(state)
    return found


def is_half_lost(record: Record | None, generation: Generation) -> bool:
    """Return whether a process trains as one with another one that is lost.

    It may wait for that one in a collective for ever, so it is not waited for. Nobody needs a step that it
    commits meanwhile: its pod takes part again as a whole, or not at all.

    Args:
        record: of the process; None: it has not reported yet.
        generation: of which it is a member.
    """
    if record is None or record.together < 2:
        return False
    pod = record.info.pod_uid
    return any(info.pod_uid == pod and info.id in generation.lost for info in generation.members)


def spread_leaving(m: Membership, now: float) -> None:
    """Have all processes leave whose pod trains as one, and of which one leaves.

    Args:
        m: facts of the membership, which are changed.
        now: in unix seconds.
    """
    going = {r.info.pod_uid: r for r in m.members.values() if r.leaving and r.together > 1}
    if not going:
        return
    for record in m.members.values():
        first = going.get(record.info.pod_uid)
        if first is not None and record.together > 1 and not record.leaving:
            record.asked_to_leave(now, first.leave_reason, first.leave_by)
