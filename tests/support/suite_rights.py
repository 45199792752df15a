"""Every right that the operator used over the whole suite, compared with the rules of deploy/operator.yaml.

Each embedded cluster that a test starts leaves its count of requests in one folder when it ends. At the end
of the session what the operator's service account did is compared: a right used without being granted
fails the session. One that was granted and never used does so, too, when the whole suite ran.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_rights import Right, granted, used

from springtide_local.settings import AUDIT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
ACCOUNT = "springtide-operator"
USER = f"system:serviceaccount:springtide-system:{ACCOUNT}"

# Where the operator runs on an embedded cluster: without any of these, a right may well be unused.
RUN_OPERATORS = (
    "test_chart_install.py",
    "test_operator_jobs.py",
    "test_operator_life.py",
    "test_operator_queues.py",
    "test_operator_servers.py",
    "test_e2e_elastic.py",
)

# Used only when two things fall together, which no test can bring about on a cluster.
SELDOM: dict[Right, str] = {
    ("get", "", "pods"): "a pod was made, and the answer or the operator was lost on the way",
    ("get", "springtide.dev", "trainingjobs"): "somebody changed the job while its status was written",
    ("delete", "networking.k8s.io", "networkpolicies"): "an older version made one without the job's uid",
    ("delete", "policy", "poddisruptionbudgets"): "an older version made one without the job's uid",
}

_passed: set[str] = set()
_problems: list[str] = []
_owned: list[str] = []  # the folder that this session made


def requests_in(folder: Path) -> list[dict[str, Any]]:
    """Return the requests that all clusters received."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        found += json.loads(path.read_text())["requests"]
    return found


def rendered() -> set[Right]:
    """The operator's rights by deploy/operator.yaml."""
    text = (ROOT / "deploy/operator.yaml").read_text()
    return granted((d for d in yaml.safe_load_all(text) if d), ACCOUNT)


def compare(asked: set[Right], allowed: set[Right], whole: bool) -> list[str]:
    """Lines that say what is wrong; none when nothing is."""
    lines = [f"used without being granted: {_text(right)}" for right in sorted(asked - allowed)]
    if whole:
        unused = allowed - asked - set(SELDOM)
        lines += [f"granted without being used: {_text(right)}" for right in sorted(unused)]
    return lines


def whole_suite(files: Iterable[str], narrowed: bool, failed: bool) -> bool:
    """Whether the operator had the occasion to use all of its rights."""
    names = {Path(file).name for file in files}
    return not narrowed and not failed and set(RUN_OPERATORS) <= names


def _text(right: Right) -> str:
    verb, group, resource = right
    return f"{verb} {resource}{'.' + group if group else ''}"


def pytest_configure(config: pytest.Config) -> None:
    """The folder is made once, before other processes of the session are started; they inherit it."""
    if AUDIT_VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="springtide-rights-")
        os.environ[AUDIT_VARIABLE] = folder
        _owned.append(folder)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.add(report.nodeid.split("::")[0])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Report where the session began alone: with several processes that is the one that reports."""
    if not _owned or session.config.option.collectonly:
        return
    option = session.config.option
    chosen = option.keyword or option.markexpr or getattr(option, "lf", False)
    plugin: Any = session.config.pluginmanager.get_plugin("slow_tests")
    narrowed = bool(chosen) or plugin.form_of(session.config) == "quick"
    # A request is counted only once: a session that failed may have left some out.
    whole = whole_suite(_passed, narrowed, exitstatus != pytest.ExitCode.OK)
    asked = used(requests_in(Path(_owned[0])), USER)
    if asked:
        _problems.extend(compare(asked, rendered(), whole))
    if _problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _problems:
        terminalreporter.section("rights of the operator", red=True)
        for line in _problems:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    # Once more at the very end: there one looks for why a session without a failed test failed.
    for line in _problems:
        print(f"FAILED rights of the operator: {line}", file=sys.stderr)
    for folder in _owned:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(AUDIT_VARIABLE, None)
    _owned.clear()
