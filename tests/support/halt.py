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


class Stop:
    """A point of each step at which callers stand from a step on that a test chooses meanwhile."""

    def __init__(self, folder: Path, point: str) -> None:
        """Take the point's name; nobody stands there before `arm`.

        Args:
            folder: for files.
            point: its name.
        """
        self._folder, self._point, self._step = folder, point, 0
        self._held = folder / f"stop-{point}"

    def fault(self, number: int) -> str:
        """Return the fault of the worker of that number."""
        return f"{self._point}:*:mark={self._mark(number)};{self._point}:*:hold={self._held}"

    def arm(self, step: int) -> None:
        """Let callers stand there from a step on that none of them has come to."""
        self._step = step
        new = self._held.with_suffix(".new")
        new.write_text(f"120 {step}")
        new.rename(self._held)

    def reached(self, number: int) -> bool:
        """Return whether the worker of that number stands there."""
        mark = self._mark(number)
        return mark.exists() and int(mark.read_text() or 0) >= self._step

    def go(self) -> None:
        """Let those go on that stand there, and all that come."""
        self._held.unlink()

    def _mark(self, number: int) -> Path:
        return self._folder / f"stop-{self._point}-{number}"
