"""The committed steps, merged by number under the greatest name, and figures that follow from them.

Goodput, recoveries and rates are computed from the commits that rank 0 reports. Times are unix seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from springtide_coordinator.membership.messages import Start
from springtide_coordinator.reported import Latest
from springtide_protocol.names import GenerationName, StateName

KEPT_COMMITS = 20_000
KEPT_GENERATIONS = 2_000
KEPT_FAILURES = 16
RATE_WINDOW = 5.0  # s
LOST_CAUSES = ("failure", "rescale", "checkpoint", "data", "straggler")
_REASON = 500  # characters
# By cause of the generation.
_LOST_BY = {"failure": "failure", "join": "rescale", "leave": "rescale", "consistency": "rescale"}
RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # s


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step as its reporter saw it; seconds are those of the reporting member."""

    state: StateName
    unix_time: float
    step_seconds: float
    samples: int
    values: Mapping[str, float] = field(default_factory=dict)
    exposed_seconds: float = 0.0
    skipped: bool = False
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """The gap from the last commit before a new generation to its first commit.

    number: among all recoveries, from 1. reason: why there is a new generation, in words.
    """

    generation: GenerationName
    cause: str
    seconds: float
    at_unix: float
    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationSeen:
    """A generation as it was made. number: among all that this coordinator made, from 1."""

    name: GenerationName
    at_unix: float
    cause: str
    reason: str
    members: tuple[str, ...]
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Begun:
    """The newest generation: no commit of an older one counts beyond the state that it began from."""

    generation: GenerationName
    base: StateName


@dataclass(slots=True)
class History:
    """The recent commits in order of steps, and sums over all that were told of. steps_total: each counts as
    the steps since the one before it.
    """

    commits: list[Commit] = field(default_factory=list)
    generations: list[GenerationSeen] = field(default_factory=list)
    steps_total: int = 0
    samples_total: int = 0
    planned_steps: int = 0  # that the job has committed at its end; 0: nobody knows
    recoveries: Counter[str] = field(default_factory=Counter)
    recovery_buckets: list[int] = field(default_factory=lambda: [0] * (len(RECOVERY_BUCKETS) + 1))
    recovery_seconds: float = 0.0
    last_recovery: Recovery | None = None
    failures: list[Recovery] = field(default_factory=list)  # the newest that a failure was the cause of
    values: Latest = field(default_factory=Latest)
    lost_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LOST_CAUSES, 0.0))
    held_up: float = 0.0  # seconds per step that a slow member costs now
    _begun: _Begun | None = None
    _pending: GenerationSeen | None = None
    _before: float = 0.0  # unix time of the last commit before the pending generation
    _received_at: float = 0.0
    _first_unix: float | None = None
    _productive: float = 0.0
    _productive_base: float = 0.0

    @property
    def known(self) -> StateName | None:
        """Newest commit on record."""
        return self.commits[-1].state if self.commits else None

    @property
    def last_commit_unix(self) -> float:
        return self.commits[-1].unix_time if self.commits else 0.0

    def generation_made(self, start: Start, cause: str, now: float) -> None:
        """Note that a generation begins: commits beyond its state did not survive.

        Where the one before it has committed nothing, its failure is what is recovered from.

        Args:
            start: with the state that it begins from.
            cause: in one word, as `failure` or `join`.
            now: in unix seconds.
        """
        reason, before = start.reason, self._pending
        if before is not None and before.cause == "failure":
            cause = "failure"
            reason = before.reason if reason in before.reason else f"{before.reason}; {reason}"
        seen = GenerationSeen(
            start.generation,
            now,
            cause,
            reason[:_REASON],
            tuple(member.label for member in start.members),
            self.generations[-1].number + 1 if self.generations else 1,
        )
        self.generations = [*self.generations[-KEPT_GENERATIONS:], seen]
        self._before = self._before if self._pending is not None else self.last_commit_unix
        self._pending = seen
        self._begun = _Begun(start.generation, start.state)
        self._cut_after(start.state.step)

    def _cut_after(self, step: int) -> None:
        del self.commits[bisect_left(self.commits, step + 1, key=lambda commit: commit.state.step) :]

    def add(
        self, commits: Sequence[Commit], productive_seconds: float, now: float, began_unix: float = 0.0
    ) -> None:
        """Merge reported commits; of two for one step the greater name stays.

        Args:
            commits: in order of their steps.
            productive_seconds: of the job's life, as it comes with the committed state, so that goodput goes
                on where the last coordinator left it; 0: unknown.
            now: in unix seconds.
            began_unix: when the job's first step began, in unix seconds; it comes with the state, too. 0:
                unknown.
        """
        fresh = [commit for commit in commits if self._add(commit)]
        self._received_at = now
        if fresh and self._first_unix is None:
            first = fresh[0]
            self._first_unix = first.unix_time - first.step_seconds
            self._productive_base = max(
                0.0, productive_seconds - sum(commit.step_seconds for commit in fresh)
            )
        if began_unix > 0:
            self._first_unix = min(began_unix, self._first_unix or began_unix)
            self._productive_base = 0.0
        if productive_seconds > 0:
            self._productive = productive_seconds
            self._productive_base = min(self._productive_base, productive_seconds)
        if len(self.commits) > KEPT_COMMITS + KEPT_COMMITS // 10:
            del self.commits[:-KEPT_COMMITS]

    def plan(self, job_steps: int, loop_steps: int, stage: int) -> None:
        """Note how many steps the job has at its end, as far as anybody knows.

        A script that has said nothing may have more loops than the running one. The first loop is taken for
        the only one, as it mostly is; from the second one on nobody knows which is the last.

        Args:
            job_steps: of the whole job, as the script has said; 0: it has not.
            loop_steps: of the running training loop; 0: there is none, or it has no end.
            stage: of the newest committed step: the number of its loop, from 0.
        """
        if job_steps or stage:
            self.planned_steps = job_steps
        elif loop_steps:
            self.planned_steps = loop_steps

    def _add(self, commit: Commit) -> bool:
        step = commit.state.step
        at = bisect_left(self.commits, step, key=lambda other: other.state.step)
        later = self.commits[at:]
        name = commit.state.generation
        if at and self.commits[at - 1].state.generation > name:
            return False
        if self._begun is not None and name < self._begun.generation and step > self._begun.base.step:
            return False
        if any(other.state.generation > name for other in later):
            return False
        if later and later[0].state == commit.state:
            return False
        if at == 0 and len(self.commits) >= KEPT_COMMITS:
            return False
        kept = [other for other in later if other.state.generation == name]
        if not kept:
            # Where workers do not step together, one word is about several ranges.
            self.steps_total += step - self.commits[at - 1].state.step if at else 1
        self.commits[at:] = [commit, *kept]
        self.samples_total += commit.samples
        self.lost_seconds["data"] += commit.data_seconds
        self.lost_seconds["checkpoint"] += commit.checkpoint_seconds
        self.lost_seconds["straggler"] += min(self.held_up, commit.step_seconds)
        if commit.values and self.commits[-1] is commit:
            self.values.report(commit.values)
        self._recovered(commit)
        return True

    def _recovered(self, commit: Commit) -> None:
        pending = self._pending
        if pending is None or commit.state.generation != pending.name:
            return
        self._pending = None
        if not self._before:
            return
        seconds = max(0.0, commit.unix_time - self._before)
        self.recoveries[pending.cause] += 1
        number = self.recoveries.total()
        recovery = Recovery(pending.name, pending.cause, seconds, commit.unix_time, number, pending.reason)
        self.last_recovery = recovery
        if pending.cause == "failure":
            self.failures = [*self.failures[1 - KEPT_FAILURES :], recovery]
        self.recovery_seconds += seconds
        if pending.cause in _LOST_BY:
            self.lost_seconds[_LOST_BY[pending.cause]] += max(0.0, seconds - commit.step_seconds)
        self.recovery_buckets[bisect_left(RECOVERY_BUCKETS, seconds)] += 1

    def step_seconds(self) -> float:
        """Median of the recent steps, in seconds; 0 without any."""
        recent = [commit.step_seconds for commit in self.commits[-50:]]
        return median(recent) if recent else 0.0

    def samples_per_second(self, now: float) -> float:
        """Committed samples per second over the last few seconds; 0 when nothing was heard for as long."""
        if len(self.commits) < 2 or now - self._received_at > RATE_WINDOW:
            return 0.0
        newest = self.commits[-1].unix_time
        start = bisect_left(self.commits, newest - RATE_WINDOW, key=lambda commit: commit.unix_time)
        window = self.commits[start:]
        seconds = newest - window[0].unix_time
        if len(window) < 2 or seconds <= 0:
            return 0.0
        return sum(commit.samples for commit in window[1:]) / seconds

    def goodput(self, until: float) -> float:
        """Seconds spent on steps that survive / seconds from the first step to `until`; 0..1."""
        if self._first_unix is None or until <= self._first_unix:
            return 0.0
        productive = self._productive - self._productive_base
        return min(1.0, max(0.0, productive / (until - self._first_unix)))

    def since(self, step: int, most: int) -> list[Commit]:
        """Return the kept commits after `step`, the oldest ones, at most so many.

        Args:
            step: the last one that the caller has.
            most: commits.
        """
        at = bisect_left(self.commits, step + 1, key=lambda commit: commit.state.step)
        return self.commits[at : at + most]

    def generations_since(self, number: int, most: int) -> list[GenerationSeen]:
        """Return the kept generations after the one with that number, the oldest ones, at most so many.

        Args:
            number: of the last one that the caller has.
            most: generations.
        """
        at = bisect_left(self.generations, number + 1, key=lambda seen: seen.number)
        return self.generations[at : at + most]
