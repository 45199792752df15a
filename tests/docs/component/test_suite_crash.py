"""Runs of tests by several processes: of files that end their process, that fail to import, and that warn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from slow_tests import VARIABLE

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


def run_files(
    folder: Path, *options: str, processes: int = 1, form: str = "all"
) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder as `make test` runs those of the suite."""
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin"]
    command += ["-p", "late_collection", "-p", "suite_schedule", "-p", "slow_tests"]
    command += ["-n", str(processes), "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "--rootdir", ".", "-c", os.devnull, "-W", "error"]
    own = {
        "PYTHONPATH": str(SUPPORT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "",
        VARIABLE: form,
    }
    usual = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    return subprocess.run(
        [*command, *options, "."],
        cwd=folder,
        env=usual | own | {VARIABLE: form},
        capture_output=True,
        text=True,
        timeout=60,
    )


def write_files(folder: Path) -> Path:
    """Write FILES; return the file in which their tests note that they run."""
    log = folder / "log"
    for file, names in FILES.items():
        tests = [NOTED.format(name=name, log=str(log)) + CRASH * (name == "crashes") for name in names]
        (folder / file).write_text("".join(tests))
    return log


@pytest.mark.parametrize("chosen", [[], ["-k", "test"]], ids=["files", "tests"])
def test_process_that_crashes_fails_its_test_and_the_run_ends(chosen: list[str], tmp_path: Path) -> None:
    """Also where processes collect everything, since the command line chooses among tests."""
    log = write_files(tmp_path)
    run = run_files(tmp_path, *chosen)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed, 4 passed" in run.stdout
    assert "crashed while running 'test_0.py::test_crashes'" in run.stdout
    assert sorted(log.read_text().split()) == ["a", "b", "c", "crashes", "d"], "each ran once"


def test_process_imports_the_files_that_it_runs_alone(tmp_path: Path) -> None:
    """A file that is two processes' would be imported twice; its import and its tests are in one process."""
    imported = "import os\nwith open('imported', 'a') as log: log.write(f'{__name__} {os.getpid()}\\n')\n"
    one = "import os, time\ndef test_runs():\n    import pathlib\n"
    one += "    other = pathlib.Path('there-' + {other!r})\n    pathlib.Path('there-' + {own!r}).touch()\n"
    one += "    while not other.exists(): time.sleep(0.01)\n"  # so that each process has a file
    for own, other in (("0", "1"), ("1", "0")):
        (tmp_path / f"test_{own}.py").write_text(imported + one.format(own=own, other=other))
    run = run_files(tmp_path, processes=2)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.split() for line in (tmp_path / "imported").read_text().splitlines()]
    assert sorted(name for name, _ in lines) == ["test_0", "test_1"]
    assert len({process for _, process in lines}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "crashed while running 'test_0.py'"),
    ],
    ids=["raises", "warns", "crashes"],
)
def test_file_that_cannot_be_imported_fails_the_run(begin: str, end: str, tmp_path: Path) -> None:
    """The other files' tests run all the same."""
    log = write_files(tmp_path)
    (tmp_path / "test_0.py").write_text(f"{begin}\n\ndef test_e():\n    pass\n")
    run = run_files(tmp_path)
    assert run.returncode == 1, run.stdout + run.stderr
    assert end in run.stdout
    assert "2 passed, 1 " in run.stdout or "1 failed, 2 passed" in run.stdout
    assert sorted(log.read_text().split()) == ["c", "d"]


SLOW = """
import os, pytest

@pytest.mark.slow
def test_slow():
    test_quick()

def test_quick():
    assert "SPRINGTIDE_TESTS" not in os.environ
"""


@pytest.mark.parametrize("chosen", [[], ["-k", "test"]], ids=["files", "tests"])
def test_slow_tests_are_left_out_of_a_quick_run(chosen: list[str], tmp_path: Path) -> None:
    """A suite that a test runs is whole: programs that tests start do not see the variable."""
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(SLOW)
    run = run_files(tmp_path, *chosen, form="quick")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout
    assert "marked slow were left out: SPRINGTIDE_TESTS=all" in run.stdout
    run = run_files(tmp_path, *chosen)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 passed" in run.stdout
    assert "left out" not in run.stdout


def test_file_without_a_test_to_run_leaves_no_folder_open(tmp_path: Path) -> None:
    """Fixtures that the file shares with the one before it are torn down, though none of its tests runs."""
    fixture = "import pytest\n@pytest.fixture(scope='package', autouse=True)\ndef shared(): yield\n"
    slow = "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "conftest.py").write_text(fixture)
        (tmp_path / folder / f"test_{folder}.py").write_text("def test_quick(): pass\n")
    (tmp_path / "a" / "test_a_slow.py").write_text(slow)
    run = run_files(tmp_path, form="quick")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "2 passed" in run.stdout


def test_unknown_form_of_a_run_is_refused(tmp_path: Path) -> None:
    run = run_files(write_files(tmp_path).parent, form="fast")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "SPRINGTIDE_TESTS=fast: it is one of all, quick" in run.stderr
