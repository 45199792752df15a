"""A process that comes to a running job never goes where it could not come back from."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.coordination.newcomer import Move, Newcomer, next_move


@pytest.mark.parametrize(
    ("newcomer", "move"),
    [
        (Newcomer(0), Move.ASK),
        (Newcomer(0, asked=True), Move.WAIT),
        (Newcomer(0, running_loop=0), Move.ASK),
        (Newcomer(0, running_loop=1), Move.PASS),
        (Newcomer(0, running_loop=1, asked=True), Move.PASS),
        (Newcomer(1, running_loop=1, asked=True), Move.WAIT),
        (Newcomer(2, running_loop=1), Move.ASK),
        (Newcomer(0, running_loop=5, asked=True, answered=True), Move.ENTER),
        (Newcomer(0, answered=True), Move.ENTER),
    ],
)
def test_move_of_a_newcomer(newcomer: Newcomer, move: Move) -> None:
    assert next_move(newcomer) is move


@dataclass
class Job:
    """A job with a joiner: what the joiner is told may be late, or never come, and the job may go back."""

    loop: int
    told: int | None = None
    stage: int = 0
    asked: bool = False
    answered: bool = False
    told_ever: set[int] = field(default_factory=set)

    def tell(self) -> None:
        """Have the coordinator's word arrive."""
        self.told = self.loop
        self.told_ever.add(self.loop)

    def move(self) -> Move:
        """Have the joiner make its next move; return which."""
        found = next_move(Newcomer(self.stage, self.told, self.asked, self.answered))
        if found is Move.PASS:
            self.stage += 1
        if found is Move.ASK:
            self.asked = True
        return found


EVENTS = st.lists(st.sampled_from(["move", "next loop", "tell", "lose coordinator", "start"]), max_size=60)


@given(loop=st.integers(0, 6), events=EVENTS)
def test_newcomer_asks_in_no_loop_after_the_jobs(loop: int, events: list[str]) -> None:
    """The job goes on at any moment; what was told may be old, and a lost coordinator tells nothing."""
    job, passed = Job(loop), 0
    for event in events:
        if event == "next loop":
            job.loop += 1
        elif event == "tell":
            job.tell()
        elif event == "start" and job.asked:
            job.answered = True
        elif event == "move":
            before = job.stage
            move = job.move()
            passed += move is Move.PASS
            assert job.stage == before + (move is Move.PASS), "one batch of each loop"
            if move is Move.ASK:
                assert job.told is None or job.told <= job.stage, "it asks where it knows the job to be"
            assert (move is Move.ENTER) == job.answered, "nobody waits for what it could still go through"
        assert job.stage <= job.loop, "it has left no loop that the job is in"
    assert passed == job.stage
    if job.told is None:
        assert passed == 0, "an old coordinator: it goes through nothing by itself"


@given(loop=st.integers(0, 9), told=st.none() | st.integers(0, 9))
def test_newcomer_comes_to_ask_and_stays_asked(loop: int, told: int | None) -> None:
    job = Job(loop, told=told)
    moves = [job.move() for _ in range((told or 0) + 3)]
    assert moves[: told or 0] == [Move.PASS] * (told or 0)
    assert moves[told or 0 :] == [Move.ASK, Move.WAIT, Move.WAIT]


@given(told=st.integers(1, 9), back=st.integers(0, 8))
def test_newcomer_told_of_an_earlier_loop_goes_no_further(told: int, back: int) -> None:
    """The job goes on from a checkpoint of an earlier loop: the next generation sorts that out."""
    job = Job(told, told=told)
    job.move()
    job.loop = job.told = min(back, told)
    while job.move() is Move.PASS:
        pass
    assert job.stage == max(1, job.told)
    assert job.asked
