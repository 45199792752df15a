"""Sizing, policy Throughput: between minReplicas and replicas, as long as a worker more brings enough.

A search over sizes, of which each is measured once by having it: from minReplicas the size is doubled while
each added worker brings at least minGainPercent of what a worker brought on average before; after a step that
does not, the sizes in between are tried by halves, and so are those within a step that brought enough only on
the whole. The size that the job settles on is thus a function of the table of measured sizes, which stands in
status. From time to time the larger sizes are measured anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan.observation import RateReport
from springtide_operator.plan.values import parse_time, timestamp

LEAST_STEPS = 10
AGAIN_SECONDS = 600.0  # until larger sizes are measured anew; doubled each time that nothing came of it
AGAIN_LIMIT_SECONDS = 7200.0
LOOK_SECONDS = 5.0
KEPT_SHARE = 0.8  # of the gain asked for is enough for a size that the job has: noise makes it no smaller
KEPT_SIZES = 32


@dataclass(frozen=True)
class Scene:
    """Facts about a job. Sizes are workers, times seconds; `gain` is a fraction.

    `placed`: workers that a node has taken. `active`: those that train. `rates`: the coordinator's figures;
    that of a size that trains is of its present visit.
    """

    minimum: int
    replicas: int
    gain: float
    measure: float
    patience: float
    placed: int
    active: int
    rates: tuple[RateReport, ...] = ()

    @property
    def live(self) -> float | None:
        """Samples per second of the size that trains, rounded as status holds it; None while it is too
        early to say.
        """
        for rate in self.rates:
            if rate.workers == self.active and rate.seconds >= self.measure and rate.steps >= LEAST_STEPS:
                return float(f"{rate.samples_per_second:.4g}")
        return None


@dataclass(frozen=True)
class Measured:
    """`rate`: samples per second; 0: no node took so many workers. `at`: unix seconds."""

    rate: float
    at: float


@dataclass(frozen=True)
class Search:
    """The state; in status between rounds. `workers`: settled on, 0: nothing yet; `target`: asked for."""

    workers: int = 0
    target: int = 0
    since: float = 0.0  # the target is asked for
    measured: Mapping[int, Measured] = field(default_factory=dict)
    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""
    message: str = ""

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Search:
        return cls(
            workers=entry.get("workers", 0),
            target=entry.get("target", 0),
            since=parse_time(entry.get("targetTime")) or 0.0,
            measured={
                int(one["workers"]): Measured(
                    float(one["samplesPerSecond"]), parse_time(one.get("time")) or 0.0
                )
                for one in entry.get("measured") or []
            },
            failures=entry.get("failures", 0),
            retry_at=parse_time(entry.get("retryTime")) or 0.0,
            reason=entry.get("reason", ""),
            message=entry.get("message", ""),
        )

    def to_status(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "workers": self.workers,
            "target": self.target,
            "targetTime": timestamp(self.since),
            "failures": self.failures,
            "reason": self.reason,
            "message": self.message[:1024],
            "measured": [
                {
                    "workers": size,
                    "samplesPerSecond": f"{self.measured[size].rate:.4g}",
                    "time": timestamp(self.measured[size].at),
                }
                for size in sorted(self.measured)
            ],
        }
        if self.retry_at:
            result["retryTime"] = timestamp(self.retry_at)
        return result

    def wakes(self, scene: Scene, now: float) -> list[float]:
        """Return when to look again, where no event would wake the job.

        Args:
            scene: the facts.
            now: seconds on their clock.
        """
        if self.reason == reasons.SIZE_MEASURING:
            return [now + LOOK_SECONDS]
        return [self.retry_at] if self.retry_at > now else []


@dataclass(frozen=True)
class Verdict:
    """`size`: to measure, or to settle on. `base`: the largest that was found worth it so far.

    `refused`: the size next to it that was not; 0: none.
    """

    size: int
    settled: bool
    base: int
    refused: int = 0


def search(table: Mapping[int, float], minimum: int, replicas: int, gain: float, kept: int = 0) -> Verdict:
    """Return the size that the table of samples per second leads to.

    Args:
        table: samples per second by number of workers.
        minimum: of workers.
        replicas: the most workers.
        gain: the least that a further worker has to bring, as a share of the average one.
        kept: the size settled on before, which noise must not make smaller.
    """
    base, limit = minimum, replicas + 1  # everything from `limit` on is not worth it
    before = minimum  # the size that `base` was compared with

    def worth(smaller: int, larger: int) -> bool:
        return brings(table, smaller, larger) >= gain * (KEPT_SHARE if larger <= kept else 1.0)

    while True:
        if base not in table:
            return Verdict(base, False, base)
        candidate = min(2 * base, limit - 1)
        while candidate > base:
            if candidate not in table:
                return Verdict(candidate, False, base)
            if worth(base, candidate):
                break
            limit = candidate
            candidate = base + (candidate - base) // 2
        if candidate > base:
            before, base = base, candidate
            continue
        middle = before + (base - before) // 2
        if middle == before or brings(table, before, base) >= (1 + gain) / 2:
            return Verdict(base, True, base, limit if limit <= replicas else 0)
        if middle not in table:
            return Verdict(middle, False, base)
        if worth(middle, base):
            before = middle
        else:
            base, limit = before, base


def brings(table: Mapping[int, float], base: int, size: int) -> float:
    """Return how much each worker from `base` to `size` adds, as a share of what one of `base` brings on
    average.

    Args:
        table: samples per second by number of workers.
        base: the smaller size.
        size: the larger one.
    """
    each = table[base] / base
    if each <= 0:
        return 1.0 if table[size] > 0 else 0.0
    return (table[size] - table[base]) / (size - base) / each


def step(state: Search, scene: Scene, now: float) -> Search:
    """Return the next state: one round's decision, with its reason.

    Args:
        state: of the last round.
        scene: workers as they are, what limits them, and what was measured.
        now: in unix seconds.
    """
    if state.target == 0:
        state = replace(state, target=scene.minimum, since=now)
    target = min(max(state.target, scene.minimum), scene.replicas)
    if target != state.target:
        state = replace(state, target=target, since=now)
    if state.retry_at and now >= state.retry_at and scene.active == state.workers and scene.live:
        state = replace(state, measured=_begun_anew(state, scene.live, now), retry_at=0.0)
    state = replace(state, measured=_merged(state, scene, now))
    table = {size: one.rate for size, one in state.measured.items()}
    kept = min(state.workers, scene.replicas)
    verdict = search(table, scene.minimum, scene.replicas, scene.gain, kept)
    if verdict.size != state.target:
        state = replace(state, target=verdict.size, since=now)
    if not verdict.settled:
        return _measures(state, verdict, table)
    return _settles(state, verdict, table, scene, now)


def _begun_anew(state: Search, live: float, now: float) -> dict[int, Measured]:
    """Return the table without the larger sizes, and the smaller ones scaled.

    The rate of the size settled on also tells what smaller ones would bring now: the job as a whole became
    faster or slower.
    """
    before = state.measured.get(state.workers)
    factor = live / before.rate if before is not None and before.rate > 0 else 1.0
    smaller = {
        size: Measured(float(f"{one.rate * factor:.4g}"), one.at)
        for size, one in state.measured.items()
        if size < state.workers
    }
    return {**smaller, state.workers: Measured(live, now)}


def _merged(state: Search, scene: Scene, now: float) -> dict[int, Measured]:
    """The table with the size that trains, and with the target refused where no node takes it."""
    table = {size: one for size, one in state.measured.items() if scene.minimum <= size <= scene.replicas}
    if scene.live is not None and scene.minimum <= scene.active <= scene.replicas:
        known = table.get(scene.active)
        if known is None or (known.rate == 0 and scene.live > 0):
            table[scene.active] = Measured(scene.live, now)
    waited = now - state.since >= scene.patience
    if state.target not in table and waited and state.target > scene.minimum and scene.placed < state.target:
        table[state.target] = Measured(0.0, now)
    while len(table) > KEPT_SIZES:
        del table[min(table, key=lambda size: table[size].at)]
    return table


def _measures(state: Search, verdict: Verdict, table: Mapping[int, float]) -> Search:
    workers = "worker" if verdict.size == 1 else "workers"
    text = f"measures {verdict.size} {workers}"
    if verdict.base in table:
        text += f"; {_figures(table, verdict.base)}"
    return replace(state, reason=reasons.SIZE_MEASURING, message=text)


def _settles(state: Search, verdict: Verdict, table: Mapping[int, float], scene: Scene, now: float) -> Search:
    text = _figures(table, verdict.size)
    percent = f"minGainPercent is {100 * scene.gain:.0f}"
    if not verdict.refused:
        reason = reasons.SIZE_GAIN
        text += f": every added worker brings enough ({percent})"
        if verdict.size == scene.minimum:
            text = f"minReplicas is replicas, {verdict.size}"
        return replace(state, workers=verdict.size, failures=0, retry_at=0.0, reason=reason, message=text)
    if table[verdict.refused] == 0:
        reason = reasons.SIZE_NO_ROOM
        text += f"; no node took {verdict.refused} within {scene.patience:g} s"
    else:
        reason = reasons.SIZE_NO_GAIN
        share = brings(table, verdict.size, verdict.refused)
        each = (table[verdict.refused] - table[verdict.size]) / (verdict.refused - verdict.size)
        text += (
            f"; {verdict.refused} bring {table[verdict.refused]:.4g}, {each:.3g} for each one more,"
            f" {100 * share:.0f} % of that ({percent})"
        )
    if state.retry_at:  # settled on before, and still
        return replace(state, workers=verdict.size)
    failures = state.failures + 1 if verdict.size == state.workers else 0
    pause = min(AGAIN_LIMIT_SECONDS, AGAIN_SECONDS * 2.0 ** min(failures, 16))
    state = replace(state, workers=verdict.size, failures=failures, retry_at=now + pause, reason=reason)
    return replace(state, message=f"{text}; measured anew after {timestamp(state.retry_at)}")


def _figures(table: Mapping[int, float], size: int) -> str:
    rate = table[size]
    if size == 1:
        return f"1 worker brings {rate:.4g} samples/s"
    return f"{size} workers bring {rate:.4g} samples/s, {rate / size:.3g} each"
