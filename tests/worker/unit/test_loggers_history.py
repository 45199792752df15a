"""A tracker ends with each committed step once, through all that befalls a job and as far as it is known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loggers_world import Job, Store

from springtide.loggers import Recorded
from springtide.loggers.history import (
    MAX_BEGINNINGS,
    WORKERS,
    Beginning,
    Entry,
    back_to,
    flattened,
    gap,
    lacking,
    line_from_json,
    line_to_json,
    merged,
    named_outside,
    on_the_line,
    read_generation,
    with_beginning,
)
from springtide_protocol.names import GenerationName

ACTS = (
    "commit",
    "commit",
    "commit",
    "commit",
    "deliver",
    "deliver",
    "kill first",
    "kill last",
    "join",
    "alone",
    "cut",
    "checkpoint",
    "back",
    "back together",
    "evaluate",
    "fail",
    "leave",
)


def generation(number: int, incarnation: int = 1) -> GenerationName:
    return GenerationName.of(incarnation, 0, number)


def lost(job: Job) -> set[int]:
    """Steps that no living member knows and the tracker has not got, or with the value of a dropped one."""
    there = {step for step, value in job.store.of("loss").items() if job.steps.get(step) == {"loss": value}}
    return {step for step in job.steps if step} - job.known_to_members() - there


def play(job: Job, act: str) -> None:
    """Do one thing to the job, and what follows of it."""
    if act == "commit":
        job.commit()
    elif act == "deliver":
        job.deliver()
    elif act == "kill first" and len(job.members) > 1:
        del job.members[0]
        job.begin()
    elif act == "kill last" and len(job.members) > 1:
        del job.members[-1]
        job.begin()
    elif act == "join" and len(job.members) < 5:
        job.begin(joiners=1)
    elif act == "alone" and len(job.members) > 1:
        # The first member hears of a commit, tells the tracker and dies; the others drop the step.
        job.commit(only_first=True)
        job.deliver()
        del job.members[0]
        job.begin()
    elif act == "cut":
        # The connection breaks behind a point.
        job.store.fails_after = 1
        job.deliver()
        job.store.fails_after = None
    elif act == "checkpoint":
        job.checkpoint = job.step
    elif act == "back":
        job.go_back(2)
    elif act == "back together":
        # The state is lost, but not the processes.
        job.go_back(1, job.members[:2])
    elif act == "evaluate":
        job.report(accuracy=float(job.step))
    elif act == "fail":
        job.store.fails_after = 0
        job.deliver()
        job.store.fails_after = None
    elif act == "leave" and len(job.members) > 1:
        # It goes in order, and tells the tracker the last it has.
        job.deliver()
        del job.members[0]
        job.begin()


@given(st.lists(st.sampled_from(ACTS), max_size=60))
@settings(max_examples=150, deadline=None)
def test_each_committed_step_once_with_its_value(acts: list[str]) -> None:
    store = Store()
    job = Job(store, 3)
    unknown: set[int] = set()
    for act in acts:
        play(job, act)
        unknown |= lost(job)
        unknown = {step for step in unknown if step in job.steps}
        if act in ("back", "back together"):
            # Where all die at once, the tracker has to be told of the way back before they do so again.
            assert job.deliver()
    assert job.deliver()
    # Steps whose last witness died before the tracker could be told may be missing, or those dropped before.
    found = {step: value for step, value in store.of("loss").items() if step not in unknown}
    expected = {step: values["loss"] for step, values in job.steps.items() if step and step not in unknown}
    assert found == expected


@given(st.lists(st.sampled_from(ACTS), max_size=60))
@settings(max_examples=80, deadline=None)
def test_a_tracker_that_keeps_all_has_each_step_once(acts: list[str]) -> None:
    """One that cannot go back: no step is written twice (`Store.put` sees to that), and none is missing."""
    store = Store(goes_back=False)
    job = Job(store, 3)
    unknown: set[int] = set()
    for act in acts:
        play(job, act)
        unknown |= lost(job)
    job.deliver()
    assert {step for step in job.steps if step} - set(store.of("loss")) <= unknown


def test_next_writer_goes_on_behind_the_dead_one() -> None:
    store = Store()
    job = Job(store, 3)
    for _ in range(4):
        job.commit()
    job.deliver()
    job.commit()
    job.commit()
    play(job, "kill first")
    job.commit()
    job.deliver()
    assert list(store.of("loss")) == [1, 2, 3, 4, 5, 6, 7]
    assert store.of(WORKERS) == {1: 3.0, 7: 2.0}
    assert [text.partition(":")[0] for text in store.annotations] == [
        "generation 1.0/1, 3 workers",
        "generation 1.0/2, 2 workers",
    ]
    assert store.rewinds == []


def test_commit_of_the_dead_writer_alone_is_taken_back() -> None:
    store = Store()
    job = Job(store, 2)
    job.commit()
    job.commit(only_first=True)
    job.deliver()
    assert set(store.of("loss")) == {1, 2}
    play(job, "kill first")
    job.commit()
    job.deliver()
    assert store.rewinds == [1]
    assert store.of("loss")[2] == job.steps[2]["loss"]


def test_joiner_as_next_writer_takes_back_what_it_never_saw() -> None:
    """Back at the checkpoint, the tracker is not reached before the first members are gone."""
    store = Store()
    job = Job(store, 2)
    for _ in range(6):
        job.commit()
    job.deliver()
    job.checkpoint = 2
    job.go_back(2)
    job.commit()
    job.begin(joiners=1)
    job.members = job.members[2:]
    job.begin()
    job.commit()
    job.deliver()
    assert store.rewinds == [2]
    assert set(store.of("loss")) == {1, 2, 4}  # nobody who is left knows step 3
    assert store.of("loss")[4] == job.steps[4]["loss"]


def test_values_between_steps_belong_to_the_step_before() -> None:
    store = Store()
    job = Job(store, 2)
    job.commit({"loss": 1.0})
    job.report(loss=0.25, accuracy=0.5)
    job.deliver()
    assert "accuracy" not in {name for name, _ in store.points}  # it may still change
    job.report(accuracy=0.75)
    job.commit({"loss": 2.0})
    play(job, "kill first")
    job.deliver()
    assert store.of("accuracy") == {1: 0.75}
    assert store.of("outside/loss") == {1: 0.25}
    assert store.of("loss") == {1: 1.0, 2: 2.0}


def test_a_tracker_that_fails_gets_all_later() -> None:
    store = Store(fails_after=0)
    job = Job(store, 1)
    for _ in range(5):
        job.commit()
        assert not job.deliver()
    assert job.writer.counts.failures == 5
    assert job.writer.counts.waiting == 5
    store.fails_after = None
    assert job.deliver()
    assert list(store.of("loss")) == [1, 2, 3, 4, 5]
    assert job.writer.counts.waiting == job.writer.counts.losses == 0


def test_what_does_not_fit_any_more_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(fails_after=0)
    job = Job(store, 1)
    size = job.writer.tracking.journal.size
    job.deliver()
    for _ in range(size + 10):
        job.commit()
    job.deliver()
    job.deliver()
    assert job.writer.counts.losses == 10
    assert caplog.text.count("the oldest are lost to it") == 1
    assert caplog.text.count("it is tried again and again") == 1
    store.fails_after = None
    assert job.deliver()
    assert min(store.of("loss")) == 11
    assert len(store.of("loss")) == size
    # The first generation is annotated although its first step is lost, so that nothing is taken back later.
    assert store.generation == "1.0/1"
    job.begin(joiners=1)
    job.commit()
    job.deliver()
    assert store.rewinds == []


def test_new_writer_waits_until_the_former_one_is_through() -> None:
    store = Store()
    job = Job(store, 2)
    job.commit()
    former = job.writer
    former.tracking.pause()
    job.members = [*job.members[1:], former]
    job.begin()
    job.commit()
    assert not job.writer.delivery.look()  # at once
    assert job.writer.logger.calls == []
    assert former.delivery.look()
    assert former.logger.calls == []  # no writer any more
    assert job.deliver()
    assert list(store.of("loss")) == [1, 2]


def test_former_writer_may_write_no_longer_than_it_is_waited_for() -> None:
    store = Store()
    job = Job(store, 2)
    job.commit()
    former = job.writer
    former.tracking.pause()
    job.ahead += former.logger.settle_seconds - 0.5
    former.delivery.look()
    assert store.points == {}


def test_writer_again_reads_what_others_wrote_meanwhile() -> None:
    store = Store()
    job = Job(store, 2)
    job.commit()
    job.deliver()
    first, second = job.members
    job.members = [second, first]
    job.begin()
    job.commit()
    job.deliver()
    job.members = [first, second]
    job.begin()
    job.commit()
    # Its thread has slept through the generation between.
    job.deliver(first)
    assert first.logger.calls.count("open") == 2
    assert list(store.of("loss")) == [1, 2, 3]


def test_line_forgets_what_later_beginnings_say() -> None:
    line: tuple[Beginning, ...] = ()
    for number, step in enumerate((0, 10, 20, 15, 15, 30), start=1):
        line = with_beginning(line, Beginning(generation(number), step, 2))
    assert [(one.generation.number, one.step) for one in line] == [(1, 0), (2, 10), (5, 15), (6, 30)]
    assert back_to(line, generation(6)) is None
    assert back_to(line, generation(5)) == 30
    assert back_to(line, generation(3)) == 15
    assert back_to(line, None) == 0


@given(st.lists(st.integers(0, 30), max_size=3 * MAX_BEGINNINGS), st.integers(0, 3 * MAX_BEGINNINGS))
def test_a_long_line_never_says_too_little(steps: list[int], known: int) -> None:
    line: tuple[Beginning, ...] = ()
    for number, step in enumerate(steps, start=1):
        line = with_beginning(line, Beginning(generation(number), step, 1))
    assert len(line) <= MAX_BEGINNINGS
    right = min(steps[known:], default=None)
    found = back_to(line, generation(known))
    if right is None:
        assert found is None
    else:
        assert found is not None
        assert found <= right


@given(
    st.dictionaries(st.integers(1, 40), st.integers(0, 30), max_size=20),
    st.sets(st.integers(1, 40)),
    st.integers(0, 40),
)
def test_two_parts_of_a_line_make_the_whole(steps: dict[int, int], own: set[int], known: int) -> None:
    def line_of(numbers: set[int]) -> Any:
        line: tuple[Beginning, ...] = ()
        for number in sorted(numbers & set(steps)):
            line = with_beginning(line, Beginning(generation(number), steps[number], 3))
        return line

    whole = merged(line_of(own), line_from_json(line_to_json(line_of(set(steps) - own))))
    assert back_to(whole, generation(known)) == back_to(line_of(set(steps)), generation(known))


def test_entry_of_a_dropped_step_is_off_the_line() -> None:
    first = Beginning(generation(1), 0, 2)
    line = with_beginning((first,), Beginning(generation(2), 5, 2))
    assert on_the_line(Entry(first, 5, 0.0, {}), line)
    assert not on_the_line(Entry(first, 6, 0.0, {}), line)


def test_names_are_looked_at_one_by_one() -> None:
    """A tracker took one of two values of a step before its connection broke."""
    beginning = Beginning(generation(1), 0, 1, "")
    entries = [Entry(beginning, step, 0.0, {"a": 1.0, "b": 2.0}, first=step == 1) for step in (1, 2, 3)]
    recorded = Recorded(-1, {"a": 2, "b": 1, WORKERS: 1}, "1.0/1")
    found = lacking(entries, (beginning,), recorded)
    assert [(record.step, dict(record.values)) for record in found] == [
        (2, {"b": 2.0}),
        (3, {"a": 1.0, "b": 2.0}),
    ]
    assert lacking(entries, (beginning,), Recorded(3, {}, "1.0/1")) == []
    assert list(gap(entries, (beginning,), Recorded(-1, {}, ""))) == [0]
    assert list(gap(entries[2:], (beginning,), recorded)) == []


def test_names_of_generations_are_read_as_they_are_written() -> None:
    assert read_generation(str(generation(7, 3))) == generation(7, 3)
    for text in ("", "1.0", "x", "1.0/3 "):
        assert read_generation(text) is None


def test_config_is_flattened_to_numbers_and_texts() -> None:
    config = {"lr": 0.1, "model": {"layers": 2, "kind": {"name": "x"}}, "betas": (0.9, 0.99), "none": None}
    assert flattened(config) == {
        "lr": 0.1,
        "model.layers": 2,
        "model.kind.name": "x",
        "betas": "(0.9, 0.99)",
        "none": "None",
    }


def test_name_of_the_step_itself_is_not_taken_twice() -> None:
    assert named_outside({"loss": 1.0, "acc": 2.0}, {"loss": 3.0}) == {"outside/loss": 1.0, "acc": 2.0}
