"""A run of the whole suite leaves every other case of slow tests out."""

from __future__ import annotations

from pathlib import Path

from suite_sample import SLOW, left_out

ROOT = Path(__file__).resolve().parents[3]


def test_every_other_case_of_a_slow_function_is_left_out() -> None:
    slow = "tests/worker/component/test_worker_points.py::"
    nodes = [f"{slow}test_a[1]", f"{slow}test_b", f"{slow}test_a[2]", f"{slow}test_a[3]", "tests/x.py::y[2]"]
    assert left_out([*nodes, f"{slow}test_c[1]"]) == {f"{slow}test_a[2]"}


def test_slow_files_exist() -> None:
    assert all((ROOT / name).is_file() for name in SLOW)
