"""The operator's process in a test, over a cluster in memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from operator_cluster import FakeCluster, FakeCoordinator
from operator_lists import FakeLists

from springtide_operator.runtime import Operator
from springtide_operator.settings import Settings

Object = dict[str, Any]

WATCHED = ("trainingjobs", "pods", "networkpolicies", "poddisruptionbudgets")


async def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def operator(
    cluster: FakeCluster,
    coordinator: FakeCoordinator | None = None,
    identity: str = "one",
    watch: bool = True,
    on_death: Callable[[str], None] = lambda why: None,
    **changes: Any,
) -> AsyncIterator[Operator]:
    given = {"root_key": b"k" * 32, "tick": 0.2, **changes}
    settings = Settings(identity=identity, bind="127.0.0.1", metrics_port=0, **given)
    coordinator = coordinator or FakeCoordinator()
    lists = FakeLists(cluster)
    made = Operator(settings, lists, cluster=cluster, connect=coordinator.connect, on_death=on_death)
    lists.feed = made

    def hear(plural: str, kind: str, obj: Object) -> None:
        if plural in WATCHED:
            made.take_event(plural, kind, obj)

    if watch:
        cluster.watchers.append(hear)
    await made.start()
    try:
        yield made
    finally:
        if watch:
            cluster.watchers.remove(hear)
        await made.stop()
