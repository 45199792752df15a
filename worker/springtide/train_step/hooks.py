"""Hooks of the library on a script's model, which stay behind when the model is copied or saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


class Hook:
    """call: what it does in this process. In a copy (`copy.deepcopy`) and in a file (`torch.save(model)`) it
    does nothing, and needs nothing of ours to be loaded.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of Python's own that takes anything and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")
