"""The rules of `tests/conftest.py` and `tests/support` themselves."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings

import pytest
from leaks import blocking_threads, children, leaked
from required import is_required, require_tool


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", UserWarning, stacklevel=1)


def test_a_missing_tool_skips_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPRINGTIDE_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-tool is not on PATH"):
        require_tool("no-such-tool")


def test_a_missing_tool_that_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPRINGTIDE_REQUIRE", "helm, no-such-tool")
    with pytest.raises(pytest.fail.Exception, match="SPRINGTIDE_REQUIRE names it"):
        require_tool("no-such-tool")


def test_requirements_are_whole_names() -> None:
    assert is_required("helm", {"SPRINGTIDE_REQUIRE": "kubectl, helm"})
    assert not is_required("helm", {"SPRINGTIDE_REQUIRE": "helmfile"})
    assert not is_required("helm", {})


def test_a_leaked_thread_and_a_leaked_process_are_named() -> None:
    threads_before, children_before = blocking_threads(), children()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lines = leaked(threads_before, children_before, patience=0.0)
    finally:
        stop.set()
        thread.join()
        process.communicate(timeout=10)
    assert lines[0] == "thread 'forgotten'"
    assert str(process.pid) in lines[1]
    assert leaked(threads_before, children_before, patience=1.0) == []


@pytest.mark.parametrize("ended", [True, False])
def test_child_of_any_thread_is_found(ended: bool) -> None:
    """Started by another thread, which has ended since or not."""
    started, stop = threading.Event(), threading.Event()
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        processes.append(subprocess.Popen(["sleep", "600"]))
        started.set()
        stop.wait()

    thread = threading.Thread(target=start)
    thread.start()
    assert started.wait(30)
    if ended:
        stop.set()
        thread.join()
    try:
        assert processes[0].pid in children()
    finally:
        processes[0].kill()
        processes[0].wait()
        stop.set()
        thread.join()
    assert processes[0].pid not in children()
