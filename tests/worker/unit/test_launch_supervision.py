"""The pure part of the launcher: which processes start again, when the pod gives up, and its reports."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.coordination.outcome import Failed, Finished, Left
from springtide.launch.supervision import Action, End, Phase, Policy, Signal, Spawn, Supervisor
from springtide.launch.verdict import merged

FINISHED = End(0, Finished((1, 0), 3, 40, 2))
LEFT = End(0, Left("asked"))
RAISED = End(1, Failed("ValueError", "no", "train.py:3 in main"))
KILLED = End(-9)


def begun(count: int = 2, **policy: float) -> Supervisor:
    supervisor = Supervisor(count, Policy(**policy))  # type: ignore[arg-type]
    assert [action.rank for action in supervisor.begin(0.0)] == list(range(count))
    return supervisor


def test_a_single_one_is_started_again_after_a_pause_that_grows() -> None:
    pod = begun(2, backoff=1.0, backoff_most=3.0, restarts=9)
    now, pauses = 10.0, []
    for _ in range(4):
        assert pod.ended(1, KILLED, now) == []
        pauses.append(pod.next_at - now)
        assert pod.tick(pod.next_at - 0.01) == []
        now = pod.next_at
        assert [a.rank for a in pod.tick(now) if isinstance(a, Spawn)] == [1]
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    assert pod.restarts == [0, 4]
    assert pod.ended(0, FINISHED, now) == []
    assert pod.ended(1, FINISHED, now) == []
    outcome, code = merged(pod)
    assert isinstance(outcome, Finished)
    assert (outcome.report, code) == ({"processRestarts": 4.0}, 0)


def test_finished_process_killed_on_exit_is_not_restarted() -> None:
    for code in (-6, 139):
        pod = begun(2)
        assert pod.ended(0, replace(FINISHED, code=code), 1.0) == []
        assert pod.next_at == math.inf
        assert pod.ended(1, replace(LEFT, code=code), 2.0) == []
        assert merged(pod) == (FINISHED.outcome, 0)
    pod = begun(2)
    pod.ended(0, replace(FINISHED, code=255), 1.0)
    assert pod.next_at == 2.0


def test_processes_that_train_as_one_end_together() -> None:
    pod = begun(3)
    actions = pod.ended(1, KILLED, 1.0, as_one=True)
    assert [(a.rank, a.number) for a in actions if isinstance(a, Signal)] == [(0, 9), (2, 9)]
    assert pod.ended(0, KILLED, 1.1, as_one=True) == []
    assert pod.ended(2, KILLED, 1.2, as_one=True) == []
    assert pod.over
    outcome, code = merged(pod)
    assert isinstance(outcome, Failed)
    assert (outcome.message, code) == ("process 1 was killed by signal 9", 137)
    # Also where all have been asked to end: the others wait for the one that failed.
    pod = begun(2)
    pod.asked(signal.SIGTERM, 1.0)
    assert [a.number for a in pod.ended(0, RAISED, 2.0, as_one=True) if isinstance(a, Signal)] == [9]
    pod = begun(2)
    assert pod.ended(0, FINISHED, 1.0, as_one=True) == []
    assert pod.ended(1, FINISHED, 1.0, as_one=True) == []


def test_beyond_the_limit_pod_asks_others_to_end_then_kills() -> None:
    pod = begun(3, restarts=1, grace=20.0)
    pod.ended(2, KILLED, 1.0)
    assert pod.tick(2.0) == [Spawn(2, "restart 1 of 1")]
    actions = pod.ended(2, RAISED, 3.0)
    assert [(a.rank, a.number) for a in actions if isinstance(a, Signal)] == [(0, 15), (1, 15)]
    assert pod.ended(0, LEFT, 4.0) == []
    assert [(a.rank, a.number) for a in pod.tick(23.0) if isinstance(a, Signal)] == [(1, 9)]
    assert pod.tick(24.0) == []
    assert pod.ended(1, KILLED, 24.0) == []
    assert pod.over
    outcome, code = merged(pod)
    assert isinstance(outcome, Failed)
    assert outcome.exception == "ValueError"
    assert outcome.message == "no (process 2) (after 1 restarts of processes in this pod)"
    assert (outcome.frame, code) == ("train.py:3 in main", 1)


def test_a_calm_time_gives_the_restarts_back() -> None:
    pod = begun(2, restarts=1, calm=100.0)
    pod.ended(0, KILLED, 5.0)
    pod.tick(pod.next_at)
    pod.ended(0, KILLED, 200.0)
    assert pod.processes[0].phase is Phase.WAITING
    pod.tick(pod.next_at)
    pod.ended(0, KILLED, 250.0)
    assert pod.gave_up == 0
    assert pod.restarts == [2, 0]


def test_nobody_is_started_again_when_no_other_process_lives() -> None:
    alone = begun(1)
    alone.ended(0, RAISED, 1.0)
    assert alone.over
    assert merged(alone) == (RAISED.outcome, 1)
    both = begun(2)
    both.ended(0, RAISED, 1.0)
    both.ended(1, KILLED, 1.1)
    assert both.over
    assert both.gave_up == 1
    last = begun(2)
    last.ended(0, KILLED, 1.0)
    last.ended(1, LEFT, 1.2)
    assert last.over  # who waits has nobody to get the state from
    assert last.gave_up == 0


def test_pod_asked_to_end_starts_nobody_again() -> None:
    pod = begun(3)
    pod.ended(0, KILLED, 1.0)
    actions = pod.asked(signal.SIGTERM, 1.5)
    assert [(a.rank, a.number) for a in actions if isinstance(a, Signal)] == [(1, 15), (2, 15)]
    assert pod.next_at == math.inf
    pod.ended(1, LEFT, 2.0)
    pod.ended(2, End(-15), 2.0)  # it had not come to handle the signal
    assert pod.over
    assert merged(pod)[1] == 137  # the one that was killed did fail
    calm = begun(2)
    calm.asked(signal.SIGTERM, 1.0)
    calm.ended(0, End(-15), 1.1)
    calm.ended(1, End(-15), 1.1)
    assert merged(calm) == (Left("SIGTERM"), 0)


def test_finished_process_speaks_for_pod_and_best_state_wins() -> None:
    pod = begun(3)
    later = End(0, Finished((1, 1), 1, 50, 2))
    pod.ended(0, FINISHED, 1.0)
    pod.ended(1, later, 1.0)
    pod.ended(2, RAISED, 1.0)  # after the loop
    assert pod.over
    assert merged(pod) == (later.outcome, 0)


def test_what_is_said_of_a_process_that_said_nothing() -> None:
    def said(end: End, count: int = 2) -> tuple[Failed, int]:
        pod = begun(count, restarts=0)
        for rank in range(count):
            pod.ended(rank, end if rank == 0 else LEFT, 1.0)
        outcome, code = merged(pod)
        assert isinstance(outcome, Failed)
        return outcome, code

    starved, code = said(replace(KILLED, out_of_memory=True))
    assert (starved.reason, code) == ("OOMKilled", 137)
    assert "process 0 was killed: out of memory" in starved.message
    assert said(KILLED)[0].message == "process 0 was killed by signal 9"
    unfinished, code = said(End(0))
    assert (unfinished.reason, code) == ("NotFinished", 1)
    tail = (
        'Traceback (most recent call last):\n  File "t.py", line 5, in main\n    load()\n'
        "data.Missing: no file\n[rank0]: note\n"
    )
    raised, code = said(End(3, tail=tail))
    assert (raised.exception, code) == ("data.Missing", 3)
    assert raised.message == "process 0 exited with code 3: data.Missing: no file"
    assert said(End(3))[0].message == "process 0 exited with code 3: it wrote nothing"
    assert said(replace(KILLED, out_of_memory=True), count=1)[0].message.startswith("the process was killed")
    # Of a single one the end of its own log says more.
    single = begun(1)
    single.ended(0, End(3, tail=tail), 1.0)
    assert merged(single) == (None, 3)


ENDS = st.sampled_from([FINISHED, LEFT, RAISED, KILLED, End(0), End(-15)])


@settings(deadline=None, max_examples=300)
@given(
    count=st.integers(1, 4),
    restarts=st.integers(0, 3),
    moves=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 40), ENDS), max_size=40),
)
def test_pod_ends_with_a_telling_outcome_whatever_happens(
    count: int, restarts: int, moves: list[tuple[int, float, End]]
) -> None:
    pod = Supervisor(count, Policy(restarts=restarts, calm=math.inf, grace=30.0))
    running: set[int] = set()
    now = spawned = 0.0

    def act(actions: list[Action]) -> None:
        nonlocal spawned
        for action in actions:
            if isinstance(action, Spawn):
                assert action.rank not in running
                assert not pod.stopping
                running.add(action.rank)
                spawned += 1
            else:
                assert action.rank in running

    act(pod.begin(now))
    for which, pause, end in moves:
        now += pause
        act(pod.tick(now))
        if which == 5:
            act(pod.asked(signal.SIGTERM, now))
        elif which in running:
            running.discard(which)
            act(pod.ended(which, end, now))
        assert {r for r, p in enumerate(pod.processes) if p.phase is Phase.RUNNING} == running
        assert pod.over == (not running and pod.next_at == math.inf)
        if pod.gave_up is not None:
            # Nobody outlives the grace period without being killed.
            assert all(p.due <= now + 30.0 or p.due == math.inf for p in pod.processes)
    act(pod.asked(signal.SIGTERM, now))
    for rank in sorted(running):
        act(pod.ended(rank, KILLED, now))
    assert pod.over
    assert spawned <= count + restarts
    outcome, code = merged(pod)
    assert (code == 0) == isinstance(outcome, Finished | Left)
    assert outcome is not None or count == 1
