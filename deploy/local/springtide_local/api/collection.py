"""What is stored of one resource: the objects, a bounded history of changes, and who listens."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Literal, NamedTuple

from springtide_local.api import errors
from springtide_local.ports import Object

Key = tuple[str, str]
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
HISTORY = 5000
BACKLOG = 20000


def encode(obj: object) -> bytes:
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()


class Stored:
    """An object that is never changed again, with its JSON made at most once."""

    __slots__ = ("_json", "object")

    def __init__(self, obj: Object) -> None:
        self.object = obj
        self._json: bytes | None = None

    @property
    def json(self) -> bytes:
        if self._json is None:
            self._json = encode(self.object)
        return self._json


class Change(NamedTuple):
    """`new` is the last state for a deletion too (with the deletion's resourceVersion)."""

    version: int
    type: ChangeType
    key: Key
    new: Stored
    old: Stored | None


class Subscription:
    """A listener's queue of changes. One that does not keep up is closed (`overrun`), as the watch cache
    does.
    """

    def __init__(self, collection: Collection, namespace: str | None) -> None:
        self._collection = collection
        self._namespace = namespace
        self._pending: deque[Change] = deque()
        self._wake = asyncio.Event()
        self.overrun = False
        self.closed = False

    def offer(self, change: Change) -> None:
        if self._namespace is not None and change.key[0] != self._namespace:
            return
        if len(self._pending) >= BACKLOG:
            self.overrun = True
        else:
            self._pending.append(change)
        self._wake.set()

    def end(self) -> None:
        """The resource is gone (its definition was deleted) or the server stops."""
        self.closed = True
        self._wake.set()

    def drain(self) -> list[Change]:
        changes = list(self._pending)
        self._pending.clear()
        self._wake.clear()
        return changes

    async def wait(self, timeout: float | None) -> bool:
        """Wait for something to drain; False when `timeout` seconds passed without."""
        if self._pending or self.overrun or self.closed:
            return True
        if timeout is not None and timeout <= 0:
            return False
        try:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def cancel(self) -> None:
        self._collection.subscriptions.discard(self)


class Collection:
    def __init__(self, version: int, history: int = HISTORY) -> None:
        self.items: dict[Key, Stored] = {}
        self.history: deque[Change] = deque()
        self.compacted = version
        self.subscriptions: set[Subscription] = set()
        self._limit = history

    def record(self, change: Change) -> None:
        if change.type == "DELETED":
            self.items.pop(change.key, None)
        else:
            self.items[change.key] = change.new
        self.history.append(change)
        if len(self.history) > self._limit:
            self.compacted = self.history.popleft().version
        for subscription in tuple(self.subscriptions):
            subscription.offer(change)

    def subscribe(self, namespace: str | None) -> Subscription:
        subscription = Subscription(self, namespace)
        self.subscriptions.add(subscription)
        return subscription

    def compact(self) -> None:
        """Forget the history: watches from an older version get 410."""
        if self.history:
            self.compacted = self.history[-1].version
            self.history.clear()

    def changes_since(self, version: int, current: int) -> list[Change]:
        """Raise ApiError 410 when the history does not reach back, or `version` was never given out."""
        if version < self.compacted:
            raise errors.expired(f"too old resource version: {version} ({self.compacted})")
        if version > current:
            raise errors.expired(f"unknown resource version: {version} (this server is at {current})")
        if not self.history or self.history[-1].version <= version:
            return []
        return [change for change in self.history if change.version > version]

    def at(self, version: int, current: int) -> dict[Key, Stored]:
        """The objects as they were at `version`. Raise ApiError 410 when that is too long ago."""
        items = dict(self.items)
        for change in reversed(self.changes_since(version, current)):
            if change.old is None:
                items.pop(change.key, None)
            else:
                items[change.key] = change.old
        return items
