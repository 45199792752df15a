"""Groups of several ranks as threads of one process: their stores are wired to each other directly."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import one_operator  # noqa: F401 (these threads may be the first to use an operator)

from springtide.comm.process_group import Group, form
from springtide.comm.store import StreamStore

_numbers = itertools.count(1)


def wired_stores(
    count: int, timeout_seconds: float = 20.0, silent: Collection[int] = ()
) -> list[StreamStore]:
    """Stores that deliver to each other what is set in one of them. silent: ranks that nobody hears of."""
    stores: list[StreamStore] = []

    def publisher(rank: int) -> Callable[[str, bytes], None]:
        def publish(key: str, value: bytes) -> None:
            for other, store in enumerate(stores):
                if other != rank and rank not in silent:
                    store.deliver([(key, value)])

        return publish

    names = [f"worker-{rank}" for rank in range(count)]
    stores.extend(StreamStore(publisher(rank), names, timeout_seconds) for rank in range(count))
    return stores


def addresses(count: int) -> list[str]:
    number = next(_numbers)
    return [f"127.{60 + os.getpid() % 40}.{number % 250}.{rank + 1}" for rank in range(count)]


def together(calls: Sequence[Callable[[], Any]], timeout_seconds: float = 40.0) -> list[Any]:
    """Run the calls at the same time, each in a thread; return their results, or the first exception."""
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout_seconds) for future in futures]


def form_groups(count: int, collective_seconds: float = 30.0, connect_seconds: float = 10.0) -> list[Group]:
    stores, places = wired_stores(count), addresses(count)
    return together(
        [
            lambda rank=rank: form(
                stores[rank],
                rank,
                count,
                places[rank],
                connect_seconds=connect_seconds,
                collective_seconds=collective_seconds,
            )
            for rank in range(count)
        ]
    )


class FormedGroups:
    """Forms groups of a size in this process, and gives all of them back at the end."""

    def __init__(self) -> None:
        self._made: list[Group] = []

    def __call__(self, count: int) -> list[Group]:
        self._made.extend(form_groups(count))
        return self._made[-count:]

    def close(self) -> bool:
        """Shut all, free what can be freed, and return whether that was all."""
        for group in self._made:
            group.shut()
        freed = [group.release() for group in self._made]
        return all(freed)
