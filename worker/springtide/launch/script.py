"""PURE: what a script that knows nothing of the library finds in its environment, and whose failure it was.

The names are those of torchrun, so that `init_process_group("env://")` and everything built on it works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_OURS = (
    "SPRINGTIDE_COORDINATOR",
    "SPRINGTIDE_TOKEN",
    "SPRINGTIDE_TERMINATION_LOG",
    "SPRINGTIDE_METRICS_PORT",
)


class Member(Protocol):
    """A process of a generation; members come in the order of ranks."""

    @property
    def id(self) -> str: ...
    @property
    def pod_uid(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Facts that all ranks of one generation agree on. restarts: rounds before this one."""

    run_id: str
    master: str
    port: int
    restarts: int


def variables(
    environ: Mapping[str, str], members: Sequence[Member], me: str, rendezvous: Rendezvous
) -> dict[str, str]:
    """Return the script's environment: torchrun's names added, what makes a process a member of the job left
    out.

    Args:
        environ: the launcher's.
        members: of the generation, by rank.
        me: id of this member.
        rendezvous: where the script's processes meet.

    Raises:
        ValueError: `me` is not one of the members.
    """
    ids = [member.id for member in members]
    rank = ids.index(me)
    pods = list(dict.fromkeys(member.pod_uid for member in members))
    own = [member.id for member in members if member.pod_uid == members[rank].pod_uid]
    world, pod = len(members), pods.index(members[rank].pod_uid)
    return {
        **{name: value for name, value in environ.items() if name not in _OURS},
        "SPRINGTIDE_LAUNCHER": "torchrun",
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(own.index(me)),
        "LOCAL_WORLD_SIZE": str(len(own)),
        "GROUP_RANK": str(pod),
        "GROUP_WORLD_SIZE": str(len(pods)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": rendezvous.master,
        "MASTER_PORT": str(rendezvous.port),
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(rendezvous.restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a member's script by itself (unix seconds; infinite: none), and the members of its
    generation.
    """

    at: float = math.inf
    company: tuple[str, ...] = ()
    """Ids of the members of that generation."""

    def to_json(self) -> bytes:
        at = None if math.isinf(self.at) else self.at
        return json.dumps({"at": at, "company": list(self.company)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Failure:
        """Raise ValueError."""
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"not a failure: {text[:100]!r}")
        at = fields.get("at")
        return cls(math.inf if at is None else float(at), tuple(map(str, fields.get("company") or ())))


def culprit(failures: Mapping[str, Failure], members: Iterable[str]) -> str:
    """Return the member whose script ended the last generation.

    The first failure is the cause and the others follow from it, as peers lose their connections. Where a
    member of the failed generation is gone, its loss was the cause.

    Args:
        failures: by the member's id: when its script failed, and with which members it ran.
        members: ids of the members of now.

    Returns:
        Its id; "" for nobody.
    """
    present = set(members)
    failed = {member: failure for member, failure in failures.items() if math.isfinite(failure.at)}
    if not failed or any(set(failure.company) - present for failure in failed.values()):
        return ""
    return min(failed, key=lambda member: (failed[member].at, member))


@dataclass(slots=True)
class Attempts:
    """How often scripts of one pod may fail; `calm` seconds without a failure give all attempts back."""

    limit: int
    calm: float = 600.0
    spent: int = 0
    _failed_at: float = -math.inf

    def failed(self, now: float) -> bool:
        """Count a failure; True when it was one too many."""
        if now - self._failed_at > self.calm:
            self.spent = 0
        self._failed_at = now
        self.spent += 1
        return self.spent > self.limit
