"""Which probes of a running container are carried out, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from springtide_local.kubelet.live import LiveContainer
from springtide_local.kubelet.logs import ContainerLog
from springtide_local.kubelet.runtime import ExecResult, Launch
from springtide_local.kubelet.state import ContainerRecord

OFTEN = 0.001


class CountingRuntime:
    """Answers commands without running them: `startup` fails twice, all others succeed."""

    def __init__(self, enough: int) -> None:
        self.asked: Counter[str] = Counter()
        self.readiness_asked = asyncio.Event()
        self._enough = enough

    async def execute(self, launch: Launch, timeout: float) -> ExecResult:
        (command,) = launch.argv
        self.asked[command] += 1
        if command == "readiness" and self.asked[command] >= self._enough:
            self.readiness_asked.set()
        return ExecResult(1 if command == "startup" and self.asked[command] <= 2 else 0, "")


def probe(command: str) -> dict[str, Any]:
    return {"exec": {"command": [command]}, "periodSeconds": OFTEN, "failureThreshold": 600}


async def test_startup_probe_that_succeeded_is_not_asked_again(tmp_path: Path) -> None:
    runtime, works = CountingRuntime(enough=20), asyncio.Event()
    works.set()
    record, complaints = ContainerRecord("main", "main"), []
    log = ContainerLog(tmp_path / "log")
    live = LiveContainer(
        {"name": "main", "startupProbe": probe("startup"), "readinessProbe": probe("readiness")},
        record,
        Launch("main", ["main"], {}, tmp_path, log),
        None,  # type: ignore[arg-type]  # nobody stops it
        runtime,  # type: ignore[arg-type]  # it starts nothing
        works,
        "127.0.0.1",
        lambda command: Launch("probe", command, {}, tmp_path, log),
        lambda: None,
        lambda kind, output: complaints.append(kind),
        lambda why: complaints.append(why),
    )
    live.begin()
    async with asyncio.timeout(60):
        await runtime.readiness_asked.wait()
    live.end()
    log.close()
    assert (record.passed_startup, record.ready) == (True, True)
    assert runtime.asked["startup"] == 3
    assert complaints == ["Startup", "Startup"]
