"""Values that scripts report by name, within bounds that no script can break: a Sync's size depends on it."""

from __future__ import annotations

from collections.abc import Mapping

MAX_NAMES = 64
MAX_CHARACTERS = 128
MAX_KEPT_NAMES = 1024
"""Different names that the kept commits may have among them."""


class Latest(dict[str, float]):
    """The newest value of each name; beyond 64 names those that were not reported for the longest time go."""

    def report(self, values: Mapping[str, float]) -> None:
        """Take in what was reported."""
        for name, value in bounded(values).items():
            self.pop(name, None)
            self[name] = value
        while len(self) > MAX_NAMES:
            del self[next(iter(self))]


class Names:
    """The names that commits are kept with: each once in memory, and not too many of them."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values to keep with a commit."""
        kept = {}
        for name, value in bounded(values).items():
            known = self._known.get(name)
            if known is None and len(self._known) < MAX_KEPT_NAMES:
                known = self._known[name] = name
            if known is not None:
                kept[known] = value
        return kept


def bounded(values: Mapping[str, float]) -> dict[str, float]:
    """Return those of the values that one report may have."""
    short = sorted(name for name in values if len(name) <= MAX_CHARACTERS)
    return {name: values[name] for name in short[:MAX_NAMES]}
