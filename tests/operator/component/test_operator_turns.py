"""How many jobs and requests are under way at a time, and who comes first."""

from __future__ import annotations

import asyncio
import heapq
from contextlib import suppress

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from kube_connections import to
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_operator import kube as kube_module
from springtide_operator.intervals import busy_seconds
from springtide_operator.kube import Kube
from springtide_operator.priority_semaphore import PATIENCE, PrioritySemaphore


async def test_turns_are_limited_and_urgent_ones_come_first() -> None:
    semaphore, order, most, now = PrioritySemaphore(2, 2), [], 0, 0

    async def job(name: str, urgent: bool) -> None:
        nonlocal most, now
        async with semaphore.turn(urgent):
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
    assert semaphore.waiting == 0


async def test_urgent_ones_that_never_end_starve_no_other() -> None:
    """Jobs that train come again at once, round after round."""
    semaphore, order = PrioritySemaphore(1, 1), []

    async def trains(name: str) -> None:
        for _ in range(40):
            async with semaphore.turn(urgent=True):
                order.append(name)
                await asyncio.sleep(0)

    async def begins(name: str) -> None:
        async with semaphore.turn():
            order.append(name)

    await asyncio.gather(*(trains(f"trains {number}") for number in range(3)), begins("new"), begins("newer"))
    assert order.index("new") == PATIENCE + 1  # the first had its turn before anybody waited
    assert order.index("newer") == 2 * (PATIENCE + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["run", "cancel", "fail"])), max_size=12))
def test_turns_are_given_back_whatever_happens(jobs: list[tuple[bool, str]]) -> None:
    async def all_of_them() -> None:
        semaphore = PrioritySemaphore(2, 2)

        async def job(urgent: bool, kind: str) -> None:
            async with semaphore.turn(urgent):
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
        assert semaphore.waiting == 0
        async with asyncio.timeout(60), semaphore.turn(), semaphore.turn():  # both are free again
            pass

    asyncio.run(all_of_them())


class Simulated:
    """Jobs of namespaces that take a turn, hold it for some simulated seconds, and come again."""

    def __init__(self, semaphore: PrioritySemaphore) -> None:
        self.semaphore = semaphore
        self.now = 0.0
        self.began: dict[str, float] = {}  # the first turn of each job
        self.held: list[tuple[float, int, asyncio.Event]] = []

    async def job(self, namespace: str, name: str, rounds: int, seconds: float, urgent: bool = False) -> None:
        for _ in range(rounds):
            async with self.semaphore.turn(urgent, namespace):
                self.began.setdefault(name, self.now)
                done = asyncio.Event()
                heapq.heappush(self.held, (self.now + seconds, len(self.began) + len(self.held), done))
                await done.wait()

    async def run(self, until: float) -> None:
        """Move the clock from one end of a turn to the next."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not self.held or self.held[0][0] > until:
                self.now = until
                return
            self.now, _, done = heapq.heappop(self.held)
            done.set()


async def test_a_flood_of_one_namespace_delays_no_other() -> None:
    """1,000 jobs whose turns take 2.5 s each, as creating 20 pods does among 32 others."""
    world = Simulated(PrioritySemaphore(32))
    tasks = [asyncio.create_task(world.job("flood", f"flood-{n}", 3, 2.5)) for n in range(1000)]
    await world.run(7.0)
    tasks += [asyncio.create_task(world.job("other", f"other-{n}", 1, 0.2)) for n in range(3)]
    await world.run(8.0)
    assert [world.began[f"other-{n}"] for n in range(3)] == [7.0, 7.0, 7.0]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert world.semaphore.waiting == 0


async def test_namespaces_take_turns_and_trains_go_first() -> None:
    semaphore, order = PrioritySemaphore(1, 1), []

    async def job(namespace: str, name: str, urgent: bool = False) -> None:
        async with semaphore.turn(urgent, namespace):
            order.append(name)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(job("a", f"a{n}")) for n in range(4)]
    tasks += [asyncio.create_task(job("a", "a-trains", urgent=True))]
    tasks += [asyncio.create_task(job("b", f"b{n}")) for n in range(2)]
    tasks += [asyncio.create_task(job("c", "c-trains", urgent=True)), asyncio.create_task(job("c", "c0"))]
    await asyncio.gather(*tasks)
    assert order == ["a0", "a-trains", "b0", "c-trains", "a1", "b1", "c0", "a2", "a3"]


async def test_no_namespace_holds_more_than_its_share() -> None:
    semaphore, held, most = PrioritySemaphore(8), 0, 0

    async def job() -> None:
        nonlocal held, most
        async with semaphore.turn(of="a"):
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    await asyncio.gather(*(job() for _ in range(30)))
    assert most == 2


@pytest.mark.parametrize(("jobs", "seconds"), [(0, 2), (100, 2), (500, 5), (1000, 10), (100_000, 50)])
def test_many_busy_jobs_are_looked_at_more_seldom(jobs: int, seconds: float) -> None:
    assert busy_seconds(jobs, 2.0) == seconds


async def test_waiting_for_other_requests_is_not_in_request_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kube_module, "AT_A_TIME", 8)  # two of them for one namespace
    now, most, asked = 0, 0, []

    async def answer(request: web.Request) -> web.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        asked.append(request.path)
        if len(asked) == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response({})

    full = asyncio.Event()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Kube(to(f"http://127.0.0.1:{runner.addresses[0][1]}")) as kube:
            tasks = [asyncio.create_task(kube.request("POST", f"/{number}")) for number in range(6)]
            await until(lambda: len(asked) == 2, "those that may ask")
            await kube.request("GET", "/lease", urgent=True)
            await asyncio.gather(*tasks)
    finally:
        await runner.cleanup()
    assert most == 3
    assert (sorted(asked[:2]), asked[2]) == (["/0", "/1"], "/lease")


async def test_many_jobs_that_start_together_all_get_their_pods() -> None:
    cluster = FakeCluster()
    for number in range(120):
        cluster.add_job(f"job-{number}", replicas=2)
    async with operator(cluster):
        await until(lambda: len(cluster.pods()) == 240, "all workers", seconds=60)
