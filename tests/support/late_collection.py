"""Files whose tests are collected where and when they run, by the one process that runs them.

Each of xdist's processes would collect all tests of the suite, though it runs a part of them: to import and
to collect everything takes half a minute of processor time. With this, processes agree on files alone.
`suite_schedule` hands these out, and says of a file that a process had when it crashed which of its tests
have run (`DONE`).
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.warnings import catch_warnings_for_item

LATE = "springtide_late_collection"
"""Name of what says so in the input of xdist's processes."""
DONE = "springtide_done"
"""Command with ids of tests that are not to run again."""
_MANY_MODULES = 200
_OPEN = "_setupstate"
"""Attribute of a session with what is set up now; there is no public way to it without a test that ends."""


def can_be_late(option: Any, args: Iterable[str]) -> bool:
    """Return whether a run takes files as they are, and no choice of their tests.

    Args:
        option: of pytest's command line.
        args: what is to be run.
    """
    chosen = ("keyword", "markexpr", "deselect", "lf", "failedfirst", "newfirst", "stepwise")
    return not any(getattr(option, name, None) for name in chosen) and not any("::" in arg for arg in args)


class LateFile(pytest.Item):
    """A file whose tests nobody has collected yet."""

    def runtest(self) -> NoReturn:
        """Raise NotImplementedError: `run_file` runs its tests."""
        raise NotImplementedError

    def collected(self) -> list[pytest.Item]:
        """Import the file and return its tests; a failure to do so is reported as in any collection."""
        modules = len(sys.modules)
        module = pytest.Module.from_parent(self.parent, path=self.path)
        config = self.config
        with catch_warnings_for_item(config, config.hook, "collect", None):
            tests = [*self.session.genitems(module)]
            config.hook.pytest_collection_modifyitems(session=self.session, config=config, items=tests)
        if len(sys.modules) > modules + _MANY_MODULES:  # each look for garbage would read what they brought
            gc.collect()
            gc.freeze()
        return tests


def is_late(config: pytest.Config) -> bool:
    """Return whether this is one of xdist's processes, which has been told to collect late."""
    return bool(getattr(config, "workerinput", {}).get(LATE))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    """Return the file in the place of its tests' collector."""
    if not is_late(parent.config):
        return None
    node = Path(os.path.relpath(module_path, parent.config.rootpath)).as_posix()
    return LateFile.from_parent(parent, name=module_path.name, path=module_path, nodeid=node)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Have xdist's loop, which follows, run files."""
    if is_late(session.config):
        plugins = session.config.pluginmanager.get_plugins()
        (worker,) = (plugin for plugin in plugins if type(plugin).__name__ == "WorkerInteractor")
        LateWorker(worker, session).attach()


class LateWorker:
    """Run files in one of xdist's processes.

    Args:
        worker: its `WorkerInteractor`, whose loop calls `run_file`.
        session: of this process.
    """

    def __init__(self, worker: Any, session: pytest.Session) -> None:
        self._worker, self._session = worker, session
        self._handle_command = worker.handle_command
        self._done: set[str] = set()

    def attach(self) -> None:
        """Take the place of two methods, which xdist looks up at each use."""
        self._worker.run_one_test = self.run_file
        self._worker.handle_command = self._heed

    def _heed(self, command: Any) -> None:
        if isinstance(command, Sequence) and command[0] == DONE:
            self._done.update(command[1]["ids"])
        else:
            self._handle_command(command)

    def run_file(self) -> None:
        """Collect the file that is next, and run its tests, once the one after it is known."""
        worker, session, began = self._worker, self._session, time.perf_counter()
        items = session.items
        worker.item_index = number = worker.nextitem_index
        worker.nextitem_index = worker.torun.get()
        after = items[worker.nextitem_index] if isinstance(worker.nextitem_index, int) else None
        file = items[number]
        assert isinstance(file, LateFile)
        tests = [test for test in file.collected() if test.nodeid not in self._done]
        if not tests:  # the last test that ran left open what it has in common with this file
            getattr(session, _OPEN).teardown_exact(after)
        for test, following in pairwise([*tests, after]):
            assert test is not None
            items[number] = test  # a report is of the item that has this number
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        items[number] = file
        seconds = time.perf_counter() - began
        worker.sendevent("runtest_protocol_complete", item_index=number, duration=seconds)
