"""A process that the fork server makes cannot tell that it was not started as always, nor can others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fork_server
import pytest
from forked_start import forked, program_of

pytestmark = pytest.mark.skipif(not fork_server.can_clone(), reason="no way to clone is known here")

LOOK = """
import json, os, resource, signal, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "buffered": type(sys.stdout.buffer).__name__,
    "command": open("/proc/self/cmdline").read(), "comm": open("/proc/self/comm").read(),
    "begun with": sorted(open("/proc/self/environ").read().split("\\0")), "now": dict(os.environ),
    "parent": os.getppid(), "leads": os.getsid(0) == os.getpid() == os.getpgrp(), "folder": os.getcwd(),
    "mask": os.umask(0), "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "open": [os.readlink(f"/proc/self/fd/{n}") for n in (0,)], "threads": status["Threads"],
    "signals": [status[key] for key in ("SigBlk", "SigIgn", "SigCgt")],
}))
"""


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Begin the fork server before a test that must leave no child behind."""
    with forked():
        return


def looked(words: list[str], environment: dict[str, str], folder: Path, session: bool) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=folder,
        start_new_session=session,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_forked_process_is_like_one_that_was_started(kind: str, tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(LOOK)
    words = {"code": ["-c", LOOK], "script": ["look.py"], "module": ["-m", "look"]}[kind]
    # One with a session of its own, as a pod's; one without buffers, as the kubelet has it.
    environment = {"PATH": os.environ["PATH"], "A": "b c", "PYTHONPATH": "/nowhere", "PYTHONUNBUFFERED": "1"}
    if kind == "code":
        del environment["PYTHONUNBUFFERED"]
    plain = looked([*words, "x", "y z"], environment, tmp_path, session=kind != "code")
    with forked():
        seen = looked([*words, "x", "y z"], environment, tmp_path, session=kind != "code")
    assert seen == plain


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no more')", 1, "no more"),
        ("{}['a']", 1, "KeyError: 'a'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, "at the end"),
    ],
)
def test_end_of_forked_process_is_its_programs(code: str, status: int, said: str) -> None:
    with forked():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_killed_process_is_a_child_of_who_started_it() -> None:
    with forked():
        process = subprocess.Popen([sys.executable, "-c", "import time, torch; time.sleep(600)"])
    assert f"{process.pid}" in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


def test_programs_that_need_an_interpreter_anew_get_one(tmp_path: Path) -> None:
    def told(words: list[str]) -> bool:
        return program_of([words[0]], words, str(tmp_path)) is not None

    assert told([sys.executable, "-P", "-m", "json.tool"])
    assert not told([sys.executable, "-W", "error", "-c", "pass"])
    assert not told([sys.executable, "missing.py"])
    assert not told([sys.executable])
    assert not told(["/bin/sh", "-c", "true"])
    with forked():
        words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
        usual = subprocess.run(words, capture_output=True, text=True, check=True)
        seeded = os.environ | {"PYTHONHASHSEED": "1"}
        anew = subprocess.run(words, env=seeded, capture_output=True, text=True, check=True)
    assert (usual.stdout, anew.stdout) == ("True\n", "False\n")


def test_forked_process_multiplies_as_its_environment_says() -> None:
    """The library that multiplies matrices has not read its environment in the server."""
    code = "import torch; torch.ones(64, 64) @ torch.ones(64, 64); print(torch.backends.mkl.is_available())"
    for way in ("COMPATIBLE", "AUTO"):
        environment = os.environ | {"MKL_CBWR": way, "MKL_VERBOSE": "1"}
        with forked():
            words = [sys.executable, "-c", code]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert f"CNR:{way}" in done.stdout or done.stdout == "False\n"


def test_end_of_forked_process_leaves_what_its_server_had() -> None:
    """Finalizers of the server's modules are not called; those of the process's own objects are."""
    code = """
import atexit, os, weakref
import torch
inherited = [*weakref.finalize._registry]
assert any(finalizer.peek()[1].__qualname__ == "_del_library" for finalizer in inherited)
weakref.finalize(torch, print, "own")
# Called after all others: what begins first ends last.
atexit._clear()
atexit.register(lambda: print(sum(finalizer.alive for finalizer in inherited) == len(inherited)))
atexit.register(weakref.finalize._exitfunc)
"""
    with forked():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "own\nTrue\n"
