"""Fail a test that starts a process or opens a socket: `make unit` runs with this plugin.

Sockets of gRPC and of gloo are made outside of Python, where nobody sees them.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from collections.abc import Generator
from typing import Any

import pytest

_seen: list[str] = []


def _note(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def noted(*arguments: Any, **named: Any) -> Any:
        _seen.append(f"{owner.__name__}.{name}")
        return original(*arguments, **named)

    setattr(owner, name, noted)


for _owner, _name in (
    (os, "fork"),
    (os, "posix_spawn"),
    (os, "system"),
    (socket.socket, "bind"),
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (subprocess.Popen, "__init__"),
):
    _note(_owner, _name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    _seen.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    yield
    if _seen:
        pytest.fail(
            f"a unit test starts no process and opens no socket, and this one did: {', '.join(_seen)}; "
            "such tests lie in a folder `component`",
            pytrace=False,
        )
