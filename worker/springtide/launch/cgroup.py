"""Facts from the container's control group: processes killed for want of memory, and the limits of CPUs and
memory.

Version 2 and version 1 of the hierarchy; `root` stands for the file system's root.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path


def out_of_memory_kills(root: Path = Path("/")) -> int | None:
    """Processes of this group that the kernel killed for want of memory; None where it is not said."""
    for folder in _folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            value = _field(folder / name, "oom_kill")
            if value is not None:
                return value
    return None


def cpu_limit(root: Path = Path("/")) -> float | None:
    """CPUs that the quota allows; None without a quota. The smallest of the group's and its parents'."""
    limits = [limit for folder in _folders(root, "cpu") if (limit := _quota(folder)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = Path("/")) -> int | None:
    """Bytes that this group may take until its limit or the machine's memory is reached; None if unknown.

    Of the group and its parents the one that has least. Files in the cache count as free.
    """
    found = []
    for line in _read(root / "proc/meminfo").splitlines():
        words = line.split()
        if words[:1] == ["MemAvailable:"]:
            found.append(int(words[1]) * 1024)
    for folder in _folders(root, "memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, taken = _read(folder / limit), _read(folder / used)
            if most.isdigit() and taken.isdigit():
                found.append(int(most) - int(taken) + (_field(folder / "memory.stat", cached) or 0))
    return max(0, min(found)) if found else None


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes that this group may take at all; None if unknown. The smallest limit of the group's and its
    parents', or else all that the machine has, with its swap.
    """
    limits = []
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (text := _read(folder / name)).isdigit():
                limits.append(int(text))
    machine = 0
    for line in _read(root / "proc/meminfo").splitlines():
        words = line.split()
        if words[:1] in (["MemTotal:"], ["SwapTotal:"]):
            machine += int(words[1]) * 1024
    # Version 1 writes an absurd number where there is no limit.
    return min([*limits, *([machine] if machine else [])], default=None)


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    if len(words) != 2:
        words = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    try:
        quota, period = float(words[0]), float(words[1])
    except ValueError:
        return None  # "max", or no such file
    return quota / period if quota > 0 and period > 0 and math.isfinite(quota) else None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The process's own group first, then its parents up to the hierarchy's root.

    In a container the hierarchy's root is usually the container's own group, whatever /proc says.
    """
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = top / controllers if controllers else top
        if controllers and not base.is_dir():
            base = top / controller
        own = base / path.lstrip("/")
        while own != base and base in own.parents:
            yield own
            own = own.parent
        yield base
    yield top
    yield top / controller


def _field(path: Path, name: str) -> int | None:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
