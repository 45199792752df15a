"""The kinds of job with servers that seeds of random faults draw, by the seed's version.

The draws of old versions stay as they are, so that their seeds reproduce the same runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chaos_seeds import Seed

DENSE: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 14, "pace": 0.015, "split": 2}
TABLES: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 14,
    "pace": 0.015,
    "model": "tables",
    "momentum": 0.0,
}
SUMS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 28,
    "pace": 0.015,
    "split": 2,
    "model": "sums",
    "lr": 0.01,
    "decay": 1.0,
    "momentum": 0.0,
}
"""Settings of a model whose parameters at the end are a sum over ranges, whatever their order: each counts
once in each chunk, or the numbers are others. The rate does not move, since a range that is taken over late
is computed with that of then.
"""
ROWS: dict[str, Any] = {**SUMS, "model": "rows"}
"""The same with tables beside the layers: each range counts once in each slice, too."""
ROUNDING = 1e-4
"""Largest difference of the sums' parameters between orders of the ranges; each range moves each layer by
more.
"""


@dataclass(frozen=True, slots=True)
class Job:
    """copies: of each part of the parameters. group: workers in one. switches: its consistency may change."""

    strategy: str
    consistency: str
    options: dict[str, Any]
    copies: int = 2
    group: int = 1
    switches: bool = False

    @property
    def exact(self) -> bool:
        """Whether all losses and learning rates are those of an undisturbed run."""
        return self.consistency == "Synchronous" and not self.switches

    def __str__(self) -> str:
        groups = f", groups of {self.group}" if self.group > 1 else ""
        return f"{self.strategy} {self.consistency}{groups}, {self.copies} copies"


TOGETHER = Job("ParameterServer", "Synchronous", DENSE)
HYBRID = Job("Hybrid", "Synchronous", TABLES)
RESTORED = Job("ParameterServer", "Synchronous", DENSE, copies=1)
"""Settings without copies, with which the job goes back to a checkpoint."""


def _sums(consistency: str, group: int) -> Job:
    return Job("ParameterServer", consistency, SUMS, group=group, switches=True)


def _rows(consistency: str, group: int) -> Job:
    return Job("ParameterServer", consistency, ROWS, group=group, switches=True)


_FIRST = (TOGETHER, HYBRID, Job("ParameterServer", "BoundedStaleness", {**DENSE, "split": 1}), RESTORED)
_THIRD = (
    TOGETHER,
    _sums("Asynchronous", 2),
    _sums("Synchronous", 1),
    HYBRID,
    _sums("BoundedStaleness", 2),
    _sums("Asynchronous", 1),
    RESTORED,
    _sums("Synchronous", 2),
    _sums("BoundedStaleness", 1),
    Job("ParameterServer", "Synchronous", DENSE, group=2),
)
_ALONE = "ParameterServer", "Asynchronous"  # where parts have one copy
_FOURTH = (
    RESTORED,
    _rows("Asynchronous", 1),
    _sums("BoundedStaleness", 2),
    Job(*_ALONE, SUMS, copies=1),
    _rows("BoundedStaleness", 2),
    Job("Hybrid", "Synchronous", TABLES, group=2),
    _sums("Asynchronous", 1),
    _rows("Synchronous", 2),
    Job(*_ALONE, ROWS, copies=1),
    HYBRID,
    _sums("Asynchronous", 2),
    Job("ParameterServer", "Synchronous", DENSE, group=2),
    _rows("Asynchronous", 2),
    Job("ParameterServer", "BoundedStaleness", SUMS, copies=1, group=2),
    TOGETHER,
)
JOBS: dict[int, tuple[Job, ...]] = {
    1: _FIRST,
    2: _FIRST,
    3: _THIRD,
    **dict.fromkeys((4, 5, 6, 7, 8, 9), _FOURTH),
}
"""Jobs by version of the seed."""


def job_of(seed: Seed) -> Job:
    jobs = JOBS[seed.version]
    return jobs[seed.number % len(jobs)]
