"""How several processes share the tests out: a file is one process's, and so are folders whose tests share
much.

Each process with an end-to-end test would start a cluster, an operator and a silent job of its own; and these
tests, which compute most, would all run first and at once, each waiting for the others' processor time. Each
process with a test of several releases would make these releases and import torch for each of them.

A process that crashes fails the test that it was in, and the run: another process takes its place, and runs
what is left of its files. xdist's own way runs that test again, in process after process, and then waits for
ever where one test is left of a file: a process begins a test when it knows the next one, or that there is
none.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

FOLDERS = ("tests/e2e", "tests/skew")


def scope_of(node: str) -> str:
    """Return what one process runs as a whole: a file, or one of FOLDERS.

    Args:
        node: id of a test, such as `tests/e2e/test_e2e_quiet.py::test_name`.
    """
    path = node.split("::", 1)[0]
    return next((folder for folder in FOLDERS if path.startswith(f"{folder}/")), path)


class WholeFoldersScheduling(LoadFileScheduling):
    """xdist's `--dist loadfile` with each of FOLDERS as one file, and an end after a crash."""

    # Their names are what xdist asks to be overridden.

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def remove_node(self, node: WorkerController) -> str | None:
        """Take from a process that has ended the tests it had, for others.

        Args:
            node: the process.

        Returns:
            The id of the test in which it crashed, which nobody runs again; None where it had none left.
        """
        units = self.assigned_work.pop(node)
        left = [test for unit in units.values() for test, done in unit.items() if not done]
        if not left:
            return None
        units[scope_of(left[0])][left[0]] = True
        self.workqueue.update({scope: unit for scope, unit in units.items() if not all(unit.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0]

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        # With one test it would wait for the next.
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)  # there is no such hook where xdist is off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return our way for `--dist loadfile`, None for others."""
    return WholeFoldersScheduling(config, log) if config.getoption("dist") == "loadfile" else None
