"""Unit tests that start a process or open a socket fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
TESTS = """
import os, socket, subprocess
import pytest

@pytest.fixture
def port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        yield opened.getsockname()[1]

def test_starts():
    subprocess.run(["true"], check=True)

def test_opens(port):
    assert port

def test_neither():
    with socket.socket():
        pass

def test_imports_a_library():
    import urllib3.util.connection  # binds a socket

def test_imports_a_module_of_ours():
    import begins_a_process
"""


@pytest.mark.parametrize(
    ("folder", "failed"),
    [("unit", ["test_starts", "test_opens", "test_imports_a_module_of_ours"]), ("component", [])],
)
def test_what_begins_is_told(folder: str, failed: list[str], tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "test_it.py").write_text(TESTS)
    begins = 'import subprocess\nsubprocess.run(["true"], check=True)\n'
    (tmp_path / folder / "begins_a_process.py").write_text(begins)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "unit_guard", "-rf", "-c", os.devnull, "--rootdir", ".", "."],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = [line.split("::")[1].split()[0] for line in run.stdout.splitlines() if line.startswith("FAILED")]
    assert told == failed, run.stdout + run.stderr
    assert ("Popen.__init__" in run.stdout and "socket.bind" in run.stdout) == bool(failed)
    assert "2 passed" in run.stdout or "5 passed" in run.stdout
