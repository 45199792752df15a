"""The output of several processes in one log: each line with its process's number, whole lines only.

Threads: each `Relay` copies in a thread of its own, which alone writes `lines` and the tail; `close` joins
it, and the tail is read after that or as it is. A single write of whole lines keeps those of several threads
apart.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import BinaryIO

_LONGEST_LINE = 1 << 16
_TAIL_LINES = 40
_TAIL_WIDTH = 1000


class Lines:
    """Cuts a stream of bytes into whole lines. A line that grows beyond 64 KiB is cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that are whole by now, with their ends."""
        # Only \n ends a line: progress bars rewrite theirs with \r.
        parts = (self._rest + data).split(b"\n")
        lines = [part + b"\n" for part in parts[:-1]]
        self._rest = parts[-1]
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest + b"\n")
            self._rest = b""
        return lines

    def end(self) -> list[bytes]:
        """Return the rest that was not ended by a line feed."""
        rest, self._rest = self._rest, b""
        return [rest + b"\n"] if rest else []


class Relay:
    """Copies one stream of a process to one of ours, line by line, in a thread of its own.

    prefix: put before each line. The last lines are kept in `tail`. It ends when nobody holds the other end
    of the pipe any more; then, or when `close` is called, the pipe is closed.
    """

    def __init__(self, source: BinaryIO, target: int, prefix: bytes) -> None:
        self._source, self._target, self._prefix = source, target, prefix
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._thread = threading.Thread(target=self._copy, name="springtide-output", daemon=True)
        self._thread.start()

    @property
    def tail(self) -> str:
        return b"".join(self._tail).decode("utf-8", "replace")

    def close(self, timeout: float) -> None:
        """Wait until all is copied; a grandchild that holds the pipe open is not waited for longer."""
        self._thread.join(timeout)

    def _copy(self) -> None:
        lines = Lines()
        with self._source:
            while data := os.read(self._source.fileno(), 1 << 16):
                self._write(lines.feed(data))
            self._write(lines.end())

    def _write(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._tail.extend(line[:_TAIL_WIDTH] for line in lines)
        # One call for whole lines, so that those of other processes do not come in between.
        data = b"".join(self._prefix + line for line in lines)
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except OSError:
            return  # nobody reads any more; the process must not be blocked for it
