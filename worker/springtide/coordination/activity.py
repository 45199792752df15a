"""Notice what this process has been doing for a while, so that a hang can be explained.

The thread that reports to the coordinator looks on; the script's thread does nothing for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from springtide.coordination.outcome import users_frame
from springtide_protocol import coordinator_pb2 as pb

REPORT_AFTER_SECONDS = (1.0, 10.0)
"""How long the same must have gone on until it is reported, and reported again with the script's line."""

Now = tuple[int, int]  # number of the step, pb.Doing


class Activity:
    """Notice what lasts. One thread calls `look`, a few times a second.

    place: returns where the script's thread is; asked for only when something has lasted.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self._now: Now | None = None
        self._since = 0.0
        self._reported = 0

    def look(self, now: Now | None, at: float) -> pb.Activity | None:
        """Return what is to be reported; None for nothing new.

        Args:
            now: the running step and what is done in it; None outside of a generation.
            at: monotonic time.
        """
        if now != self._now:
            self._now, self._since, self._reported = now, at, 0
        if now is None or self._reported >= len(REPORT_AFTER_SECONDS):
            return None
        seconds = at - self._since
        if seconds < REPORT_AFTER_SECONDS[self._reported]:
            return None
        self._reported += 1
        where = self._place() if seconds >= REPORT_AFTER_SECONDS[-1] else ""
        return pb.Activity(step=now[0], doing=now[1], seconds=seconds, where=where)  # type: ignore[arg-type]

    def again(self) -> None:
        """Report what lasts again: the coordinator is a new one."""
        self._reported = 0


def main_thread_place() -> str:
    """Return `file:line in function` of the user's code that the main thread is in; "" without any."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return users_frame(frames[::-1]) if frames else ""
