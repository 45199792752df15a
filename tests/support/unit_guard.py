"""Fail a unit test that starts a process or opens a socket.

Sockets of gRPC and of gloo are made outside of Python, where nobody sees them. Libraries that begin something
while they are imported (torch asks ldconfig for others, urllib3 binds a socket) are no test's doing: which
test is the first to import them depends on the order.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sysconfig
import traceback
from collections.abc import Callable, Generator
from typing import Any

import pytest

_WATCHED: tuple[tuple[Any, str], ...] = (
    (os, "fork"),
    (os, "posix_spawn"),
    (os, "system"),
    (socket.socket, "bind"),
    (socket.socket, "connect"),
    (socket.socket, "connect_ex"),
    (subprocess.Popen, "__init__"),
)
_IMPORTS = "<frozen importlib._bootstrap>"
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_seen: list[str] = []


def _noted(owner: Any, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*arguments: Any, **named: Any) -> Any:
        if not _is_of_a_library():
            _seen.append(f"{owner.__name__}.{name}")
        return original(*arguments, **named)

    return noted


def _is_of_a_library() -> bool:
    """Return whether the calling thread is importing a library, which begins it by itself."""
    module = ""
    for frame, _ in traceback.walk_stack(None):
        if frame.f_code.co_filename == _IMPORTS:
            return module.startswith(_LIBRARIES)
        if frame.f_code.co_name == "<module>":
            module = frame.f_code.co_filename
    return False


def is_unit(item: pytest.Item) -> bool:
    """Return whether the test lies in a folder `unit`."""
    return item.path.parent.name == "unit"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note what a unit test, or a fixture of its, begins."""
    if not is_unit(item):
        return (yield)
    _seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in _WATCHED:
            patch.setattr(owner, name, _noted(owner, name, getattr(owner, name)))
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail it."""
    yield
    if is_unit(item) and _seen:
        pytest.fail(
            f"a unit test starts no process and opens no socket, and this one did: {', '.join(_seen)}; "
            "such tests lie in a folder `component`",
            pytrace=False,
        )
