"""Made-up training histories for the demo's tests."""

from __future__ import annotations

from springtide_demo.commits import Commit
from springtide_protocol.names import GenerationName

FIRST, SECOND, THIRD = GenerationName.of(1, 0, 1), GenerationName.of(1, 0, 2), GenerationName.of(1, 0, 3)


def commit(
    step: int,
    at: float,
    generation: GenerationName = FIRST,
    pod: str = "digits-worker-0-0",
    loss: float | None = 0.5,
    samples: int = 64,
) -> Commit:
    return Commit(step, generation, at, 0.01, samples, loss, pod)


def steady(
    first: int,
    last: int,
    start: float,
    generation: GenerationName = FIRST,
    every: float = 0.01,
    pod: str = "digits-worker-0-0",
) -> list[Commit]:
    """Return commits of the steps first..last, one every `every` seconds from `start` on."""
    return [
        commit(step, start + every * index, generation, pod)
        for index, step in enumerate(range(first, last + 1))
    ]
