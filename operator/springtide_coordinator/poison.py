"""A step that ends one worker after the other: poison samples, or a crash that comes every time. PURE.

A worker that is ended by an exception of its script says in which step. When the step has been done again, in
another generation, and has ended another worker with the same exception, doing it once more helps nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from springtide_protocol.names import GenerationName

DETAIL_LIMIT = 300  # characters


@dataclass(frozen=True, slots=True)
class Death:
    """samples: which the step takes, in words. detail: the exception."""

    generation: GenerationName | None
    member: str
    label: str
    samples: str
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The step of this number has ended these workers."""

    step: int
    samples: str
    workers: tuple[str, ...]
    detail: str


class Poison:
    """The deaths in the step that the job is at."""

    def __init__(self) -> None:
        self._step = 0
        self._deaths: list[Death] = []
        self.verdict: Verdict | None = None

    def failed(self, step: int, death: Death) -> None:
        """Note that an exception of its script has ended a worker.

        Args:
            step: that the worker was in; 0: in none, or its exception came from outside (files, memory).
            death: which worker it was, and of what.
        """
        if step == 0:
            return
        if step != self._step:  # a later one, or the job has gone back
            self._step, self._deaths, self.verdict = step, [], None
        if all(death.member != other.member for other in self._deaths):
            self._deaths.append(death)
        same = [other for other in self._deaths if _kind(other.detail) == _kind(death.detail)]
        if len({other.generation for other in same}) > 1:
            self.verdict = Verdict(
                step, death.samples, tuple(other.label for other in same), death.detail[:DETAIL_LIMIT]
            )

    def committed(self, step: int) -> None:
        """Somebody got past this step."""
        if step >= self._step:
            self._deaths, self.verdict = [], None


def _kind(detail: str) -> str:
    """The exception's class."""
    return detail.partition(":")[0]
