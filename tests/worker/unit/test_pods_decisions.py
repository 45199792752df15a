"""The decisions of a pod: all of its processes go one way, whatever each of them hears and when."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm.process_group import Group
from springtide.errors import Dropped, SpringtideError
from springtide.pods.dims import MeshShape
from springtide.pods.grid import Grid
from springtide.pods.pod import Pod
from springtide.pods.rendezvous import Meeting
from springtide.train_step.transaction import Phase, Transaction

_dist: Any = dist


class Processes:
    """The processes of one pod, in threads of this one; `over[rank]` is set when its generation is over."""

    def __init__(self, count: int, seconds: float = 20.0) -> None:
        store = _dist.HashStore()
        self.over = [threading.Event() for _ in range(count)]
        self.pods = [
            Pod(
                MeshShape(("dp_shard",), (count,)),
                None,
                Meeting(store, store),
                rank,
                seconds,
                lambda event=self.over[rank]: "it is over" if event.is_set() else "",  # type: ignore[misc]
            )
            for rank in range(count)
        ]
        self.enter("1.0/1")

    def enter(self, generation: str) -> None:
        for pod in self.pods:
            pod.enter(generation, Grid(0, 1, (pod.local_rank,)), Group(None, 0, 1, 1.0))

    def all(self, call: Any) -> list[Any]:
        """Return what `call(pod)` returns, or raises, in each process."""
        found: list[Any] = [None] * len(self.pods)

        def run(rank: int) -> None:
            try:
                found[rank] = call(self.pods[rank])
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.pods))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        return found


def no_check() -> None:
    """Let who waits wait on."""


@settings(max_examples=30, deadline=None)
@given(
    able=st.lists(st.booleans(), min_size=2, max_size=4),
    ends=st.lists(st.one_of(st.none(), st.floats(0.0, 0.004)), min_size=4, max_size=4),
    waits=st.lists(st.floats(0.0, 0.004), min_size=4, max_size=4),
)
def test_all_processes_commit_or_none_does(
    able: list[bool], ends: list[float | None], waits: list[float]
) -> None:
    processes = Processes(len(able))
    timers = [
        threading.Timer(after, event.set)
        for after, event in zip(ends, processes.over, strict=False)
        if after is not None
    ]
    for timer in timers:
        timer.start()

    def decide(pod: Pod) -> bool:
        time.sleep(waits[pod.local_rank])
        return pod.commits(7, able[pod.local_rank])

    found = processes.all(decide)
    for timer in timers:
        timer.join()
    assert len(set(found)) == 1
    if not all(able):
        assert found[0] is False
    elif all(after is None for after in ends):
        assert found[0] is True
    # One that asks again hears the same.
    assert processes.pods[0].commits(7, True) is found[0]


def test_decisions_follow_one_another_and_old_ones_are_deleted() -> None:
    processes = Processes(2)
    for step in range(1, 20):
        assert processes.all(lambda pod, step=step: pod.begins(step)) == [True, True]
        assert processes.all(lambda pod, step=step: pod.commits(step, True)) == [True, True]
    processes.over[1].set()

    def begin(pod: Pod) -> bool:
        return pod.local_rank == 0 and pod.begins(20)

    waiting = threading.Timer(0.05, processes.over[0].set)
    waiting.start()
    assert processes.all(begin) == [False, False]
    waiting.join()
    # The next generation has names of its own.
    for event in processes.over:
        event.clear()
    processes.enter("1.0/2")
    assert processes.all(lambda pod: pod.begins(20)) == [True, True]


def test_process_that_does_not_come_is_named() -> None:
    processes = Processes(3, seconds=0.2)
    found = processes.all(lambda pod: pod.local_rank == 1 or pod.begins(4))
    assert found[1] is True
    for error in (found[0], found[2]):
        assert isinstance(error, SpringtideError)
        assert "step 4: after 0.2 s the process with local rank 1 of this pod has not come" in str(error)


def test_single_process_decides_alone() -> None:
    (pod,) = Processes(1).pods
    assert pod.begins(1)
    assert not pod.commits(1, False)
    assert pod.ask_as_one("mine", lambda words: f"answer to {words}", no_check) == "answer to ['mine']"


def test_first_process_asks_for_all_of_the_pod() -> None:
    processes, asked = Processes(3), []

    def ask(words: list[str]) -> str:
        asked.append(words)
        time.sleep(0.01 * len(asked))  # for others, which may take long
        return f"answer {len(asked)}"

    for number in range(1, 6):
        found = processes.all(lambda pod, n=number: pod.ask_as_one(f"{n} of {pod.local_rank}", ask, no_check))
        assert found == [f"answer {number}"] * 3
        assert asked[-1] == [f"{number} of {rank}" for rank in range(3)]
    assert len(asked) == 5


def test_process_that_has_no_question_is_named() -> None:
    processes = Processes(3, seconds=0.2)
    with pytest.raises(SpringtideError, match="the process with local rank 1, 2 of this pod has not come"):
        processes.pods[0].ask_as_one("", lambda words: "", no_check)


def test_who_waits_for_an_answer_may_be_ended() -> None:
    def end() -> None:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        Processes(2).pods[1].ask_as_one("", lambda words: "", end)


def test_voted_step_follows_the_pod_and_not_the_coordinator() -> None:
    for agreed, phase in ((True, Phase.STEPPING), (False, Phase.DROPPED)):
        transaction = Transaction()
        transaction.begin()
        transaction.vote()
        transaction.drop("the generation is over")
        assert transaction.phase is Phase.VOTED
        transaction.decide(agreed, "another process could not")
        assert transaction.phase is phase
        if agreed:
            transaction.start_stepping()
        else:
            with pytest.raises(Dropped, match="another process could not"):
                transaction.check_alive()
    transaction = Transaction()
    transaction.begin()
    transaction.drop("the generation is over")
    with pytest.raises(Dropped, match="generation is over"):
        transaction.vote()
