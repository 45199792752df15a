"""Have the C library keep the memory that a step frees, for the next one.

glibc gives the end of its heap back to the system as soon as 128 KiB of it are free (twice the largest block
that was ever mapped alone, once one was freed), and maps each large block alone. A training step frees all of
its activations, so their pages go and come again with every step: up to 20,000 faults, half of the step's
time in the worst layout that was seen, and none in another start of the same script, by where a long-lived
block happens to lie.

Sources: mallopt(3); `systrim` and `free` in glibc's malloc.c.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from springtide.launch.cgroup import memory_limit

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of mallopt's parameters."""
MOST_KEPT = 1 << 30
"""Bytes of free memory at the heap's end that stay with the process, at most."""
_SHARE_KEPT = 16
"""The container's limit over this is the most that is kept, too."""
LARGEST_ON_HEAP = 32 << 20
"""Bytes of the largest block that the heap has; larger ones are mapped alone. glibc takes no more."""
_TUNED_BY = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
"""Variables by which a user tunes glibc's allocator."""


def bytes_to_keep(environ: Mapping[str, str], limit: int | None) -> int | None:
    """Return how many free bytes the heap should keep; None: it is left as it is. PURE.

    It is left where the user has tuned it, or has put another allocator in its place.

    Args:
        environ: Of the process.
        limit: Bytes that the container may take; None if unknown.
    """
    if any(name in environ for name in _TUNED_BY) or "malloc" in environ.get("LD_PRELOAD", ""):
        return None
    if "glibc.malloc" in environ.get("GLIBC_TUNABLES", ""):
        return None
    return MOST_KEPT if limit is None else min(MOST_KEPT, limit // _SHARE_KEPT)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Have the heap of this process keep what is freed, unless the user has tuned it.

    Args:
        environ: Of the process.

    Returns:
        Whether it does now. Not with another C library, which has other rules.
    """
    kept = bytes_to_keep(environ, memory_limit())
    if kept is None:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Both: to set one ends what glibc does about the other by itself.
    return bool(mallopt(_M_TRIM_THRESHOLD, kept)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_ON_HEAP))
