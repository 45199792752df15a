"""Tests marked `slow`, which `SPRINGTIDE_TESTS=quick` leaves out.

They are a twelfth of the test functions and most of the suite's processor time: a component or end-to-end
test that takes more than 1.5 s of it on a usual machine with all its parameters, a unit test that takes more
than 0.7. Without the variable, or with `all`, every test runs, as in continuous integration.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

VARIABLE = "SPRINGTIDE_TESTS"
FORMS = ("all", "quick")
_INPUT = "springtide_tests"
"""Name of the form in the input of xdist's processes."""
_form = pytest.StashKey[str]()


def form_of(config: pytest.Config) -> str:
    """Return which of FORMS this run has."""
    return config.stash.get(_form, "all")


def divided(items: list[pytest.Item], form: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests to run and those to leave out.

    Args:
        items: that were collected.
        form: one of FORMS.
    """
    if form == "all":
        return items, []
    marks = [item.get_closest_marker("slow") for item in items]
    both = list(zip(items, marks, strict=True))
    return [item for item, mark in both if mark is None], [item for item, mark in both if mark is not None]


def pytest_configure(config: pytest.Config) -> None:
    """Take the form from the environment. The programs that tests start, and other runs of tests among them,
    are not to see it.

    Raises:
        pytest.UsageError: it is none of FORMS.
    """
    given = getattr(config, "workerinput", {}).get(_INPUT) or os.environ.pop(VARIABLE, "") or "all"
    if given not in FORMS:
        raise pytest.UsageError(f"{VARIABLE}={given}: it is one of {', '.join(FORMS)}")
    config.stash[_form] = given
    config.addinivalue_line(
        "markers", f"slow: takes seconds of processor time; {VARIABLE}=quick leaves it out"
    )


@pytest.hookimpl(optionalhook=True)  # there is no such hook where xdist is off
def pytest_configure_node(node: Any) -> None:
    """Tell one of xdist's processes the form."""
    node.workerinput[_INPUT] = form_of(node.config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the form says."""
    items[:], left_out = divided(items, form_of(config))
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say that tests were left out."""
    if form_of(terminalreporter.config) == "quick":
        terminalreporter.write_line(f"the tests marked slow were left out: {VARIABLE}=all runs them too")
