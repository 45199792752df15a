"""How many jobs and requests are under way at a time, and who comes first."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_operator import kube as kube_module
from springtide_operator.kube import Kube
from springtide_operator.pace import busy_seconds
from springtide_operator.turns import Turns


async def test_no_more_than_so_many_have_a_turn_and_urgent_ones_come_first() -> None:
    turns, order, most, now = Turns(2), [], 0, 0

    async def job(name: str, urgent: bool) -> None:
        nonlocal most, now
        async with turns.turn(urgent):
            now += 1
            most = max(most, now)
            order.append(name)
            await asyncio.sleep(0)
            now -= 1

    names = [("a", False), ("b", False), ("c", False), ("d", True), ("e", False), ("f", True)]
    tasks = [asyncio.create_task(job(*name)) for name in names]
    await asyncio.gather(*tasks)
    assert most == 2
    assert order == ["a", "b", "d", "f", "c", "e"]
    assert turns.waiting == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["run", "cancel", "fail"])), max_size=12))
def test_turns_are_given_back_whatever_happens(jobs: list[tuple[bool, str]]) -> None:
    async def all_of_them() -> None:
        turns = Turns(2)

        async def job(urgent: bool, kind: str) -> None:
            async with turns.turn(urgent):
                await asyncio.sleep(0)
                if kind == "fail":
                    raise ValueError(kind)

        tasks = [(asyncio.create_task(job(urgent, kind)), kind) for urgent, kind in jobs]
        for number, (task, kind) in enumerate(tasks):
            if kind == "cancel":
                for _ in range(number % 4):
                    await asyncio.sleep(0)
                task.cancel()
        for task, _ in tasks:
            with suppress(ValueError, asyncio.CancelledError):
                await task
        assert turns.waiting == 0
        for _ in range(2):  # both are free again
            await asyncio.wait_for(turns._take(turns._others), 60)

    asyncio.run(all_of_them())


@pytest.mark.parametrize(("jobs", "seconds"), [(0, 2), (100, 2), (500, 5), (1000, 10), (100_000, 50)])
def test_many_busy_jobs_are_looked_at_more_seldom(jobs: int, seconds: float) -> None:
    assert busy_seconds(jobs, 2.0) == seconds


async def test_waiting_for_other_requests_is_no_part_of_a_request_s_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube_module, "AT_A_TIME", 2)
    kube = Kube()
    now, most, asked = 0, 0, []

    async def ask(method: str, path: str, *rest: Any) -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        asked.append(path)
        await asyncio.sleep(0.01)
        now -= 1
        return {}

    monkeypatch.setattr(kube, "_ask", ask)
    tasks = [asyncio.create_task(kube.request("POST", f"/{number}")) for number in range(6)]
    await asyncio.sleep(0)
    await kube.request("GET", "/lease", urgent=True)
    await asyncio.gather(*tasks)
    assert most == 3
    assert asked[:3] == ["/0", "/1", "/lease"]


async def test_many_jobs_that_start_together_all_get_their_pods() -> None:
    cluster = FakeCluster()
    for number in range(120):
        cluster.add_job(f"job-{number}", replicas=2)
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 240, "all workers", seconds=60)
