"""SIGTERM before the library is in charge, and an end that comes also where the kernel drops signals.

[Note: process 1] A container's command is process 1 of its PID namespace. To it the kernel delivers only the
signals that it catches or blocks; one whose disposition is the default is dropped, also when the process
sends it to itself. So a process that is to end because of a signal exits with the code that the signal would
have given it, and never sends itself anything; and the handler is installed as soon as `springtide` is
imported, which is before torch is, unless the script imports that first.

Threads: signal handlers run in the main thread, which may stand in a write of its own; so a daemon thread
flushes the output.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

UNHEARD_SECONDS = 3.0
"""Time after SIGTERM for a coordinator to come back: a job that was deleted gets none, and shall be gone
soon.
"""
_FLUSH_SECONDS = 0.5


def catch_early(environ: Mapping[str, str] = os.environ) -> None:
    """End at once on SIGTERM, in a job, until `springtide.init()` takes over.

    Nothing happens outside of a job, in a thread, in a child of `multiprocessing` (it is not process 1, and
    its parent looks at how it died), or where the script handles SIGTERM itself.
    """
    if not environ.get("SPRINGTIDE_COORDINATOR"):
        return
    processes = sys.modules.get("multiprocessing.process")  # a child has it from its start
    if processes is not None and processes.parent_process() is not None:
        return
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _OnEarlyTerm())


def is_ours_or_default(handler: object) -> bool:
    """Return whether a handler of SIGTERM may be replaced: the script has not installed it."""
    return handler is signal.SIG_DFL or isinstance(handler, _OnEarlyTerm)


def end_by(number: signal.Signals) -> NoReturn:
    """End the process at once with the code of a process that the signal killed.

    Output that was printed or logged is written, as far as that takes no longer than half a second.
    """
    # In a thread of its own: the signal may have interrupted the very write that holds the stream's lock.
    flush = threading.Thread(target=_flush, name="springtide-flush", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and takes no new threads
        flush.start()
        flush.join(_FLUSH_SECONDS)
    os._exit(128 + number)


def end_as_child(number: signal.Signals) -> NoReturn:
    """Die of the signal, in a process that was forked from the one that installed the handler.

    It is not process 1, and its parent waits for a death by that very signal.
    """
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked


class _OnEarlyTerm:
    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            end_as_child(signal.SIGTERM)
        end_by(signal.SIGTERM)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, broken, or replaced by something else
            stream.flush()
    for handler in [*logging.getLogger().handlers, *logging.getLogger("springtide").handlers]:
        with contextlib.suppress(Exception):
            handler.flush()
