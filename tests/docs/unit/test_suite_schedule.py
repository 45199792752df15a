"""How several processes share the tests out."""

from __future__ import annotations

import pytest
from suite_schedule import scope_of


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
