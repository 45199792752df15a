"""The report of what works on a device: collected, counted and shown without one."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import gpu_run
import jsonschema
import pytest
from gpu_capabilities import (
    CAPABILITIES,
    FIGURES,
    capability_of,
    cuda_param,
    figures_of,
    files_with_gpu_tests,
    needs_cuda,
    record_figure,
)
from gpu_report import SCHEMA, Outcome, exit_code, in_markdown, make_report, print_report, status_of
from rich.console import Console

ROOT = Path(__file__).resolve().parents[3]
DEVICE = {"name": "GPU", "capability": "9.0", "memory_gib": 79.6, "count": 1, "driver": None}
VERSIONS = {"springtide": "0.1.0", "torch": "2.13", "cuda": "13.0", "nccl": None, "python": "3.11"}
ALL_PASSED = [Outcome(f"test_{name}", name, "passed", 0.5) for name in CAPABILITIES]


def report(outcomes: list[Outcome], **more: Any) -> dict[str, Any]:
    """Return a report on `DEVICE` that follows the schema."""
    made = make_report(more.pop("device", DEVICE), VERSIONS, outcomes, seconds=1.0, **more)
    jsonschema.validate(made, SCHEMA)
    return made


def capability(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in found["capabilities"] if one["name"] == name)


def shown(found: dict[str, Any]) -> str:
    out = io.StringIO()
    print_report(found, Console(file=out, width=200))
    return out.getvalue()


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([], "not run"),
        (["passed", "skipped"], "passed"),
        (["skipped"], "skipped"),
        (["passed", "failed", "skipped"], "failed"),
    ],
)
def test_status_follows_from_outcomes(outcomes: list[str], status: str) -> None:
    assert status_of(outcomes) == status


def test_all_passed_is_success() -> None:
    found = report(ALL_PASSED)
    assert {one["status"] for one in found["capabilities"]} == {"passed"}
    assert all(one["reason"] is None for one in found["capabilities"])
    assert exit_code(found) == 0


def test_skipped_capability_says_why_and_is_no_failure() -> None:
    reason = "Duplicate GPU detected: NCCL refuses two ranks on one device"
    others = [outcome for outcome in ALL_PASSED if outcome.capability != "nccl-two"]
    found = report([*others, Outcome("test", "nccl-two", "skipped", 0.1, reason)])
    one = capability(found, "nccl-two")
    assert (one["status"], one["reason"]) == ("skipped", reason)
    assert exit_code(found) == 0
    assert reason in shown(found)


def test_capability_without_a_test_is_not_run() -> None:
    found = report([outcome for outcome in ALL_PASSED if outcome.capability != "joins"])
    one = capability(found, "joins")
    assert (one["status"], one["reason"], one["tests"]) == ("not run", "no test of it was found", [])
    assert exit_code(found) == 1


def test_capability_with_tests_left_over_is_not_run() -> None:
    """A capability counts as passed only where all of its tests ran."""
    found = report(ALL_PASSED, not_run={"joins": "2 tests did not begin: the time was over"})
    assert capability(found, "joins")["status"] == "not run"
    assert exit_code(found) == 1


def test_failure_counts_beside_what_passed() -> None:
    found = report([*ALL_PASSED, Outcome("test", "joins", "failed", 90.0, "cut off [after 90 s]")])
    one = capability(found, "joins")
    assert (one["status"], one["reason"], one["seconds"]) == ("failed", "cut off [after 90 s]", 90.5)
    assert exit_code(found) == 1
    assert "cut off [after 90 s]" in shown(found)
    assert "1 passed, 1 failed" in shown(found)


def test_all_skipped_is_no_success() -> None:
    skipped = [Outcome(outcome.id, outcome.capability, "skipped", 0.0, "why") for outcome in ALL_PASSED]
    assert exit_code(report(skipped)) == 1


def test_without_a_device_everything_has_the_reason() -> None:
    found = report([], device=None, reason="torch finds no CUDA device")
    assert found["device"] is None
    assert {(one["status"], one["reason"]) for one in found["capabilities"]} == {
        ("not run", "torch finds no CUDA device")
    }
    assert exit_code(found) == 3
    assert shown(found) == "no device: torch finds no CUDA device\n"
    assert in_markdown(found) == "No device has been seen yet.\n"


def test_figures_stand_in_the_report() -> None:
    properties: list[tuple[str, object]] = [("other", 1)]
    record_figure(lambda name, value: properties.append((name, value)), "copy_overlap", 0.75)
    measured = Outcome("test", "figures", "passed", 1.0, figures=figures_of(properties))
    found = report([*ALL_PASSED, measured])
    assert {name: figure["value"] for name, figure in found["figures"].items()} == {
        **dict.fromkeys(FIGURES),
        "copy_overlap": 0.75,
    }
    assert "hidden behind compute: 0.750 (fraction)" in shown(found)
    assert "not measured" in shown(found)
    with pytest.raises(ValueError, match="'speed' is no figure"):
        record_figure(lambda *_: None, "speed", 1.0)


def test_markdown_has_a_row_for_each_capability() -> None:
    text = in_markdown(report(ALL_PASSED))
    rows = [line for line in text.splitlines() if "| passed |" in line]
    assert len(rows) == len(CAPABILITIES)
    assert text.startswith("GPU (compute capability 9.0, 79.6 GiB, 1 of them), driver None, CUDA 13.0")


def test_report_of_another_form_is_refused() -> None:
    found = report(ALL_PASSED)
    found["capabilities"][0]["status"] = "perhaps"
    with pytest.raises(jsonschema.ValidationError, match="perhaps"):
        jsonschema.validate(found, SCHEMA)


def test_marks_name_a_capability() -> None:
    for make in (needs_cuda, cuda_param):
        with pytest.raises(ValueError, match="'speed' is no capability: take one of steps"):
            make("speed")


def test_mark_without_a_capability_is_refused() -> None:
    class Item:
        nodeid = "test_file.py::test"

        def __init__(self, *marks: Any) -> None:
            self.marks = marks

        def get_closest_marker(self, name: str) -> Any:
            return next((mark.mark for mark in self.marks if mark.name == name), None)

    item: Any = Item()
    assert capability_of(item) == ""
    item = Item(pytest.mark.cuda("joins"))
    assert capability_of(item) == "joins"
    for mark in (pytest.mark.cuda("speed"), pytest.mark.cuda):
        item = Item(mark)
        with pytest.raises(pytest.UsageError, match=r"test_file\.py::test: the mark cuda names"):
            capability_of(item)


def test_every_capability_has_a_test() -> None:
    files = files_with_gpu_tests(ROOT / "tests")
    text = "".join(path.read_text() for path in files if path.name != Path(__file__).name)
    named = set(re.findall(r"(?:needs_cuda|cuda_param)\(\"([a-z-]+)\"", text))
    assert named == set(CAPABILITIES)


def test_every_figure_is_measured_by_a_test() -> None:
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*_gpu.py"))
    assert set(re.findall(r"record_figure\(\s*record_property, \"(\w+)\"", text)) == set(FIGURES)


def test_no_test_is_marked_past_the_capabilities() -> None:
    found = {path.name for path in (ROOT / "tests").rglob("test_*.py") if ".mark.cuda" in path.read_text()}
    assert found == {Path(__file__).name, "test_gpu_run.py"}  # which pretend


def test_limits_fit_into_eight_minutes() -> None:
    assert gpu_run.TEST_SECONDS < gpu_run.RUN_SECONDS <= 450.0
