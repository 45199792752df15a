"""Ranges, leases and the staleness clock, by themselves."""

from __future__ import annotations

import dataclasses
import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from springtide_ps.params.applied import (
    BATCH_NUMBER_LIMIT,
    INTERVALS_LIMIT,
    AppliedBatches,
    BatchNumberError,
    IntervalSet,
)
from springtide_ps.server.lease_table import Granted, LeaseError, Leases, Over, Wait, starting_clocks

NUMBERS = st.lists(st.integers(0, 30), max_size=40)


def made(numbers: list[int]) -> IntervalSet:
    found = IntervalSet()
    for number in numbers:
        found.add(number)
    return found


@settings(deadline=None)
@given(NUMBERS, NUMBERS, st.integers(0, 32), st.integers(0, 32))
def test_a_set_of_ranges_is_a_set(a: list[int], b: list[int], first: int, stop: int) -> None:
    ours, window = made(a), set(range(first, stop))
    assert {n for n in range(40) if n in ours} == set(a)
    assert len(ours) == len(set(a))
    assert ours == made(sorted(set(a), reverse=True))
    assert list(ours.missing(first, stop)) == sorted(window - set(a))
    assert ours.count(first, stop) == len(window & set(a))
    assert ours.intersection(made(b)) == made([n for n in a if n in b])
    assert IntervalSet.from_json(ours.to_json()) == ours
    bounds = ours.intervals()
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(bounds))


@given(st.lists(st.integers(0, 9), max_size=30))
def test_a_book_counts_what_it_has_applied(numbers: list[int]) -> None:
    applied_batches = AppliedBatches()
    applied = [number for number in numbers if applied_batches.enter(number)]
    assert applied == list(dict.fromkeys(numbers))
    assert applied_batches.applied == len(applied)
    again = AppliedBatches.from_json(applied_batches.to_json())
    assert (again.applied, again.intervals) == (applied_batches.applied, applied_batches.intervals)


def test_the_copy_of_a_set_has_a_life_of_its_own() -> None:
    ours = made([1])
    other = ours.copy()
    other.add(2)
    assert 2 not in ours


@pytest.mark.parametrize(
    "value",
    [None, {}, [1], [2, 1], [1, 1], [0, 3, 3, 4], [0, 3, 2, 4], [-1, 2], [0, 1.5], ["0", "1"]],
)
def test_what_is_no_set_of_ranges_is_refused(value: object) -> None:
    with pytest.raises(BatchNumberError):
        IntervalSet.from_json(value)
    for long in ([0, BATCH_NUMBER_LIMIT + 1], [0] * (2 * INTERVALS_LIMIT + 2)):
        with pytest.raises(BatchNumberError):
            IntervalSet.from_json(long)


def test_what_is_no_book_is_refused() -> None:
    for value in (None, {"ranges": []}, {"applied": -1, "ranges": []}, {"applied": 1}):
        with pytest.raises(BatchNumberError):
            AppliedBatches.from_json(value)


def test_a_set_has_limits() -> None:
    full = IntervalSet((2 * n, 2 * n + 1) for n in range(INTERVALS_LIMIT))
    with pytest.raises(BatchNumberError, match="gap"):
        full.add(10 * INTERVALS_LIMIT)
    assert full.add(1)  # closes a gap
    for number in (-1, BATCH_NUMBER_LIMIT):
        with pytest.raises(BatchNumberError, match="is no batch number"):
            full.add(number)


# ---- leases


def test_ranges_are_given_out_lowest_first_and_once() -> None:
    leases = Leases(None, made([1]), {"a": 0, "b": 0})
    assert [leases.ask(who, 0, 4) for who in "ab"] == [Granted(0), Granted(2)]
    assert leases.ask("a", 0, 4) == Granted(0)  # its answer was lost
    leases.done("a", 0)
    assert leases.ask("a", 0, 4) == Granted(3)
    leases.done("a", 3)
    assert leases.ask("a", 0, 4) == Wait("the last batches are worked on: 2 by b")
    leases.done("b", 2)
    assert [leases.ask(who, 0, 4) for who in "ab"] == [Over(), Over()]
    assert leases.clocks == {"a": 2, "b": 1}


def test_the_fastest_waits_for_the_slowest() -> None:
    leases = Leases(2, IntervalSet(), {"fast": 0, "slow": 0})
    assert leases.ask("slow", 0, 100) == Granted(0)
    for number in (1, 2):
        assert leases.ask("fast", 0, 100) == Granted(number)
        leases.done("fast", number)
    reason = "another step would be 3 ahead of slow, and 2 are allowed"
    assert leases.ask("fast", 0, 100) == Wait(reason)
    leases.done("slow", 0)
    assert leases.ask("fast", 0, 100) == Granted(3)


def test_batch_on_its_way_is_not_given_again_and_counts() -> None:
    leases = Leases(2, IntervalSet(), {"fast": 0, "slow": 0})
    assert leases.ask("fast", 0, 4) == Granted(0)
    assert leases.ask("fast", 0, 4, sent=[0]) == Granted(1)
    assert leases.ask("fast", 0, 4, sent=[0]) == Granted(1)  # its answer was lost
    leases.done("fast", 0)
    reason = "another step would be 3 ahead of slow, and 2 are allowed"
    assert leases.ask("fast", 0, 4, sent=[1]) == Wait(reason)
    assert leases.ask("slow", 0, 4) == Granted(2)
    leases.done("slow", 2)
    assert leases.ask("fast", 0, 4, sent=[1]) == Granted(3)
    alone = Leases(1, IntervalSet(), {"a": 5})
    assert [alone.ask("a", 0, 2), alone.ask("a", 0, 2, sent=[0])] == [Granted(0), Granted(1)]


def test_strangers_get_nothing() -> None:
    leases = Leases(None, IntervalSet(), {"a": 0})
    with pytest.raises(LeaseError):
        leases.ask("b", 0, 1)
    with pytest.raises(LeaseError):
        leases.done("b", 0)


def test_what_somebody_else_finished_does_not_move_the_clock() -> None:
    leases = Leases(None, IntervalSet(), {"a": 0, "b": 0})
    leases.ask("a", 0, 5)
    leases.done("b", 0)
    leases.done("a", 3)
    assert leases.clocks == {"a": 0, "b": 0}
    assert leases.finished == made([0, 3])


def test_joiners_start_at_the_minimum() -> None:
    assert starting_clocks({"a": 7, "b": 5, "new": None}) == {"a": 7, "b": 5, "new": 5}
    assert starting_clocks({"a": None, "b": None}) == {"a": 0, "b": 0}


@dataclasses.dataclass
class Worker:
    """sent: the range that is on its way to the chunks `left`. range: the one that it works on."""

    clock: int | None = None
    range: int | None = None
    sent: int | None = None
    left: list[str] = dataclasses.field(default_factory=list)

    @property
    def steps(self) -> int:
        """Return the number of steps that the worker has made or begun."""
        return (self.clock or 0) + (self.sent is not None) + (self.range is not None)


CHUNKS = ("x", "y", "z")
STOP = 14


class Training(RuleBasedStateMachine):
    """Workers that die, come and retry; chunks on servers of which one may be lost and made again from an
    older book; generations that end at any moment.
    """

    @initialize(bound=st.sampled_from([None, 1, 2, 4]), count=st.integers(1, 3))
    def begin(self, bound: int | None, count: int) -> None:
        self.bound, self.numbers = bound, 0
        self.applied_batches = {key: AppliedBatches() for key in CHUNKS}
        self.updates: dict[str, list[int]] = {key: [] for key in CHUNKS}
        self.pulled = {key: (AppliedBatches(), [0][:0]) for key in CHUNKS}
        self.workers: dict[str, Worker] = {}
        for _ in range(count):
            self._add()
        self._generation()

    def _add(self) -> None:
        self.workers[f"w{self.numbers}"] = Worker()
        self.numbers += 1

    def _generation(self) -> None:
        """The token is renewed: pushes on their way go again, then the books say what is finished."""
        for worker in self.workers.values():
            if worker.sent is not None:
                for key in CHUNKS:
                    self._push(key, worker.sent)
                worker.clock = (worker.clock or 0) + 1
            worker.left, worker.range, worker.sent = [], None, None
        finished = self.applied_batches["x"].intervals
        for key in CHUNKS[1:]:
            finished = finished.intersection(self.applied_batches[key].intervals)
        clocks = starting_clocks({name: worker.clock for name, worker in self.workers.items()})
        for name, worker in self.workers.items():
            worker.clock = clocks[name]
        self.leases = Leases(self.bound, finished, clocks)

    def _push(self, key: str, number: int) -> None:
        if self.applied_batches[key].enter(number):
            self.updates[key].append(number)

    def _some(self, index: int) -> tuple[str, Worker]:
        return list(self.workers.items())[index % len(self.workers)]

    @rule(index=st.integers(0, 9))
    def ask(self, index: int) -> None:
        name, worker = self._some(index)
        if worker.range is None:
            under_way = [number for other in self.workers.values() for number in (other.range, other.sent)]
            sent = [] if worker.sent is None else [worker.sent]
            decision = self.leases.ask(name, 0, STOP, sent)
            if isinstance(decision, Granted):
                assert decision.number not in under_way
                assert any(decision.number not in self.applied_batches[key].intervals for key in CHUNKS)
                worker.range = decision.number
                if self.bound is not None:
                    others = [other.clock or 0 for other in self.workers.values() if other is not worker]
                    assert all(worker.steps - clock <= self.bound for clock in others)

    @rule(index=st.integers(0, 9))
    def commit(self, index: int) -> None:
        """Commit the worker's step; its push begins once its last one has arrived."""
        _, worker = self._some(index)
        if worker.range is not None and worker.sent is None:
            worker.sent, worker.range, worker.left = worker.range, None, list(CHUNKS)

    @rule(index=st.integers(0, 9), reached=st.integers(0, len(CHUNKS)))
    def push(self, index: int, reached: int) -> None:
        name, worker = self._some(index)
        if worker.sent is None:
            return
        for key in worker.left[:reached]:
            self._push(key, worker.sent)
        worker.left = worker.left[reached:]
        if not worker.left:
            assert worker.clock is not None
            worker.clock += 1
            self.leases.done(name, worker.sent)
            worker.sent = None

    @rule(index=st.integers(0, 9))
    def die(self, index: int) -> None:
        if len(self.workers) > 1:
            del self.workers[self._some(index)[0]]
            self._generation()

    @precondition(lambda self: len(self.workers) < 4)
    @rule()
    def join(self) -> None:
        self._add()
        self._generation()

    @rule(key=st.sampled_from(CHUNKS))
    def pull(self, key: str) -> None:
        applied_batches = self.applied_batches[key]
        self.pulled[key] = (
            AppliedBatches(applied_batches.intervals.copy(), applied_batches.applied),
            list(self.updates[key]),
        )

    @rule(key=st.sampled_from(CHUNKS))
    def lose_a_server(self, key: str) -> None:
        applied_batches, updates = self.pulled[key]
        self.applied_batches[key] = AppliedBatches(applied_batches.intervals.copy(), applied_batches.applied)
        self.updates[key] = list(updates)
        self._generation()

    @invariant()
    def every_range_counts_at_most_once(self) -> None:
        for key, updates in getattr(self, "updates", {}).items():
            assert len(updates) == len(set(updates)) == self.applied_batches[key].applied

    @invariant()
    def nobody_is_too_far_ahead(self) -> None:
        clocks = [worker.clock or 0 for worker in getattr(self, "workers", {}).values()]
        if clocks and self.bound is not None:
            assert max(clocks) - min(clocks) <= self.bound

    def teardown(self) -> None:
        """Let everybody go on, and check that every batch ends up in every chunk exactly once."""
        if not hasattr(self, "workers"):
            return
        for turn in range(40 * STOP):
            name, _ = self._some(turn)
            self.push(turn, len(CHUNKS))
            self.ask(turn)
            self.commit(turn)
            self.push(turn, len(CHUNKS))
            if isinstance(self.leases.ask(name, 0, STOP), Over):
                break
        for key in CHUNKS:
            assert sorted(self.updates[key]) == list(range(STOP))


def walk(training: Training, random: Random) -> None:
    """A long run without hypothesis: faster, and its steps can be weighed."""
    training.begin(random.choice((None, 1, 2, 4)), random.randint(1, 3))
    for _ in range(60):
        for _ in range(random.randint(1, 12)):
            index = random.randrange(10)
            training.ask(index)
            training.commit(index)
            training.push(index, random.choice((0, 1, 3, 3)))
            training.nobody_is_too_far_ahead()
            training.every_range_counts_at_most_once()
        act = random.choice((training.pull, training.lose_a_server, training.die, training.join, None))
        if act in (training.pull, training.lose_a_server):
            act(random.choice(CHUNKS))
        elif act == training.die:
            training.die(random.randrange(10))
        elif act is not None and len(training.workers) < 4:
            training.join()
    training.teardown()


TestTraining = Training.TestCase
TestTraining.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
