"""How several processes share the tests out: a file is one process's, and so are folders whose tests share
much.

Each process with an end-to-end test would start a cluster, an operator and a silent job of its own; and these
tests, which compute most, would all run first and at once, each waiting for the others' processor time. Each
process with a test of several releases would make these releases and import torch for each of them.

A process collects the files that it runs, and no others (`late_collection`), unless the command line chooses
among their tests.

A process that crashes fails the test that it was in, and the run: another process takes its place, and runs
what is left of its files. xdist's own way runs that test again, in process after process, and then waits for
ever where one test is left of a file: a process begins a test when it knows the next one, or that there is
none.
"""

from __future__ import annotations

import contextlib

import pytest
from late_collection import DONE, LATE, can_be_late
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FOLDERS = ("tests/e2e", "tests/skew")


def scope_of(node: str) -> str:
    """Return what one process runs as a whole: a file, or one of FOLDERS.

    Args:
        node: id of a test, such as `tests/e2e/test_e2e_quiet.py::test_name`, or of a file.
    """
    path = node.split("::", 1)[0]
    return next((folder for folder in FOLDERS if path.startswith(f"{folder}/")), path)


class WholeFoldersScheduling(LoadFileScheduling):
    """xdist's `--dist loadfile` with each of FOLDERS as one file, and an end after a crash.

    A plugin itself: it notes which tests have begun and which have ended.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._begun: dict[str, set[str]] = {}
        self._running: dict[str, set[str]] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note a test that begins."""
        file = nodeid.split("::", 1)[0]
        self._begun.setdefault(file, set()).add(nodeid)
        self._running.setdefault(file, set()).add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note a test that has ended."""
        self._running[nodeid.split("::", 1)[0]].discard(nodeid)

    # Their names are what xdist asks to be overridden.

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take from a process that has ended the tests it had, for others.

        Args:
            node: the process.

        Returns:
            The id of the test in which it crashed, which nobody runs again, or of the file that it was about
            to import or to leave, whose tests nobody runs again; None where it had none left.
        """
        units = self.assigned_work.pop(node)
        left = [test for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return None
        crashed = left[0]
        running = self._running.get(crashed)
        if running:  # it had a file, whose other tests are left
            (crashed,) = running
        else:
            units[scope_of(crashed)][crashed] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = next(iter(self.workqueue))
        again = sorted({test for file in self.workqueue[scope] for test in self._begun.get(file, ())})
        # A process may have crashed, and nobody has noticed yet: `remove_node` gives its files to others.
        with contextlib.suppress(OSError):
            if again:
                node.sendcommand(DONE, ids=again)
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # With one test it would wait for the next.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)  # there is no such hook where xdist is off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return our way for `--dist loadfile`, None for others."""
    if config.getoption("dist") != "loadfile":
        return None
    scheduling = WholeFoldersScheduling(config, log)
    config.pluginmanager.register(scheduling)
    return scheduling


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """Say to a process whether it collects late."""
    config = node.config
    late = config.getoption("dist") == "loadfile" and can_be_late(config.option, config.args)
    node.workerinput[LATE] = late
