"""Entries that the members of a generation send each other by the coordinator's stream. No torch here.

Threads and locks: one condition, `_changed`, guards the entries and the reason of a cancellation. The
stream's thread delivers and cancels; the threads that form a group add entries and wait for others', each
wait with a limit of time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

log = logging.getLogger("springtide")

_LOG_EVERY_SECONDS = 5.0

Publish = Callable[[str, bytes], None]


class FormationCancelled(RuntimeError):
    """The generation that the group was being formed for has ended already."""


class Entries:
    """Values by key that travel as messages; `deliver` and `cancel` are called from the stream's thread.

    publish(key, value): sends an entry to all members. owners: names of the members by rank, for messages
    about who is missing; keys end in `/RANK`. timeout_seconds: for each wait, whatever the caller asks for:
    peers may still be starting.
    """

    def __init__(self, publish: Publish, owners: Sequence[str], timeout_seconds: float) -> None:
        self._publish = publish
        self._owners = list(owners)
        self._timeout_seconds = timeout_seconds
        self._entries: dict[str, bytes] = {}
        self._cancelled: str | None = None
        self._changed = threading.Condition()

    def deliver(self, entries: Iterable[tuple[str, bytes]]) -> None:
        """Take in members' entries; of two with one key the first stays.

        Args:
            entries: keys, which end in `/RANK`, and values.
        """
        with self._changed:
            for key, value in entries:
                self._entries.setdefault(key, value)
            self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        with self._changed:
            self._cancelled = self._cancelled or reason
            self._changed.notify_all()

    @property
    def cancelled(self) -> str | None:
        """Why the formation was cancelled; None while it goes on."""
        return self._cancelled

    def set(self, key: str, value: bytes) -> None:
        """Keep an entry, and send it to all members.

        Args:
            key: of the entry; it ends in `/RANK`.
            value: its bytes.
        """
        value = bytes(value)
        self.deliver([(key, value)])
        self._publish(key, value)

    def get(self, key: str) -> bytes:
        self._await([key])
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for entries.

        Args:
            keys: of the entries.
            timeout: not looked at: the limit is this object's own.

        Raises:
            FormationCancelled: the generation is over.
            TimeoutError: an entry did not come; its owner is named.
        """
        self._await(keys)

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def _await(self, keys: Sequence[str]) -> None:
        """Raise FormationCancelled, or TimeoutError that names who is missing."""
        deadline = time.monotonic() + self._timeout_seconds
        with self._changed:
            while True:
                if self._cancelled is not None:
                    raise FormationCancelled(self._cancelled)
                missing = [key for key in keys if key not in self._entries]
                if not missing:
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"forming the group: no address from {self._names(missing)} in "
                        f"{self._timeout_seconds:g} s"
                    )
                if not self._changed.wait(min(left, _LOG_EVERY_SECONDS)) and left > _LOG_EVERY_SECONDS:
                    log.warning(
                        "forming the group: still waiting for the address of %s", self._names(missing)
                    )

    def _names(self, keys: Sequence[str]) -> str:
        names = []
        for key in keys:
            rank = key.rsplit("/", 1)[-1]
            names.append(self._owners[int(rank)] if rank.isdigit() and int(rank) < len(self._owners) else key)
        return ", ".join(names)
