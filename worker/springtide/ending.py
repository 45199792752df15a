"""How the process ends: the outcome that is written, and SIGTERM as a wish to leave."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import time
from types import TracebackType

from springtide import outcome
from springtide.checkpoint.keeper import FLUSH_SECONDS
from springtide.errors import ServerStepError
from springtide.runtime import Runtime
from springtide.termination import end_as_child, end_by, is_ours_or_default

log = logging.getLogger("springtide")

_FAILED_FLUSH_SECONDS = 10.0


def install(runtime: Runtime) -> None:
    """Hook into the interpreter's end, and into SIGTERM unless the script handles that itself."""
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if runtime.outcome is None:
            runtime.outcome = outcome.failed(error)
            # Files, network and memory: the same step may well succeed elsewhere or later.
            runtime.failed_outside = isinstance(error, OSError | MemoryError | ServerStepError)
        previous(kind, error, trace)

    sys.excepthook = on_exception
    atexit.register(_at_exit, runtime, os.getpid())
    if runtime.settings.alone or threading.current_thread() is not threading.main_thread():
        return
    if is_ours_or_default(signal.getsignal(signal.SIGTERM)):
        process = os.getpid()
        signal.signal(signal.SIGTERM, lambda number, frame: _on_term(runtime, process))


def _at_exit(runtime: Runtime, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child, of a data loader for example
    if runtime.outcome is None:
        runtime.outcome = runtime.finished()
        if isinstance(runtime.outcome, outcome.Failed) and not runtime.settings.alone:
            log.error("%s", runtime.outcome.message)
    failed = isinstance(runtime.outcome, outcome.Failed)
    runtime.checkpoints.flush(_FAILED_FLUSH_SECONDS if failed else FLUSH_SECONDS)
    runtime.write_outcome()
    runtime.close()
    # The interpreter's end would look through all of torch's objects for garbage, for most of a second.
    gc.freeze()


def _on_term(runtime: Runtime, process: int) -> None:
    """First: ask to leave at the next boundary. Second: end now. See [Note: process 1] in `termination`."""
    if os.getpid() != process:
        end_as_child(signal.SIGTERM)  # of a data loader for example, which its parent ends
    session = runtime.session
    if session is None or session.term_at is not None:
        end_by(signal.SIGTERM)
    # Only a mark: a handler may interrupt code that holds a lock.
    session.term_at = time.monotonic()
    if session.membership.generation is None:
        # It holds nothing and nobody waits for it.
        runtime.outcome = outcome.Left("SIGTERM before it joined")
        raise SystemExit(0)
