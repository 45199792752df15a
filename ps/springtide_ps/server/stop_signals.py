"""Blocks the signals that end a server, for what takes its time to import: to be imported first of all.

Process 1 of a container is sent only what it catches or blocks. A blocked signal waits for `sigwait`, and
every thread that comes into being later leaves these signals to it, too.
"""

from __future__ import annotations

import signal

STOPPING = (signal.SIGTERM, signal.SIGINT)

signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
