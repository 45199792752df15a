"""Fork processes from one that has imported torch already, as a standby would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_ROOT = Path(__file__).resolve().parents[2]


class Zygote:
    """The process that others are forked from (`benchmarks.recovery.zygote`). Any thread may fork."""

    def __init__(self, module: str) -> None:
        """Start it.

        Args:
            module: That with --zygote forks a process for each line of its input.
        """
        self._module, self._lock = module, threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, "--zygote"],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(self, environment: Mapping[str, str], log: Path) -> int:
        """Return the id of a new process.

        Args:
            environment: Besides the zygote's own.
            log: For what it prints.

        Raises:
            RuntimeError: The zygote has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"environment": dict(environment), "log": str(log)}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._module} ended with {self._process.wait()} before it forked")
        return int(answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Let it end; those that it has forked live on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
