"""How far a state transfer of this process has come; any thread may read it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(slots=True)
class Progress:
    """Bytes of tensors: `done` of `total`, of which `reused` were here from an earlier transfer.

    total: 0 until it is known. peer: name of the member at the other end. began: monotonic seconds.
    """

    peer: str
    sends: bool
    total: int = 0
    done: int = 0
    reused: int = 0
    began: float = field(default_factory=time.monotonic)

    def text(self, now: float) -> str:
        """One line for people, at monotonic time `now`."""
        what = f"sending the state to {self.peer}" if self.sends else f"receiving the state from {self.peer}"
        if not self.total:
            return f"{what}: not begun after {now - self.began:.0f} s"
        speed = (self.done - self.reused) / max(now - self.began, 1e-6)
        kept = f", {in_words(self.reused)} were here" if self.reused else ""
        return (
            f"{what}: {in_words(self.done)} of {in_words(self.total)} ({100 * self.done // self.total} %), "
            f"{in_words(speed)}/s{kept}"
        )


def in_words(size: float) -> str:
    """A number of bytes with its unit."""
    for unit in _UNITS[:-1]:
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
