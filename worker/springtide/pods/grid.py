"""Lay a generation's processes out: pods in one direction, local ranks in the other. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Placed(Protocol):
    """A member, of which the pod is known and the number there."""

    @property
    def pod_uid(self) -> str: ...

    @property
    def pod_name(self) -> str: ...

    @property
    def local_rank(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """A process's place.

    Attributes:
        pod: number of this process's pod in the generation, from 0.
        pods: how many there are.
        row: ranks in the generation of the processes with this one's local rank, in the order of the pods.
    """

    pod: int
    pods: int
    row: tuple[int, ...]


def grid_of(members: Sequence[Placed], rank: int, processes: int) -> Grid:
    """Return where a member stands.

    Args:
        members: of a generation, in rank order.
        rank: of the member.
        processes: that each pod has.

    Raises:
        ValueError: a pod is there in part; the missing local ranks are named.
    """
    by_pod: dict[str, dict[int, int]] = {}
    names: dict[str, str] = {}
    for number, member in enumerate(members):
        by_pod.setdefault(member.pod_uid, {})[member.local_rank] = number
        names[member.pod_uid] = member.pod_name
    for uid, ranks in by_pod.items():
        if missing := [local for local in range(processes) if local not in ranks]:
            raise ValueError(
                f"pod {names[uid]} trains as one, and its processes {missing} (of {processes}) are not in "
                "this generation"
            )
    own = members[rank]
    order = list(by_pod)
    row = tuple(by_pod[uid][own.local_rank] for uid in order)
    return Grid(order.index(own.pod_uid), len(order), row)
