"""How the processes begin that share the whole suite out: forked from one that has imported what tests need.

Each would otherwise import torch and the operator's libraries once for itself and once for its fork server,
which is eight times what one server does. A process that takes the place of one that crashed starts plainly,
and so do all where only some tests run: these may need nothing of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import pytest
from forked_start import forked


def runs_all(config: pytest.Config) -> bool:
    """Return whether this process shares the whole suite out among others."""
    option = config.option
    shares = bool(getattr(option, "tx", None)) and not hasattr(config, "workerinput")
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    return shares and whole and not option.keyword and not option.markexpr and not option.collectonly


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Generator[None]:
    """Let xdist start its processes, which it does here."""
    with forked() if runs_all(session.config) else contextlib.nullcontext():
        return (yield)
