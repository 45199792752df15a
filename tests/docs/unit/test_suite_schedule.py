"""How several processes share the tests out, and when they are forked from one."""

from __future__ import annotations

from argparse import Namespace
from typing import Any, cast

import pytest
from suite_schedule import scope_of
from suite_start import runs_all

SOURCE = pytest.Config.ArgsSource


@pytest.mark.parametrize(
    ("node", "scope"),
    [
        ("tests/e2e/test_e2e_quiet.py::test_a[x::y]", "tests/e2e"),
        ("tests/e2e/test_e2e_gone.py::test_b", "tests/e2e"),
        ("tests/skew/test_skew_jobs.py::test_e", "tests/skew"),
        ("tests/worker/unit/test_codec.py::TestIt::test_c", "tests/worker/unit/test_codec.py"),
        ("tests/local/component/test_e2e_suite.py::test_d", "tests/local/component/test_e2e_suite.py"),
    ],
)
def test_file_or_folder_that_shares_much_is_one_scope(node: str, scope: str) -> None:
    assert scope_of(node) == scope


@pytest.mark.parametrize(
    ("whole", "changed"),
    [
        (True, {}),
        (False, {"tx": []}),
        (False, {"keyword": "one"}),
        (False, {"markexpr": "cuda"}),
        (False, {"collectonly": True}),
        (False, {"args_source": SOURCE.ARGS}),
        (False, {"workerinput": {}}),
    ],
)
def test_processes_are_forked_where_all_tests_run(whole: bool, changed: dict[str, Any]) -> None:
    """All of the controller's options and arguments are those of `make test`, or all but one."""
    option = {"tx": ["popen"] * 4, "keyword": "", "markexpr": "", "collectonly": False}
    named = {name: value for name, value in changed.items() if name in option}
    rest = {"args_source": SOURCE.TESTPATHS} | {k: v for k, v in changed.items() if k not in option}
    config = Namespace(option=Namespace(**option | named), **rest)
    assert runs_all(cast(pytest.Config, config)) is whole
