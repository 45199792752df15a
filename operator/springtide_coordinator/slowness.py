"""Slow workers: each one's own time per step (data and compute), compared with the others'.

A step takes as long as its slowest worker; the others wait in the reductions. The step's duration is the same
on all of them, so it tells nothing; what a worker does before its gradients are there does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median

HALF_LIFE_STEPS = 20.0
FACTOR = 1.5  # of the others' median
LEAST_SECONDS = 0.005  # per step: less is noise
HOLD_SECONDS = 10.0  # until it is said
FRESH_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Share:
    """A member's part of global batches.

    Attributes:
        samples: of each whole one that fall to it; 0: not known.
        sample_seconds: of computing per sample; 0: not known.
        by_speed: whether parts follow speed, instead of being even.
    """

    samples: int = 0
    sample_seconds: float = 0.0
    by_speed: bool = False


NO_SHARE = Share()


@dataclass(slots=True)
class WorkerTimes:
    """Means per step in seconds, the recent steps counting most."""

    step: float
    data: float
    compute: float
    wait: float
    reported_at: float
    share: Share

    @property
    def busy(self) -> float:
        return self.data + self.compute


@dataclass(frozen=True, slots=True)
class Slow:
    """A worker that takes longer than the others; seconds per step. `since`: unix seconds."""

    member: str
    busy: float
    median: float
    since: float


@dataclass(slots=True)
class Slowness:
    """Times by member id. Feed it with `note_report`, ask with `slowest`; times are unix seconds."""

    times: dict[str, WorkerTimes] = field(default_factory=dict)
    _suspect: tuple[str, float] | None = None  # member, since

    def note_report(
        self,
        member: str,
        steps: int,
        step: float,
        data: float,
        compute: float,
        wait: float,
        now: float,
        share: Share = NO_SHARE,
    ) -> None:
        """Take in one member's means over some steps.

        Where the member's share of the batches has changed, what it took before says nothing any more: the
        workers are about to be as quick as one another, and only one that balance does not help is named.

        Args:
            member: its id.
            steps: how many they were.
            step: seconds of a step.
            data: seconds of it for data.
            compute: seconds of it that the member computed.
            wait: seconds of it that the member waited for others.
            now: in unix seconds.
            share: of each global batch that falls to it.
        """
        before = self.times.get(member)
        if steps <= 0:
            return
        if before is None or before.share.samples != share.samples:
            self.times[member] = WorkerTimes(step, data, compute, wait, now, share)
            if before is not None:
                self._suspect = None
            return
        keep = 0.5 ** (steps / HALF_LIFE_STEPS)
        self.times[member] = WorkerTimes(
            keep * before.step + (1 - keep) * step,
            keep * before.data + (1 - keep) * data,
            keep * before.compute + (1 - keep) * compute,
            keep * before.wait + (1 - keep) * wait,
            now,
            share,
        )

    def keep(self, members: Collection[str]) -> None:
        """Forget all but these."""
        for member in set(self.times) - set(members):
            del self.times[member]

    def slowest(self, members: Collection[str], now: float) -> Slow | None:
        """Return the member that has held the others up for HOLD_SECONDS.

        Args:
            members: ids of all members of the generation.
            now: in unix seconds.

        Returns:
            None while nobody does; and unless all members told of their steps lately: after a change of
            members some have not.
        """
        found = {member: self.times[member] for member in members if member in self.times}
        stale = any(now - times.reported_at > FRESH_SECONDS for times in found.values())
        if len(found) < 2 or len(found) < len(members) or stale:
            self._suspect = None
            return None
        name = max(found, key=lambda member: (found[member].busy, member))
        others = median(times.busy for member, times in found.items() if member != name)
        busy = found[name].busy
        if busy < FACTOR * others or busy - others < LEAST_SECONDS:
            self._suspect = None
            return None
        if self._suspect is None or self._suspect[0] != name:
            self._suspect = (name, now)
        since = self._suspect[1]
        return Slow(name, busy, others, since) if now - since >= HOLD_SECONDS else None
