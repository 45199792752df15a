"""Regular expressions as Kubernetes has them: RE2's, in linear time and without looking ahead or back.

Python's own would accept more than an API server does, read `$` as the end of a line, and can take for ever.
"""

from __future__ import annotations

import functools
from typing import Any

import re2

_GO_WORDS = {
    "invalid perl operator": "invalid or unsupported Perl syntax",
    "missing )": "missing closing )",
    "invalid repetition size": "invalid repeat count",
}
_QUIET = re2.Options()
_QUIET.log_errors = False


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> Any:
    """Return a pattern to search with. Raises ValueError, with RE2's words, for what is none."""
    try:
        return re2.compile(pattern, _QUIET)
    except re2.error as problem:
        text = problem.args[0] if problem.args else ""
        raise ValueError(text.decode() if isinstance(text, bytes) else str(text)) from None


def problem(pattern: str) -> str | None:
    """Say what is wrong with a pattern, in the words of Go's library; None where it is one."""
    try:
        compiled(pattern)
    except ValueError as error:
        text = str(error)
        for words, go_words in _GO_WORDS.items():
            text = text.replace(words, go_words)
        head, _, rest = text.partition(": ")
        return f"error parsing regexp: {head}: `{rest}`" if rest else f"error parsing regexp: {text}"
    return None
