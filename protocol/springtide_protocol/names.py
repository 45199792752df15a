"""Names of incarnations, generations and states: ordered, and unique without hearing anybody.

The order decides everything: the greatest state name wins, and only equal names mean equal state. Each name
has one spelling, in logs, status, events and documents: `1.0` is an incarnation, `1.0/3` a generation, and
`step 1500 of generation 1.0/3` a state.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Incarnation:
    """One life of the coordinator: (number the operator raised before the pod, restarts of its container)."""

    number: int
    restart: int = 0

    def __str__(self) -> str:
        return f"{self.number}.{self.restart}"

    @property
    def is_first(self) -> bool:
        """Whether no coordinator of this job can have lived before this one."""
        return self.number == 1 and self.restart == 0


@dataclass(frozen=True, order=True, slots=True)
class GenerationName:
    """A member list that was made once, by one incarnation; never used for a second try."""

    incarnation: Incarnation
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}/{self.number}"

    @property
    def key(self) -> tuple[int, int, int]:
        """Three numbers that order names: the incarnation's number and restart, and the generation's."""
        return (self.incarnation.number, self.incarnation.restart, self.number)

    @classmethod
    def of(cls, incarnation: int, restart: int, number: int) -> GenerationName:
        """Make a name of its `key`.

        Args:
            incarnation: the number that the operator raised.
            restart: of the coordinator's container.
            number: of the generation within its incarnation.
        """
        return cls(Incarnation(incarnation, restart), number)


@dataclass(frozen=True, order=True, slots=True)
class StateName:
    """A committed state; `step` counts the committed steps since the job began."""

    generation: GenerationName
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"


WITHOUT_JOB = GenerationName.of(0, 0, 0)
"""The generation of a script that trains without a job."""


def process_label(pod_name: str, process_id: str, local_rank: int) -> str:
    """Return the name by which people know a process: its pod, and its place there unless it is the first.

    Args:
        pod_name: "" outside of pods.
        process_id: random, used where there is no pod.
        local_rank: of the process in its pod, from 0.
    """
    name = pod_name or process_id
    return f"{name}/{local_rank}" if local_rank else name
