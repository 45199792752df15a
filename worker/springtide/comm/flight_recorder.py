"""Switch off torch's flight recorder where nobody reads what it records."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables that say how many collectives the recorder keeps: torch's name of it, and its older one."""


def record_no_flights(environ: MutableMapping[str, str] = os.environ, on_device: bool | None = None) -> None:
    """Have torch note no collectives on a machine without a device. Call before any group exists.

    The recorder collects the Python stack of each collective, a third of what it costs to begin a sum of a
    small tensor on gloo; its dumps are for NCCL's watchdog. A user's own setting stays.

    Args:
        environ: Of the process.
        on_device: Whether there is one; None: ask torch.
    """
    if torch.cuda.is_available() if on_device is None else on_device:
        return
    if not any(name in environ for name in _SIZES):
        environ[_SIZES[0]] = "0"
