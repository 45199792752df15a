"""The training's history as the workers wrote it: one record per commit and member, merged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from springtide_protocol.names import GenerationName


@dataclass(frozen=True)
class Commit:
    """One committed step as one member saw it. Times in seconds, `unix_time` since 1970."""

    step: int
    generation: GenerationName
    unix_time: float
    step_seconds: float
    samples: int
    loss: float | None
    pod: str


def parse_line(line: str, pod: str) -> Commit:
    """Read one line of a step log (`SPRINGTIDE_STEP_LOG`).

    Args:
        line: one JSON object.
        pod: that wrote it.

    Raises:
        ValueError: the line is no such record; the pod is named, and what is wrong.
    """
    try:
        record = json.loads(line)
        number, restart = record["incarnation"] or (0, 0)
        loss = record["values"].get("loss")
        return Commit(
            step=int(record["step"]),
            generation=GenerationName.of(int(number), int(restart), int(record["generation"] or 0)),
            unix_time=float(record["time"]),
            step_seconds=float(record["step_seconds"]),
            samples=int(record["samples"]),
            loss=None if loss is None else float(loss),
            pod=pod,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"step log of {pod}: {line[:120]!r} is no commit record ({type(error).__name__}: {error})"
        ) from error


@dataclass
class History:
    """All commits seen so far. Of a step committed twice, the greatest generation's survived."""

    by_step: dict[int, Commit] = field(default_factory=dict)
    members: dict[GenerationName, set[str]] = field(default_factory=dict)
    first_commit: dict[GenerationName, float] = field(default_factory=dict)
    last_step: int = 0

    def add(self, commits: Iterable[Commit]) -> None:
        """Merge records in any order. Of a step's records in one generation the earliest gives the time."""
        for commit in commits:
            self.members.setdefault(commit.generation, set()).add(commit.pod)
            first = self.first_commit.get(commit.generation)
            if first is None or commit.unix_time < first:
                self.first_commit[commit.generation] = commit.unix_time
            self.last_step = max(self.last_step, commit.step)
            known = self.by_step.get(commit.step)
            if known is None or (known.generation, -known.unix_time) < (commit.generation, -commit.unix_time):
                self.by_step[commit.step] = commit

    def curve(self) -> list[Commit]:
        """Return the surviving commits in order of their steps."""
        return [self.by_step[step] for step in sorted(self.by_step)]

    def newest(self) -> Commit | None:
        """Return the surviving commit of the greatest step; None before the first."""
        return self.by_step.get(self.last_step)

    def recent(self, seconds: float) -> list[Commit]:
        """Return the surviving commits of the last `seconds` before the newest, in order of their steps."""
        newest = self.newest()
        found: list[Commit] = []
        for step in range(self.last_step, 0, -1):
            commit = self.by_step.get(step)
            if newest is None or (commit is not None and commit.unix_time < newest.unix_time - seconds):
                break
            if commit is not None:
                found.append(commit)
        return found[::-1]

    def active(self) -> frozenset[str]:
        """Return the pods that committed in the newest commit's generation."""
        newest = self.newest()
        return frozenset(self.members[newest.generation]) if newest else frozenset()

    def missing_steps(self, total: int) -> list[int]:
        """Return the steps of 1..total that nobody recorded."""
        return [step for step in range(1, total + 1) if step not in self.by_step]


def samples_per_second(commits: Sequence[Commit]) -> float:
    """Return the rate over consecutive commits; 0 with fewer than two."""
    if len(commits) < 2 or commits[-1].unix_time <= commits[0].unix_time:
        return 0.0
    return sum(commit.samples for commit in commits[1:]) / (commits[-1].unix_time - commits[0].unix_time)


def steps_per_second(commits: Sequence[Commit]) -> float:
    """Return the rate over consecutive commits; 0 with fewer than two."""
    if len(commits) < 2 or commits[-1].unix_time <= commits[0].unix_time:
        return 0.0
    return (len(commits) - 1) / (commits[-1].unix_time - commits[0].unix_time)
