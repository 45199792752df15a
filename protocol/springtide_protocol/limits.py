"""Limits of messages and counts, far above every job and far below what could keep a process busy."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_STORE_VALUE_BYTES = 1024 * 1024
MAX_STORE_BYTES = 64 * 1024 * 1024
MAX_TEXT_CHARACTERS = 1000
MAX_CAPABILITIES = 64
MAX_CAPABILITY_CHARACTERS = 64

MAX_PROCESSES = 1_000_000
MAX_PROCESSES_PER_POD = 1024
MAX_SERVERS = 4096
MAX_SLOT = 10_000_000
MAX_STALENESS = 1_000_000
MAX_COUNT = 2**53
"""Limit of everything that is counted; whole numbers up to here are exact in JSON."""
MAX_PAUSE_SECONDS = 3600.0
MAX_STOP_SECONDS = 86_400.0
"""Longest time for a script to end in: a member that is told to park keeps all others waiting."""
MAX_PORT = 65_535
FOLLOW_SECRET_BYTES = 32
