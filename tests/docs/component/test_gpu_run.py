"""`make gpu`: what hangs is cut off, what crashes is told, and no device is no success."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from coordinator_process import until
from gpu_report import SCHEMA, Outcome, make_report
from gpu_run import Found, Limits, Run
from local_cluster import alive

ROOT = Path(__file__).resolve().parents[3]
SUPPORT = ROOT / "tests" / "support"
TESTS = """
import os, subprocess, threading
import pytest
from coordinator_process import until

@pytest.mark.cuda("steps")
@pytest.mark.parametrize("device", ["one", "two"])
def test_passes(device, record_property):
    record_property("figure copy_overlap", 0.5)

def test_without_the_mark():
    raise AssertionError("it is not of this run")

@pytest.mark.cuda("joins")
def test_fails():
    assert 1 == 2, "the sum differs"

@pytest.mark.cuda("joins")
def test_skips():
    pytest.skip("two devices")

@pytest.mark.cuda("aborts")
def test_a_crashes():
    os.abort()

@pytest.mark.cuda("aborts")
def test_b_hangs():
    child = subprocess.Popen(["sleep", "1000"])
    with open("child", "w") as file:
        file.write(str(child.pid))
    threading.Event().wait()

@pytest.mark.cuda("aborts")
def test_c_passes():
    pass
"""


def run(folder: Path, text: str, limits: Limits) -> Found:
    (folder / "test_pretended.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = cuda(capability): pretended\n")
    return Run([folder / "test_pretended.py"], limits, folder).all()


def named(found: Found) -> dict[str, Outcome]:
    return {outcome.id.partition("::")[2]: outcome for outcome in found.outcomes}


@pytest.mark.slow
def test_each_test_is_told_whatever_becomes_of_it(tmp_path: Path) -> None:
    found = run(tmp_path, TESTS, Limits(test=5.0))
    told = named(found)
    assert {name: (outcome.capability, outcome.outcome) for name, outcome in told.items()} == {
        "test_passes[one]": ("steps", "passed"),
        "test_passes[two]": ("steps", "passed"),
        "test_fails": ("joins", "failed"),
        "test_skips": ("joins", "skipped"),
        "test_a_crashes": ("aborts", "failed"),
        "test_b_hangs": ("aborts", "failed"),
        "test_c_passes": ("aborts", "passed"),
    }
    assert told["test_passes[one]"].figures == {"copy_overlap": 0.5}
    assert "the sum differs" in told["test_fails"].reason
    assert told["test_skips"].reason == "two devices"
    assert told["test_a_crashes"].reason == "its process ended with SIGABRT"
    assert told["test_b_hangs"].reason == "cut off: it did not end within 5 s"
    assert found.not_run == {}
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive(child), "the child of the test that hangs has ended")


def test_capabilities_beyond_the_time_are_not_run(tmp_path: Path) -> None:
    found = run(tmp_path, TESTS, Limits(run=0.0))
    assert found.outcomes == []
    assert found.not_run == {
        "steps": "2 tests did not begin: the 0 s of the run were over",
        "joins": "2 tests did not begin: the 0 s of the run were over",
        "aborts": "3 tests did not begin: the 0 s of the run were over",
    }


def test_tests_that_cannot_be_collected_are_not_run(tmp_path: Path) -> None:
    found = run(tmp_path, "import nothing_of_this_name", Limits())
    assert set(found.not_run.values()) == {"the tests could not be collected: pytest ended with 2"}
    report = make_report(None, {}, found.outcomes, seconds=0.0, not_run=found.not_run)
    assert {one["status"] for one in report["capabilities"]} == {"not run"}


@pytest.mark.slow
def test_make_gpu_without_a_device_is_no_success(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(SUPPORT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "gpu_run", "--out", str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 3, ended.stderr
    assert len(ended.stdout.splitlines()) == 1
    assert ended.stdout.startswith("no device: torch ")
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["device"] is None
    assert report["versions"]["torch"]
    assert all(one["reason"] == report["reason"] for one in report["capabilities"])
    makefile = (ROOT / "Makefile").read_text().split("\ngpu:", 1)[1].splitlines()[1]
    assert "PYTHONPATH=tests/support python -m gpu_run" in makefile
