"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many cores the process may keep busy: those it may run on, within its CPU limit.

    Args:
        cgroup: where the container's limit stands (`cpu.max`, or of version 1 `cpu/cpu.cfs_quota_us`).
    """
    cores = len(os.sched_getaffinity(0))
    limit = _limit(cgroup)
    return max(1, cores if limit is None else min(cores, math.ceil(limit)))


def _limit(cgroup: Path) -> float | None:
    """Return the CPU limit in cores; None: there is none."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return None
    try:
        found = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return found if found > 0 else None
