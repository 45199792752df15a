"""The message a container leaves behind: its termination message file, or the end of its log when it failed
and asked for that.
"""

from __future__ import annotations

import os
from pathlib import Path

from springtide_local.kubelet.logs import log_end

FILE_BYTES = 4096
LOG_BYTES = 2048
LOG_LINES = 80


def termination_message(file: Path, log: Path, policy: str, exit_code: int) -> str:
    """Return the message that a container leaves behind.

    Args:
        file: of the message; it may be gone.
        log: of the container.
        policy: `File` or `FallbackToLogsOnError` (container.terminationMessagePolicy).
        exit_code: of the container.
    """
    try:
        with open(file, "rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - FILE_BYTES))
            content = opened.read(FILE_BYTES)
    except OSError:
        # Removed or replaced by the container: as if it had left none.
        content = b""
    if content:
        return content.decode(errors="replace")
    if policy == "FallbackToLogsOnError" and exit_code != 0:
        return log_end(log, LOG_LINES, LOG_BYTES)
    return ""
