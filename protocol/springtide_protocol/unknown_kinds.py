"""Kinds of messages that this release does not know: a peer of a later one says them."""

from __future__ import annotations

import logging
from typing import Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

log = logging.getLogger("springtide.protocol")

_MAX_KINDS: Final = 64


def unknown_kind(message: Message) -> int:
    """Return the number of a kind of message that this release does not know; 0: it is known, or empty.

    Args:
        message: with a `oneof` of the name `message`.
    """
    if message.WhichOneof("message") is not None:
        return 0
    unknown = UnknownFieldSet(message)
    return min((unknown[index].field_number for index in range(len(unknown))), default=0)


class UnknownKinds:
    """Logs each kind of message that is not known, once, and ignores it. One thread at a time uses it."""

    def __init__(self) -> None:
        self._said: set[int] = set()

    def ignores(self, message: Message, sender: str) -> bool:
        """Return whether a message is of a kind that is not known, and so is to be ignored.

        Args:
            message: with a `oneof` of the name `message`.
            sender: for the log.
        """
        kind = unknown_kind(message)
        if not kind:
            return False
        if kind not in self._said and len(self._said) < _MAX_KINDS:
            self._said.add(kind)
            text = "%s, of a later release, says what this one does not know (%s, kind %d): such are ignored"
            log.warning(text, sender, type(message).__name__, kind)
        return True
