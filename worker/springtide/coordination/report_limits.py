"""Bounds of what a script reports: so many names, none of them long, and one warning for all that is more."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

log = logging.getLogger("springtide")

MAX_NAMES: Final = 64
MAX_CHARACTERS: Final = 128


class ReportedNames:
    """Keeps of each report what fits; the same of the same report in every process, whatever came before."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._warned = False

    def bounded(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the values with the first 64 names, in the order of the names, that are not too long."""
        short = sorted(name for name in values if len(name) <= MAX_CHARACTERS)
        kept = short[:MAX_NAMES]
        if not self._warned:
            if len(self._seen) <= MAX_NAMES:
                self._seen.update(kept)
            self._warn(len(values) - len(short), len(short) - len(kept))
        return {name: values[name] for name in kept}

    def _warn(self, long: int, more: int) -> None:
        problem = ""
        if long:
            problem = f"{long} names have more than {MAX_CHARACTERS} characters, and are left out"
        elif more:
            problem = f"{more} names beyond {MAX_NAMES} are left out"
        elif len(self._seen) > MAX_NAMES:
            problem = (
                f"there have been more than {MAX_NAMES} different names: the job's status shows the newest."
                " A name should not change from step to step"
            )
        if problem:
            self._warned = True
            log.warning("report(): %s (said once)", problem)
