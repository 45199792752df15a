"""Tell the process of `gpu_run` about each test, line by line, in the file that SPRINGTIDE_GPU_EVENTS names.

A test that ends its process, or that is ended, leaves a line that it began and none that it ended.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from gpu_capabilities import capability_of, figures_of

EVENTS_VARIABLE = "SPRINGTIDE_GPU_EVENTS"
_phases: dict[str, list[pytest.TestReport]] = {}


def _tell(event: str, **values: Any) -> None:
    with open(os.environ[EVENTS_VARIABLE], "a") as file:
        file.write(json.dumps({"event": event, **values}) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _tell("collected", id=item.nodeid, capability=capability_of(item))


def pytest_runtest_logstart(nodeid: str) -> None:
    _phases[nodeid] = []
    _tell("started", id=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _phases[report.nodeid].append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    reports = _phases.pop(nodeid)
    decisive = next((r for r in reports if r.failed), None) or next((r for r in reports if r.skipped), None)
    _tell(
        "ended",
        id=nodeid,
        outcome="passed" if decisive is None else "failed" if decisive.failed else "skipped",
        seconds=sum(report.duration for report in reports),
        reason="" if decisive is None else _reason(decisive),
        figures={name: v for report in reports for name, v in figures_of(report.user_properties).items()},
    )


def _reason(report: pytest.TestReport) -> str:
    """Return one line that says why a test failed or was skipped."""
    told = report.longrepr
    if isinstance(told, tuple):  # (file, line, reason) of a skip
        return str(told[2]).removeprefix("Skipped: ")
    crash = getattr(told, "reprcrash", None)
    text = str(crash.message if crash is not None else told)
    return text.strip().splitlines()[0] if text.strip() else "no reason was told"
