"""A file that says how long the members of a test's job stand still after a commit."""

from __future__ import annotations

from pathlib import Path


class Brake:
    """Nobody stands still at first. `fault`: of each member's SPRINGTIDE_FAULT."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._says: str | None = None
        self.fault = f"committed:*:hold={path}"

    def set(self, seconds: float | None, step: int = 0) -> None:
        """Each stands still for so long after each of its commits from that step on; None: not at all."""
        says = None if seconds is None else f"{seconds} {step}"
        if says == self._says:
            return
        self._says = says
        if says is None:
            self._path.unlink()
        else:
            new = self._path.with_suffix(".new")
            new.write_text(says)
            new.rename(self._path)
