"""How long a step takes, how many there are, and what the operator hears of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import generation
from hypothesis import given
from hypothesis import strategies as st

from springtide_coordinator.commit_intervals import WARM_STEPS
from springtide_coordinator.history import History
from springtide_coordinator.hub import Hub
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_coordinator.step_rate import LEAST_SECONDS, MEMORY_SECONDS, StepRate
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation


def commit_steps(
    rate: StepRate, number: int, size: int, steps: range, began: float, seconds: float = 0.5
) -> float:
    """Commit these steps, so many seconds for each; return the time after them."""
    for count, step in enumerate(steps):
        rate.committed(generation(number), size, step, began + count * seconds * steps.step)
    return began + len(steps) * seconds * steps.step


def test_rate_is_told_when_enough_steps_were_measured() -> None:
    rate = StepRate()
    needed = WARM_STEPS + int(LEAST_SECONDS / 0.5)
    commit_steps(rate, 1, 2, range(1, needed), 100.0)
    assert rate.seconds_per_step == 0.0
    rate.committed(generation(1), 2, needed, 100.0 + (needed - 1) * 0.5)
    assert rate.seconds_per_step == pytest.approx(0.5)


def test_the_pause_of_a_change_does_not_count_in_the_rate() -> None:
    rate = StepRate()
    now = commit_steps(rate, 1, 2, range(1, 101), 100.0)
    rate.begun(generation(2), 2)
    assert rate.seconds_per_step == pytest.approx(0.5), "a worker was replaced: the size is the same"
    commit_steps(rate, 2, 2, range(101, 201), now + 500.0)
    assert rate.seconds_per_step == pytest.approx(0.5)


def test_another_size_is_measured_anew() -> None:
    rate = StepRate()
    now = commit_steps(rate, 1, 2, range(1, 101), 100.0)
    rate.begun(generation(2), 4)
    assert rate.seconds_per_step == 0.0
    commit_steps(rate, 2, 4, range(101, 201), now, seconds=0.25)
    assert rate.seconds_per_step == pytest.approx(0.25)


def test_one_commit_for_several_steps_counts_them_all() -> None:
    rate = StepRate()
    commit_steps(rate, 1, 3, range(1, 200, 4), 100.0)
    assert rate.seconds_per_step == pytest.approx(0.5)


def test_what_stands_between_steps_counts_and_fades() -> None:
    rate = StepRate()
    now = commit_steps(rate, 1, 2, range(1, 401), 100.0, seconds=1.0)
    commit_steps(rate, 1, 2, range(401, 402), now + 400.0)
    assert rate.seconds_per_step == pytest.approx(2.0, rel=0.05), "an evaluation, which will come again"
    commit_steps(rate, 1, 2, range(402, 12_000), now + 401.0, seconds=1.0)
    assert rate.seconds_per_step == pytest.approx(1.0, rel=0.02)


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.floats(-5.0, 900.0)),
        max_size=60,
    )
)
def test_any_order_of_commits_gives_a_rate_within_what_was_seen(
    told: list[tuple[int, int, int, float]],
) -> None:
    rate, now, step = StepRate(), 1000.0, 10
    for number, size, more, seconds in told:
        now, step = now + seconds, step + more
        rate.committed(generation(number), size, step, now)
        assert 0.0 <= rate.seconds_per_step <= MEMORY_SECONDS + 900.0


def test_first_loop_counts_as_the_only_one_until_the_second() -> None:
    history = History()
    history.plan(0, 120, 0)
    assert history.planned_steps == 120
    history.plan(0, 0, 0)
    assert history.planned_steps == 120, "the loop has ended, and the next one has not begun"
    history.plan(0, 120, 1)
    assert history.planned_steps == 0, "nobody knows how many loops come"


def test_the_scripts_word_stands_above_the_loops_steps() -> None:
    history = History()
    history.plan(600, 120, 0)
    assert history.planned_steps == 600
    history.plan(600, 120, 3)
    assert history.planned_steps == 600
    history.plan(700, 0, 4)
    assert history.planned_steps == 700, "the script may move its end"


def test_a_loop_without_end_has_no_planned_steps() -> None:
    history = History()
    history.plan(0, 0, 0)
    assert history.planned_steps == 0


def test_the_operator_hears_of_plan_and_rate(tmp_path: Path) -> None:
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=1, minimum=1, job="j", namespace="n")
    hub = Hub(options, Incarnation(1), lambda: now[0])
    stream = hub.new_stream()
    member = pb.Member(id="m0", pod_uid="u", pod_name="pod")
    hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
    hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    living = [pb.Pod(uid="u", name="pod", started=True)]
    word = pb.SyncRequest(target=1, minimum=1, maximum=1, living=living, observed=True)
    answer = answer_sync(hub, word)
    assert (answer.planned_steps, answer.seconds_per_step) == (0, 0.0)
    current = hub.membership.current
    assert current is not None
    name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)
    hub.receive(stream, pb.WorkerMessage(formed=pb.Formed(generation=name)))
    for step in range(1, 14):
        now[0] += 2.0
        commit = pb.Commit(state=pb.StateName(generation=name, step=step), unix_time=now[0], samples=8)
        progress = pb.Progress(commits=[commit], total_steps=40, data=pb.Data(stage=0))
        hub.receive(stream, pb.WorkerMessage(progress=progress))
    answer = answer_sync(hub, word)
    assert (answer.planned_steps, answer.seconds_per_step) == (40, 2.0)
    progress.job_steps, progress.commits[0].state.step = 90, 14
    hub.receive(stream, pb.WorkerMessage(progress=progress))
    assert answer_sync(hub, word).planned_steps == 90
