"""Which of the processes this one is, and functions that run on some of them alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from springtide import api
from springtide.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def on_ranks(*ranks: int) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
    """Decorate a function that only the processes of these ranks run; the others return None at once.

    The rank is that of the moment of the call, as members come and go. Ranks that are not there run nothing.
    Raise UsageError for anything but numbers from 0.
    """
    if not ranks or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in ranks):
        raise UsageError(f"on_ranks{ranks!r}: name the ranks that run the function, numbers from 0")

    def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
        @functools.wraps(function)
        def run(*arguments: P.args, **keywords: P.kwargs) -> R | None:
            return function(*arguments, **keywords) if api.rank() in ranks else None

        return run

    return decorate


def rank_zero_only(function: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function that only rank 0 runs; see `on_ranks`. Alone, the one process is rank 0."""
    return on_ranks(0)(function)
