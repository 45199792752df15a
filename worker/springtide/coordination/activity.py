"""What this process has been doing for a while: told without a commit, so that a hang can be explained.

The thread that tells the coordinator looks on; the script's thread does nothing for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from springtide.coordination.outcome import users_frame
from springtide_protocol import coordinator_pb2 as pb

TOLD_AFTER_SECONDS = (1.0, 10.0)
"""How long the same must have gone on until it is told, and told again with the script's line."""

Now = tuple[int, int]  # number of the step, pb.Doing


class Activity:
    """Notices what lasts. `look` is called a few times a second, from one thread.

    place: where the script's thread is; asked for only when something has lasted.
    """

    def __init__(self, place: Callable[[], str]) -> None:
        self._place = place
        self._now: Now | None = None
        self._since = 0.0
        self._told = 0

    def look(self, now: Now | None, at: float) -> pb.Activity | None:
        """What is to be told of `now`, done at monotonic time `at`; None for nothing new."""
        if now != self._now:
            self._now, self._since, self._told = now, at, 0
        if now is None or self._told >= len(TOLD_AFTER_SECONDS):
            return None
        seconds = at - self._since
        if seconds < TOLD_AFTER_SECONDS[self._told]:
            return None
        self._told += 1
        where = self._place() if seconds >= TOLD_AFTER_SECONDS[-1] else ""
        return pb.Activity(step=now[0], doing=now[1], seconds=seconds, where=where)  # type: ignore[arg-type]

    def again(self) -> None:
        """The listener is a new one: tell it what lasts."""
        self._told = 0


def main_thread_place() -> str:
    """`file:line in function` of the user's code that the main thread is in; "" where there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = []
    while frame is not None:
        frames.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return users_frame(frames[::-1]) if frames else ""
