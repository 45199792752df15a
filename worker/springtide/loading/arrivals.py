"""Which answers of the processes that read ahead are here, so that nobody waits for one that is not.

DataLoader has no question for that. It does call `pin_memory()` of each object of a batch, in its thread that
pins, and hands the batch over at once then: an answer ends with a mark that notes itself.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from weakref import WeakValueDictionary

_numbers = itertools.count()
_known: WeakValueDictionary[int, Arrivals] = WeakValueDictionary()


class Arrivals:
    """Names of the answers that are here. Any thread."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._lock = threading.Lock()
        self._here: set[Hashable] = set()
        _known[self._number] = self

    def mark(self, name: Hashable) -> Mark:
        """Return what notes that an answer is here, when it has come back from another process.

        Args:
            name: of the answer; it can be pickled.
        """
        return Mark(self._number, name)

    def note(self, name: Hashable) -> None:
        """An answer is here."""
        with self._lock:
            self._here.add(name)

    def is_here(self, name: Hashable) -> bool:
        """Tell whether taking the answer waits for nothing."""
        with self._lock:
            return name in self._here

    def forget(self, name: Hashable) -> None:
        """The answer has been taken."""
        with self._lock:
            self._here.discard(name)


class Mark:
    """The last part of an answer."""

    def __init__(self, number: int, name: Hashable) -> None:
        self._number, self._name = number, name

    def pin_memory(self) -> Mark:
        """Note it; called by DataLoader, in the process that has asked."""
        arrivals = _known.get(self._number)
        if arrivals is not None:
            arrivals.note(self._name)
        return self
