"""Errors that end a command with one clear message.

CliError: base; `str()` is the whole message, `code` the exit code.
    Refused: nothing was started (bad manifest, no cluster, the API server said no); exit code 2.
"""

from __future__ import annotations

SUCCEEDED = 0
FAILED = 1
REFUSED = 2
INTERRUPTED = 130


class CliError(Exception):
    code = FAILED


class Refused(CliError):
    code = REFUSED
