"""Rules for every test: warnings are errors (pyproject.toml), and nothing is left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

# Gauges named *_created would double every metric; images set the same.
os.environ.setdefault("PROMETHEUS_DISABLE_CREATED_SERIES", "true")
# The machines that test have few cores: two torch threads per process would fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each import of torch would look through all installed packages for devices that nobody has here.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import hypothesis
import pytest
from forked_start import forked
from gpu_capabilities import capability_of
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from late_collection import pytest_pycollect_makemodule, pytest_runtestloop
from leaks import blocking_threads, child_ids, leaked
from required import require_tool as _require_tool
from suite_rights import (
    pytest_configure,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_unconfigure,
)
from suite_schedule import pytest_configure_node, pytest_xdist_make_scheduler

pytest_plugins = ("slow_tests", "unit_guard")
# The comparison of rights at the session's end, who runs which tests, and when they are collected.
HOOKS = (
    pytest_configure,
    pytest_configure_node,
    pytest_pycollect_makemodule,
    pytest_runtest_logreport,
    pytest_runtestloop,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_unconfigure,
    pytest_xdist_make_scheduler,
)

# The same examples in every run, as long as a test is unchanged: who changes something else should not be the
# one to find what is wrong here. `make chaos` looks for new ones. No limits of time: some machines are slow.
hypothesis.settings.register_profile(
    "springtide",
    deadline=None,
    derandomize="SPRINGTIDE_EXPLORE" not in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("springtide")

if "SPRINGTIDE_EXPLORE" not in os.environ:
    # Examples would also be made of constants in the source of all modules that are imported at the moment:
    # others with each change of any, and with each order of files, since a process imports what it runs.
    _none, _name = Constants(), "_get_local_constants"
    setattr(providers, _name, lambda: _none)

# Python looks for garbage after every 700 new objects, which is a sixteenth of the suite's time.
gc.set_threshold(20_000, 20, 20)

pytest.register_assert_rewrite("worker_checks")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process or a thread that would keep the interpreter alive."""
    threads_before, children_before = blocking_threads(), child_ids()
    yield
    lines = leaked(threads_before, children_before)
    if lines:
        pytest.fail("the test left behind: " + "; ".join(lines), pytrace=False)


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Begin the fork server of this process before a test that uses it, which must leave no child behind."""
    with forked():
        return


@pytest.fixture
def require_tool() -> Callable[[str], str]:
    """`require_tool("kubectl")` returns its path, or skips (fails when SPRINGTIDE_REQUIRE names it)."""
    return _require_tool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: several processes share them out in this order.

    A test that needs a device says which capability it shows.
    """
    for item in items:
        capability_of(item)
    kinds = ("e2e", "fuzz", "component", "unit")

    def kind(item: pytest.Item) -> int:
        folders = item.path.relative_to(config.rootpath).parts
        return next((number for number, name in enumerate(kinds) if name in folders), 0)

    items.sort(key=kind)


def pytest_collection_finish() -> None:
    """Set aside what has been collected: a million objects, which each look for garbage would read."""
    gc.collect()
    gc.freeze()
