"""Who may leave: nothing that only a leaver holds is let go before its last moment."""

from __future__ import annotations

from collections.abc import Sequence

from .members import Record
from .state import Membership


def is_due(m: Membership, record: Record, now: float) -> bool:
    """Whether the leaver must be let go now whatever it holds."""
    if not record.leaving:
        return False
    wanted = m.target > 0 or m.operator_heard_at is None
    return not wanted or now >= record.leave_deadline(
        m.settings.leave_margin, m.settings.assumed_grace_period
    )


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
    return [record for record in leavers if is_due(m, record, now)]
