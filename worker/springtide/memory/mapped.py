"""Memory of this process that is mapped from files: the machine can drop it and read it again."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

_IN_MEMORY = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
"""Names of mappings that look like files and are memory."""


class FileMappings:
    """The addresses that are mapped from files, as they were when this was made."""

    def __init__(self, text: str) -> None:
        """Read them.

        Args:
            text: Of /proc/PID/maps; empty where there is none.
        """
        found = []
        for line in text.splitlines():
            words = line.split(maxsplit=5)
            if len(words) == 6 and words[5].startswith("/") and not words[5].startswith(_IN_MEMORY):
                start, _, stop = words[0].partition("-")
                found.append((int(start, 16), int(stop, 16)))
        self._starts = [start for start, _ in sorted(found)]
        self._stops = [stop for _, stop in sorted(found)]

    @classmethod
    def of_this_process(cls) -> FileMappings:
        """Return those of this process; none on a system that does not tell."""
        try:
            return cls(Path("/proc/self/maps").read_text())
        except OSError:
            return cls("")

    def has(self, address: int) -> bool:
        """Return whether an address is in one of them."""
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._stops[place]
