"""Storage of one resource: the objects, a bounded history of changes, and the listeners.

Tasks: used in the API server's event loop alone, without locks: a change is stored and handed to all
subscriptions without an await between. A subscription's reader waits for its `_wake`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from springtide_local.api import errors
from springtide_local.ports import Object

Key = tuple[str, str]
ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]
HISTORY = 5000
BACKLOG = 20000
BACKLOG_BYTES = 16 * 1024 * 1024
"""Most bytes that wait for one watcher. All watchers share these bytes, and those of all who live are the
newest ones, so that this is what they cost together, however many there are."""


def encode(obj: object) -> bytes:
    # Halves of characters come from in here only; they must not keep a whole list from being answered.
    return json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


class Stored:
    """An object that is never changed again, with its JSON made at most once."""

    __slots__ = ("_forms", "_json", "object")

    def __init__(self, obj: Object) -> None:
        self.object = obj
        self._json: bytes | None = None
        self._forms: dict[Hashable, bytes] | None = None

    @property
    def json(self) -> bytes:
        if self._json is None:
            self._json = encode(self.object)
        return self._json

    def form(self, name: Hashable, make: Callable[[Object], Object]) -> bytes:
        """Return the JSON of another form of the object, made at most once, too.

        Args:
            name: Which form.
            make: It makes the form of the object.
        """
        if self._forms is None:
            self._forms = {}
        if name not in self._forms:
            self._forms[name] = encode(make(self.object))
        return self._forms[name]


class Change(NamedTuple):
    """`new` is the last state for a deletion too (with the deletion's resourceVersion)."""

    version: int
    type: ChangeType
    key: Key
    new: Stored
    old: Stored | None


class Event(NamedTuple):
    """A change as one listener sees it."""

    type: ChangeType
    stored: Stored


class Subscription:
    """A listener's queue of events. One that does not keep up is ended (`overrun`), as the watch cache does:
    it lists or watches again from where it was.
    """

    def __init__(
        self,
        collection: Collection,
        namespace: str | None,
        sees: Callable[[Change], ChangeType | None] | None = None,
        limit: int | None = None,
    ) -> None:
        """Prepare a queue; `Collection.subscribe` does.

        Args:
            collection: The collection whose changes are events.
            namespace: Changes elsewhere are no events; None is everywhere.
            sees: The type under which the listener sees a change, or None; without it, every change's own.
            limit: How many bytes of JSON may wait, besides the one object that is first.
        """
        self._collection = collection
        self._namespace = namespace
        self._sees = sees
        self._limit = limit
        self._pending: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._on_overrun: Callable[[], None] | None = None
        self.waiting = 0
        self.overrun = False
        self.closed = False

    def offer(self, change: Change) -> None:
        if self.overrun or (self._namespace is not None and change.key[0] != self._namespace):
            return
        type_ = self._sees(change) if self._sees is not None else change.type
        if type_ is None:
            return
        size = len(change.new.json) if self._limit is not None else 0
        if len(self._pending) >= BACKLOG or (self._pending and self.waiting + size > (self._limit or 0) > 0):
            self._fall_behind()
            return
        self._pending.append(Event(type_, change.new))
        self.waiting += size
        self._wake.set()

    def _fall_behind(self) -> None:
        self.overrun = True
        self._pending.clear()
        self.waiting = 0
        self._wake.set()
        if self._on_overrun is not None:
            self._on_overrun()

    def when_overrun(self, call: Callable[[], None]) -> None:
        """Let `call` know, once, that the listener is too far behind; at once where it is already."""
        self._on_overrun = call
        if self.overrun:
            call()

    def end(self) -> None:
        """The resource is gone (its definition was deleted) or the server stops."""
        self.closed = True
        self._wake.set()

    @property
    def due(self) -> bool:
        """Whether there is something to tell, be it the end."""
        return bool(self._pending) or self.overrun or self.closed

    @property
    def ended(self) -> bool:
        """Whether nothing waits, and nothing comes any more."""
        return self.overrun or (self.closed and not self._pending)

    def next(self) -> Event | None:
        """Take the oldest event, or None when nothing waits."""
        if not self._pending:
            return None
        event = self._pending.popleft()
        if self._limit is not None:
            self.waiting -= len(event.stored.json)
        return event

    async def wait(self, timeout: float | None) -> bool:
        """Wait for something to drain; False when `timeout` seconds passed without."""
        if self.due:
            return True
        self._wake.clear()
        if timeout is not None and timeout <= 0:
            return False
        try:
            # Not wait_for: before Python 3.12 it can swallow a cancellation.
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            return self.due  # something may have come in the moment between
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

    def subscribe(
        self,
        namespace: str | None,
        sees: Callable[[Change], ChangeType | None] | None = None,
        limit: int | None = None,
    ) -> Subscription:
        """Listen to changes from now on.

        Args:
            namespace: whose objects are meant; None: of all.
            sees: says as which change the listener sees one, None for not at all; None: as it is.
            limit: bytes of JSON that may wait for the reader, besides the one object that is first; beyond it
                the subscription is overrun. None: no limit.

        Returns:
            The queue of its events; it has to be cancelled.
        """
        subscription = Subscription(self, namespace, sees, limit)
        self.subscriptions.add(subscription)
        return subscription

    def compact(self) -> None:
        """Forget the history: watches from an older version get 410."""
        if self.history:
            self.compacted = self.history[-1].version
            self.history.clear()

    def changes_since(self, version: int, current: int) -> list[Change]:
        """Return the changes after a version, in order.

        Args:
            version: a resource version.
            current: the store's newest.

        Raises:
            ApiError: 410: the history does not reach back, or `version` was never given out.
        """
        if version < self.compacted:
            raise errors.expired(f"too old resource version: {version} ({self.compacted})")
        if version > current:
            raise errors.expired(f"unknown resource version: {version} (this server is at {current})")
        if not self.history or self.history[-1].version <= version:
            return []
        return [change for change in self.history if change.version > version]

    def at(self, version: int, current: int) -> dict[Key, Stored]:
        """Return the objects as they were at a version.

        Args:
            version: a resource version.
            current: the store's newest.

        Returns:
            By (namespace, name).

        Raises:
            ApiError: 410: that is too long ago.
        """
        items = dict(self.items)
        for change in reversed(self.changes_since(version, current)):
            if change.old is None:
                items.pop(change.key, None)
            else:
                items[change.key] = change.old
        return items
