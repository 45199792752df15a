"""A stand-in for the coordinator's event loop, for tests in which time passes by hand."""

from __future__ import annotations

from collections.abc import Callable


class Loop:
    """Hold the event loop's clock and what it is to call later, and turn by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call in so many seconds; never where they are infinite, as asyncio does it.

        Args:
            seconds: from now on.
            call: to make once.
        """
        self._calls.append((self.now + seconds, call))

    def turn(self, seconds: float = 0.0) -> None:
        """Let time pass, and make the calls that are due by then."""
        self.now += seconds
        due = [call for at, call in self._calls if at <= self.now]
        self._calls = [(at, call) for at, call in self._calls if at > self.now]
        for call in due:
            call()
