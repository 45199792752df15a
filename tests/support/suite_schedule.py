"""How several processes share the tests out: a file is one process's, and so are folders whose tests share
much.

Each process with an end-to-end test would start a cluster, an operator and a silent job of its own; and these
tests, which compute most, would all run first and at once, each waiting for the others' processor time. Each
process with a test of several releases would make these releases and import torch for each of them.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/e2e", "tests/skew")


def scope_of(node: str) -> str:
    """Return what one process runs as a whole: a file, or one of FOLDERS.

    Args:
        node: id of a test, such as `tests/e2e/test_e2e_quiet.py::test_name`.
    """
    path = node.split("::", 1)[0]
    return next((folder for folder in FOLDERS if path.startswith(f"{folder}/")), path)


class WholeFoldersScheduling(LoadFileScheduling):
    """xdist's `--dist loadfile` with each of FOLDERS as one file."""

    def _split_scope(self, nodeid: str) -> str:  # what xdist asks to be overridden
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)  # there is no such hook where xdist is off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """Return our way for `--dist loadfile`, None for others."""
    return WholeFoldersScheduling(config, log) if config.getoption("dist") == "loadfile" else None
