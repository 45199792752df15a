"""Say a thing once per stream: decisions are taken again and again from the same facts."""

from __future__ import annotations

from collections.abc import Hashable

from springtide_coordinator.membership.events import Effect, Send
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Outgoing
from springtide_coordinator.membership.servers import ServerRecord


def once(record: Record | ServerRecord, key: Hashable, message: Outgoing) -> list[Effect]:
    """Send `message` unless `key` was said on the member's stream already; nothing without a stream."""
    if record.session is None or key in record.sent:
        return []
    record.sent.add(key)
    return [Send(record.session, record.info.id, message)]
