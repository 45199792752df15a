"""A run of tests of which one ends its process: it fails, and comes to an end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[2] / "support"
NOTED = """
def test_{name}():
    with open({log!r}, "a") as log:
        log.write("{name} ")
"""
CRASH = """
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
"""
FILES = {"test_0.py": ("a", "crashes", "b"), "test_1.py": ("c",), "test_2.py": ("d",)}
"""The process that takes the place of the one that crashed gets a file of one test first."""


def test_process_that_crashes_fails_its_test_and_the_run_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for file, names in FILES.items():
        tests = [NOTED.format(name=name, log=str(log)) + CRASH * (name == "crashes") for name in names]
        (tmp_path / file).write_text("".join(tests))
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "suite_schedule"]
    command += ["-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "--rootdir", ".", "-c", os.devnull]
    own = {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(
        [*command, "."],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if "XDIST" not in name} | own,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed, 4 passed" in run.stdout
    assert "crashed while running 'test_0.py::test_crashes'" in run.stdout
    assert sorted(log.read_text().split()) == ["a", "b", "c", "crashes", "d"], "each ran once"
