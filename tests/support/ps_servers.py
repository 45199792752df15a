"""Parameter servers for tests: in this process, or as real ones that can be killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from springtide_ps.server.kv_store import Store
from springtide_ps.server.server import Server
from springtide_ps.wire.frames import PART_BYTES

TOKEN = "the job's token"


@contextmanager
def servers(count: int = 1, memory_limit: int = 0, part_bytes: int = PART_BYTES) -> Iterator[list[Server]]:
    """Servers in this process, each with threads of its own."""
    running: list[Server] = []
    try:
        for _ in range(count):
            running.append(Server(Store(memory_limit), TOKEN, "127.0.0.1", part_bytes=part_bytes))
        yield running
    finally:
        for server in running:
            server.close(30.0)


def names(running: list[Server]) -> list[str]:
    return [f"127.0.0.1:{server.port}" for server in running]


class RealServer:
    """`python -m springtide_ps` on a free port. before: a shell's command that comes first in its process."""

    def __init__(self, folder: Path, before: str = ":", **environment: str) -> None:
        self.log = folder / "ps.log"
        settings = {
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_PS_PORT": "0",
            "SPRINGTIDE_METRICS_PORT": "0",
            **environment,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'{before}; exec "$0" -m springtide_ps', sys.executable],
                env={k: v for k, v in os.environ.items() if not k.startswith("SPRINGTIDE_")} | settings,
                stderr=log,
            )

    def ports(self, seconds: float = 180.0) -> tuple[int, int]:
        """(of parameters, of metrics), once it serves."""
        deadline = time.monotonic() + seconds
        while True:
            found = re.search(r"on port (\d+), metrics on port (\d+)", self.log.read_text())
            if found:
                return int(found[1]), int(found[2])
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server does not serve: {self.log.read_text()}")
            time.sleep(0.05)

    def end(self) -> int:
        """Kill it if it still runs; its exit status."""
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait(30)
