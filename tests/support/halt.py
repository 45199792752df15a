"""Workers that stand still at a named point until a test lets them go on."""

from __future__ import annotations

from pathlib import Path


class Halt:
    """Points at which callers stand until `go`. `reached`: whether call number so and so has come there."""

    def __init__(self, folder: Path, name: str = "halted") -> None:
        self._folder, self._name = folder, name
        self._held = folder / name
        self._held.write_text("120")

    def at(self, point: str, number: int = 0) -> str:
        """A fault. point: POINT:STEP. number: of the worker, for `reached`."""
        return f"{point}:mark={self._mark(number)};{point}:hold={self._held}"

    def reached(self, number: int = 0) -> bool:
        return self._mark(number).exists()

    def go(self) -> None:
        self._held.unlink()

    def _mark(self, number: int) -> Path:
        return self._folder / f"{self._name}-reached-{number}"
