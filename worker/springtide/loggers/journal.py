"""Keep a process's last commits for its trackers.

Threads and locks: the script's thread adds; the thread of each tracker reads. One lock guards all.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice
from typing import Final

from springtide.loggers.history import Entry

MAX_ENTRIES: Final = 4096
"""Commits that wait for a tracker that cannot be reached, or for this process to become the writer."""


class Journal:
    """Hold the newest entries, numbered from 0. Thread-safe."""

    def __init__(self, size: int = MAX_ENTRIES) -> None:
        """Begin without an entry. size: how many are kept."""
        self.size = size
        self._entries: deque[Entry] = deque(maxlen=size)
        self._added = 0
        self._lock = threading.Lock()

    def add(self, entry: Entry) -> None:
        """Add the newest entry; the oldest one goes when there are too many."""
        with self._lock:
            self._entries.append(entry)
            self._added += 1

    @property
    def oldest(self) -> int:
        """Return the number of the oldest entry that is kept."""
        with self._lock:
            return self._added - len(self._entries)

    @property
    def end(self) -> int:
        """Return the number of the next entry."""
        with self._lock:
            return self._added

    def read(self, first: int, most: int) -> tuple[list[Entry], int]:
        """Return entries that are kept, the oldest first, and the number behind the last one of them.

        Args:
            first: number of the first one; if it is gone, the oldest one is.
            most: how many.
        """
        with self._lock:
            oldest = self._added - len(self._entries)
            start = max(first, oldest)
            found = list(islice(self._entries, start - oldest, start - oldest + most))
            return found, start + len(found)
