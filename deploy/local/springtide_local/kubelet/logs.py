"""Container logs: one file per start of a container, each line with its time, read by `kubectl logs`.

A line in the file is `2026-01-31T12:00:00.000000000Z F text` (F: full line, P: part of one), after the CRI's
log format.

Tasks: one event loop; the container's reader appends and sets `_grown`, for which followers wait.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

_CHUNK = 64 * 1024
_STAMP = len("2026-01-31T12:00:00.000000000Z")
LONGEST_LINE = 16 * 1024
ROTATE_BYTES = 64 * 2**20


def _stamp(now: float) -> bytes:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()


class ContainerLog:
    """Written by the runtime, read by anybody. The writer never blocks on readers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the container
        self._size = 0
        self._rest = b""
        self._grown: asyncio.Event | None = None

    def write(self, data: bytes) -> None:
        """Append what a container wrote, cut into lines; an unfinished line waits for its end, up to
        LONGEST_LINE bytes.
        """
        stamp = _stamp(time.time())
        *lines, rest = (self._rest + data).split(b"\n")
        out = [b"%s F %s\n" % (stamp, line) for line in lines]
        while len(rest) > LONGEST_LINE:
            out.append(b"%s P %s\n" % (stamp, rest[:LONGEST_LINE]))
            rest = rest[LONGEST_LINE:]
        self._rest = rest
        self._append(b"".join(out))

    def close(self) -> None:
        if self.closed:
            return
        if self._rest:
            self._append(b"%s P %s\n" % (_stamp(time.time()), self._rest))
            self._rest = b""
        self.closed = True
        self._file.close()
        self._wake()

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self._size > ROTATE_BYTES:
            os.replace(self.path, self.path.with_suffix(".old"))
            self._file.close()
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
            self._size = 0
        self._file.write(data)
        self._size += len(data)
        self._wake()

    def _wake(self) -> None:
        if self._grown is not None:
            self._grown.set()
            self._grown = None

    async def grown(self, timeout: float) -> None:
        """Return when something was written or the log was closed, or after `timeout` seconds."""
        if self.closed:
            return
        if self._grown is None:
            self._grown = asyncio.Event()
        try:
            async with asyncio.timeout(timeout):
                await self._grown.wait()
        except TimeoutError:
            return


def _text(line: bytes, timestamps: bool) -> bytes:
    stamp, flag, text = line[:_STAMP], line[_STAMP + 1 : _STAMP + 2], line[_STAMP + 3 :]
    if flag == b"P":
        text = text.rstrip(b"\n")
    return stamp + b" " + text if timestamps else text


async def read_log(
    path: Path,
    live: ContainerLog | None = None,
    *,
    follow: bool = False,
    tail_lines: int | None = None,
    since: float | None = None,
    timestamps: bool = False,
    limit_bytes: int | None = None,
) -> AsyncIterator[bytes]:
    """Yield a log's content in chunks.

    Args:
        path: of the file.
        live: the log that is being written, if the container runs.
        follow: go on until `live` is closed.
        tail_lines: begin with the last so many lines; None: with the first.
        since: leave out lines before, in unix seconds.
        timestamps: keep each line's time.
        limit_bytes: end after so many; None: no limit.

    Raises:
        FileNotFoundError: there is no log.
    """
    left = limit_bytes
    threshold = _stamp(since) if since is not None else b""
    # Local files of this machine: reading a chunk takes microseconds, and a rotated file is replaced.
    file = open(path, "rb")  # noqa: SIM115, ASYNC230
    try:
        first: deque[bytes] | Iterator[bytes]
        first = (line for line in file if line[:_STAMP] >= threshold)
        if tail_lines is not None:
            first = deque(first, maxlen=tail_lines) if tail_lines else iter(())
            file.seek(0, os.SEEK_END)
        out: list[bytes] = []
        size = 0
        for line in first:
            text = _text(line, timestamps)
            if left is not None:
                text = text[:left]
                left -= len(text)
            out.append(text)
            size += len(text)
            if size >= _CHUNK:
                yield b"".join(out)
                out, size = [], 0
                await asyncio.sleep(0)
            if left == 0:
                break
        if out:
            yield b"".join(out)
        partial = b""
        while follow and live is not None and left != 0:
            done = live.closed
            data = file.read(_CHUNK)
            if not data:
                if _replaced(path, file.fileno()):
                    file.close()
                    file = open(path, "rb")  # noqa: SIM115, ASYNC230
                    continue
                if done:
                    return
                await live.grown(timeout=30.0)
                continue
            *lines, partial = (partial + data).split(b"\n")
            text = b"".join(_text(line + b"\n", timestamps) for line in lines)
            if left is not None:
                text = text[:left]
                left -= len(text)
            if text:
                yield text
    finally:
        file.close()


def _replaced(path: Path, descriptor: int) -> bool:
    """Whether the log was rotated since it was opened. Gone with its pod is not replaced: what is open can
    be read on.
    """
    try:
        return os.stat(path).st_ino != os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def log_end(path: Path, lines: int, limit_bytes: int) -> str:
    """Return the last lines of a log, without times; "" when there is no log.

    Args:
        path: of the file.
        lines: at most so many.
        limit_bytes: at most so many of them, the last ones.
    """
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.seek(max(0, size - 4 * limit_bytes - 64 * lines))
            content = file.read().split(b"\n")
    except FileNotFoundError:
        return ""
    if size > 4 * limit_bytes + 64 * lines:
        content = content[1:]
    texts = b"".join(_text(line + b"\n", timestamps=False) for line in content[-lines - 1 :] if line)
    return texts[-limit_bytes:].decode(errors="replace")
