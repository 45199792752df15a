"""Samples per second by number of workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import generation

from springtide_coordinator.commit_intervals import WARM_STEPS
from springtide_coordinator.hub import Hub
from springtide_coordinator.rates import KEPT_SIZES, MEMORY_SECONDS, Rates
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation


def commit_steps(
    rates: Rates, number: int, size: int, steps: range, began: float, pace: float = 0.5
) -> float:
    """Steps of 16 samples; the time after them."""
    for count, step in enumerate(steps):
        rates.committed(generation(number), size, step, began + count * pace, 16)
    return began + len(steps) * pace


def test_the_first_steps_of_a_generation_are_left_out() -> None:
    rates = Rates()
    commit_steps(rates, 1, 2, range(1, 1 + WARM_STEPS), 100.0, pace=30.0)
    assert rates.by_size == {}
    rates = Rates()
    for step in range(1, 12):
        rates.committed(generation(1), 2, step, 100.0 + min(step, WARM_STEPS) * 30.0 + step * 0.5, 16)
    found = rates.by_size[2]
    assert found.steps == 11 - WARM_STEPS
    assert found.samples_per_second == pytest.approx(32.0)


def test_replaced_worker_keeps_figures_and_new_size_resets_them() -> None:
    rates = Rates()
    now = commit_steps(rates, 1, 2, range(1, 21), 100.0)
    steps = rates.by_size[2].steps
    now = commit_steps(rates, 2, 2, range(21, 31), now + 60)
    assert rates.by_size[2].steps > steps
    assert rates.by_size[2].samples_per_second == pytest.approx(32.0), "the pause between does not count"
    now = commit_steps(rates, 3, 4, range(31, 51), now + 5, pace=0.3)
    assert set(rates.by_size) == {2, 4}
    rates.begun(generation(4), 2)
    assert set(rates.by_size) == {4}, "what is measured anew has no old figures"
    commit_steps(rates, 4, 2, range(51, 61), now, pace=1.0)
    assert rates.by_size[2].samples_per_second == pytest.approx(16.0)


def test_commits_that_come_twice_or_with_gaps_do_not_count() -> None:
    rates = Rates()
    now = commit_steps(rates, 1, 2, range(1, 11), 100.0)
    before = (rates.by_size[2].steps, rates.by_size[2].seconds)
    commit_steps(rates, 1, 2, range(5, 11), now)
    rates.committed(generation(1), 2, 90, now + 1000, 16)
    assert (rates.by_size[2].steps, rates.by_size[2].seconds) == before


def test_old_steps_fade_and_few_sizes_are_kept() -> None:
    rates = Rates()
    now = commit_steps(rates, 1, 2, range(1, 400), 100.0, pace=1.0)
    assert rates.by_size[2].seconds <= MEMORY_SECONDS
    commit_steps(rates, 1, 2, range(400, 1300), now, pace=0.5)
    assert rates.by_size[2].samples_per_second == pytest.approx(32.0, rel=0.3)
    for size in range(1, 2 * KEPT_SIZES):
        commit_steps(rates, 1 + size, size, range(10_000 * size, 10_000 * size + 10), now)
    assert len(rates.by_size) == KEPT_SIZES
    assert 2 * KEPT_SIZES - 1 in rates.by_size


def test_the_operator_hears_what_each_number_of_pods_brought(tmp_path: Path) -> None:
    """Two processes of one pod are one worker."""
    now = [1000.0]
    options = Options(token="t", number=1, state_dir=tmp_path, target=2, minimum=2, job="j", namespace="n")
    hub = Hub(options, Incarnation(1), lambda: now[0])
    streams = []
    for rank in range(2):
        streams.append(hub.new_stream())
        member = pb.Member(id=f"m{rank}", pod_uid="u", pod_name="pod", local_rank=rank)
        hub.hello(streams[-1], pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        hub.receive(streams[-1], pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
    living = [pb.Pod(uid="u", name="pod", started=True)]
    word = pb.SyncRequest(target=2, minimum=2, maximum=2, living=living, observed=True, processes_per_pod=2)
    answer_sync(hub, word)
    current = hub.membership.current
    assert current is not None
    name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)
    for stream in streams:
        hub.receive(stream, pb.WorkerMessage(formed=pb.Formed(generation=name)))
    for step in range(1, 14):
        now[0] += 0.5
        commit = pb.Commit(state=pb.StateName(generation=name, step=step), unix_time=now[0], samples=8)
        hub.receive(streams[0], pb.WorkerMessage(progress=pb.Progress(commits=[commit])))
    found = answer_sync(hub, word).rates
    assert [(one.workers, one.samples_per_second, one.steps) for one in found] == [(1, 16.0, 10)]
    assert found[0].seconds == 5.0
