"""Signals of the launcher's own process, turned into a queue that its loop waits on."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Catches them from `with` on; process 1 gets only signals that it handles."""

    def __init__(self) -> None:
        self._caught: list[int] = []
        self._before: dict[int, Any] = {}
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = -1

    def __enter__(self) -> Signals:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED_ON, signal.SIGCHLD):
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> list[int]:
        """Signals since the last call, SIGCHLD left out; after at most `seconds`, earlier when one comes."""
        select.select([self._read], [], [], max(0.0, seconds))
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass
        caught, self._caught = self._caught, []
        return caught

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._caught.append(number)
