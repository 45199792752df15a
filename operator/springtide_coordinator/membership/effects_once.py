"""Say a thing once per stream: decisions are taken again and again from the same facts."""

from __future__ import annotations

from collections.abc import Hashable

from .events import Effect, Send
from .members import Record
from .messages import Outgoing
from .servers import ServerRecord


def once(record: Record | ServerRecord, key: Hashable, message: Outgoing) -> list[Effect]:
    """Send `message` unless `key` was said on the member's stream already; nothing without a stream."""
    if record.session is None or key in record.sent:
        return []
    record.sent.add(key)
    return [Send(record.session, record.info.id, message)]
