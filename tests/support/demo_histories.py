"""Made-up training histories for the demo's tests."""

from __future__ import annotations

from springtide_demo.commits import Commit, Generation

FIRST, SECOND, THIRD = Generation(1, 0, 1), Generation(1, 0, 2), Generation(1, 0, 3)


def commit(
    step: int,
    at: float,
    generation: Generation = FIRST,
    pod: str = "digits-worker-0-0",
    loss: float | None = 0.5,
    samples: int = 64,
) -> Commit:
    return Commit(step, generation, at, 0.01, samples, loss, pod)


def steady(
    first: int,
    last: int,
    start: float,
    generation: Generation = FIRST,
    every: float = 0.01,
    pod: str = "digits-worker-0-0",
) -> list[Commit]:
    """Return commits of the steps first..last, one every `every` seconds from `start` on."""
    return [
        commit(step, start + every * index, generation, pod)
        for index, step in enumerate(range(first, last + 1))
    ]
