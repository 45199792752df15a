"""Who may leave: nothing that only a leaver holds is let go before its last moment."""

from __future__ import annotations

from collections.abc import Sequence

from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.saving import leave_deadline, saves, time_to_go
from springtide_coordinator.membership.state import Membership


def is_due(m: Membership, record: Record, now: float, relieved: bool = False) -> bool:
    """Whether the leaver must be let go now, whatever it holds; relieved: others wait to take that over."""
    if not record.leaving:
        return False
    if now >= leave_deadline(m, record):
        return True
    wanted = m.target > 0 or m.operator_heard_at is None
    if relieved and wanted and not m.suspended:
        return False
    return time_to_go(m, record, now) and not saves(m, record)


def may_leave(
    m: Membership, leavers: Sequence[Record], staying: int, holders: int, now: float
) -> list[Record]:
    """Those of the leavers that can go now.

    Args:
        staying: processes that stay and are ready to train.
        holders: how many of them hold the newest state.
    """
    if not m.rules.leaver_hands_over:
        return list(leavers)
    if holders > 0 and staying >= max(1, m.minimum):
        return list(leavers)
    return [record for record in leavers if is_due(m, record, now, relieved=staying > 0)]
