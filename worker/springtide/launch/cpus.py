"""PURE: how many threads each process gets, and which CPUs: those nearest to its memory and its GPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def threads(allowed: int, quota: float | None, processes: int) -> int:
    """Return OMP_NUM_THREADS of each process: an equal part of the CPUs that may be used, at least one.

    Args:
        allowed: CPUs that this container may run on.
        quota: CPUs of its limit; None: there is none.
        processes: in this container, at least one.
    """
    cpus = float(allowed) if quota is None else min(float(allowed), quota)
    return max(1, int(cpus / processes))


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` as the kernel writes it. Raise ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def pinning(
    processes: int,
    allowed: frozenset[int],
    nodes: Mapping[int, frozenset[int]],
    gpu_nodes: Sequence[int] = (),
) -> list[frozenset[int] | None]:
    """Choose the CPUs of each process.

    A process goes to its GPU's node; without that the processes are spread over the nodes in equal blocks.
    Those of one node share its CPUs. Nobody is pinned on a machine of one node, nor where that would leave a
    process less than a CPU.

    Args:
        processes: in this container.
        allowed: CPUs of this container.
        nodes: CPUs by NUMA node.
        gpu_nodes: node of the GPU with that local rank, negative where the machine does not say.

    Returns:
        CPUs by local rank; None: no pinning.
    """
    usable = {number: cpus & allowed for number, cpus in nodes.items() if cpus & allowed}
    if len(usable) < 2:
        return [None] * processes
    order = sorted(usable)
    if len(gpu_nodes) == processes and all(node in usable for node in gpu_nodes):
        chosen = list(gpu_nodes)
    else:
        chosen = [order[rank * len(order) // processes] for rank in range(processes)]
    if any(len(usable[node]) < chosen.count(node) for node in set(chosen)):
        return [None] * processes
    return [usable[node] for node in chosen]


def read_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """CPUs by NUMA node, from /sys below `root`; empty where it does not say."""
    found: dict[int, frozenset[int]] = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            found[int(folder.name.removeprefix("node"))] = parse_cpu_list((folder / "cpulist").read_text())
        except (OSError, ValueError):
            continue
    return found


def read_gpu_nodes(root: Path = Path("/")) -> list[int]:
    """NUMA node of each NVIDIA GPU in the order of their PCI addresses; -1 where the machine does not say."""
    found = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        address = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", folder.name.lower())
        try:
            found.append(int((root / "sys/bus/pci/devices" / address / "numa_node").read_text()))
        except (OSError, ValueError):
            found.append(-1)
    return found
