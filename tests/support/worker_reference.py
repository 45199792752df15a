"""The undisturbed run in one process that elastic runs are compared with."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_cluster import SCRIPT, Zygote


@dataclasses.dataclass(frozen=True, slots=True)
class Reference:
    """values: all parameters, flat. digest: of their bits. losses, rates: by step. audit: of the ledger."""

    values: list[float]
    digest: str
    losses: dict[int, float]
    rates: dict[str, float]
    audit: dict[str, int]


def train_alone(
    zygote: Zygote, folder: Path, options: dict[str, Any], environment: Mapping[str, str] | None = None
) -> Reference:
    """Run the script of the tests without a job, in a process of its own.

    Args:
        zygote: makes the process.
        folder: for what it writes.
        options: of the script.
        environment: of the process.
    """
    steps = folder / "alone.steps"
    argv = [str(SCRIPT), str(folder), json.dumps(options | {"pace": 0})]
    variables = {"SPRINGTIDE_STEP_LOG": str(steps), **(environment or {})}
    pid = zygote.fork(variables, argv, folder / "alone.log")
    deadline = time.monotonic() + 100
    while zygote.code(pid) is None:
        assert time.monotonic() < deadline, "the undisturbed run did not end in 100 s"
        time.sleep(0.01)
    assert zygote.code(pid) == 0, (folder / "alone.log").read_text()
    result = json.loads((folder / "alone.json").read_text())
    commits = [json.loads(line) for line in steps.read_text().splitlines()]
    losses = {commit["step"]: commit["values"]["loss"] for commit in commits}
    return Reference(result["values"], result["parameters"], losses, result["rates"], result["audit"])
