"""Forks worker processes that have torch imported already, so that a test need not pay for the import each
time. In them, warnings are errors.

Reads JSON lines from standard input: {"env": {...}, "argv": [...], "log": PATH}; answers {"pid": N} for each,
and {"pid": N, "code": N} when a child has ended. Children are real processes with their own signals. It ends,
and kills its children, when its standard input is closed.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import threading
import types
import warnings
import weakref
from pathlib import Path
from typing import Any, NoReturn

warnings.simplefilter("error")
gc.disable()  # until all is imported, none of which is garbage

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 (the first optimizer of a process would import it, for seconds)

import springtide.api  # noqa: E402, F401 (imported once for all children)

# What children would each import for half of their processor time: coordinators, servers, and scripts.
PROGRAMS = (
    "grpc.aio",
    "grpc._channel",
    "springtide_coordinator.logs",
    "springtide_coordinator.service",
    "springtide_ps.server.metrics",
    "springtide_ps.server.registration",
    "springtide_ps.server.server",
    "springtide_ps.server.settings",
    "springtide.embedding.modules",
    "springtide.embedding.unmanaged",
    "torch.optim.swa_utils",
    "torch.profiler",
)
MORE = os.environ.get("ZYGOTE_IMPORTS", "").split()
"""Modules, beside PROGRAMS, that the scripts of one test's children import."""
for program in (*PROGRAMS, *MORE):
    with contextlib.suppress(ModuleNotFoundError):  # an earlier release may have it elsewhere
        importlib.import_module(program)


def _reap(children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        print(json.dumps({"pid": pid, "code": os.waitstatus_to_exitcode(status)}), flush=True)


def serve() -> tuple[dict[str, Any], types.CodeType] | None:
    """Fork on request. Returns the request and its script's code in a child, None in the parent at the end.

    A script is compiled once, at its first request, which is a tenth of what a short child would do.
    """
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    codes: dict[str, types.CodeType] = {}
    buffered = b""
    # What is here lives for ever: no child's end must take it apart, as torch does with its libraries one by
    # one, nor must collecting garbage in a child copy the pages that it is in.
    gc.enable()
    gc.collect()
    for thing in gc.get_objects():
        if type(thing) is weakref.finalize:
            thing.atexit = False
    gc.freeze()
    while True:
        select.select([0, wake_read], [], [], 0.2)
        _reap(children)
        if not select.select([0], [], [], 0)[0]:
            with contextlib.suppress(BlockingIOError):
                if select.select([wake_read], [], [], 0)[0]:
                    os.read(wake_read, 4096)
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return None
        buffered += chunk
        while b"\n" in buffered:
            line, buffered = buffered.split(b"\n", 1)
            request: dict[str, Any] = json.loads(line)
            script = request["argv"][0]
            if script not in codes:
                codes[script] = compile(Path(script).read_bytes(), script, "exec")
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(wake_read)
                os.close(wake_write)
                return request, codes[script]
            children.add(pid)
            print(json.dumps({"pid": pid}), flush=True)


def become(request: dict[str, Any], code: types.CodeType) -> None:
    """Run a script's code as __main__, with the request's arguments, environment and log."""
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.enable(2)  # a crash leaves where it was in the log
    os.environ.update(request["env"])
    sys.argv = request["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    torch.set_num_threads(1)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    exec(code, vars(main))


def end(code: int) -> NoReturn:
    """End as the interpreter does, but leave the memory as it is: to tear torch's modules down takes a child
    longer than all else that it does."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    wanted = serve()
    if wanted is not None:
        code = 0
        try:
            become(*wanted)
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except Exception:
            sys.excepthook(*sys.exc_info())
            code = 1
        end(code)
