"""Names of incarnations, generations and states: ordered, and unique without hearing anybody.

The order decides everything: the greatest state name wins, and only equal names mean equal state.
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
        return f"{self.number}@{self.incarnation}"


@dataclass(frozen=True, order=True, slots=True)
class StateName:
    """A committed state; `step` counts the committed steps since the job began."""

    generation: GenerationName
    step: int

    def __str__(self) -> str:
        return f"step {self.step} of generation {self.generation}"
