"""The values that one server holds: named flat tensors, each with a version and an update.

A reader that is still being sent the values never sees half an update: an update that meets readers is made
on a copy, and the readers keep what they had. Without readers it is made in place.

Threads and locks: any thread may call. The store's `_lock` guards which values and tables are made and the
update of later ones; an entry's `lock` guards its values, version and readers, and the store's is never taken
in it. A thread that sends values holds a `Lease` instead of a lock. Finding a key and adding up sizes need no
lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch

from springtide_ps.params.embedding import Table, TableSpec
from springtide_ps.params.optim import Step, Update, UpdateError

KEY_LIMIT: Final = 512  # characters


class StoreError(ValueError):
    """A request that these values cannot answer; the message says what to do."""


@dataclass(slots=True)
class _Readers:
    count: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Values that stay as they are until the lease ends."""

    values: torch.Tensor
    version: int
    readers: _Readers


class Entry:
    """One key. All methods may be called from any thread."""

    def __init__(self, key: str, values: torch.Tensor, update: Update, whole: tuple[int, ...]) -> None:
        self.key, self.whole = key, whole
        self.lock = threading.Lock()
        self._values = values.clone(memory_format=torch.contiguous_format)
        self.shape, self.dtype, self.nbytes = self._values.shape, self._values.dtype, self._values.nbytes
        self.version = 0
        self._readers = _Readers()
        self._step: Step = update.bind(self._values)

    def use(self, update: Update) -> None:
        """Make later pushes do this; the state of an earlier optimizer is forgotten. Raises UpdateError."""
        with self.lock:
            self._step = update.bind(self._values)

    def push(self, pushed: torch.Tensor) -> int:
        """Apply one push (same shape and dtype); return the version that it made."""
        with self.lock:
            return self._push(pushed)

    def push_pull(self, pushed: torch.Tensor) -> Lease:
        """Apply one push, and lease the values that it made."""
        with self.lock:
            self._push(pushed)
            return self._lease()

    def lease(self) -> Lease:
        with self.lock:
            return self._lease()

    def give_back(self, lease: Lease) -> None:
        with self.lock:
            lease.readers.count -= 1

    @contextmanager
    def reading(self) -> Iterator[Lease]:
        lease = self.lease()
        try:
            yield lease
        finally:
            self.give_back(lease)

    def _push(self, pushed: torch.Tensor) -> int:
        if self._readers.count:
            # The optimizer knows the tensor object; its memory is exchanged below it.
            self._values.data = self._values.clone()
            self._readers = _Readers()
        self._step(pushed)
        self.version += 1
        return self.version

    def _lease(self) -> Lease:
        self._readers.count += 1
        return Lease(self._values.detach(), self.version, self._readers)


class Store:
    """Entries by key. `memory_limit` is in bytes of values; 0 sets no limit. `others`: bytes that the server
    holds besides, which count as well.
    """

    def __init__(self, memory_limit: int = 0) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._tables: dict[str, Table] = {}
        self._update = Update("assign")
        self.memory_limit = memory_limit
        self.others: Callable[[], int] = lambda: 0
        self._value_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Return the bytes of values and tables; optimizer state of values is not counted."""
        return self._value_bytes + sum(table.nbytes for table in list(self._tables.values()))

    def check_room(self, key: str, nbytes: int) -> None:
        """Refuse a key that is none, or values for which there is no memory.

        Args:
            key: to be made.
            nbytes: of the values.

        Raises:
            StoreError: it is refused.
        """
        if not key or len(key) > KEY_LIMIT:
            raise StoreError(f"a key has 1 to {KEY_LIMIT} characters, not {len(key)}")
        if not self.memory_limit or key in self._entries:
            return
        taken = self.held_bytes + self.others()
        if taken + nbytes > self.memory_limit:
            raise StoreError(
                f"no room for {key!r}: {nbytes} bytes beside {taken}, and {self.memory_limit} are "
                "this server's limit: use more servers, or give them more memory"
            )

    def create(self, key: str, values: torch.Tensor, whole: tuple[int, ...] | None = None) -> bool:
        """Make a key; one that is there already with this shape and dtype keeps its values.

        Args:
            key: to be made.
            values: its first ones, which are copied.
            whole: shape of the tensor that the values are a part of; None: they are all of it.

        Returns:
            False: it was there.

        Raises:
            StoreError: it is there with another shape or dtype, or there is no room.
        """
        whole = tuple(values.shape) if whole is None else whole
        with self._lock:
            self.check_room(key, values.nbytes)
            there = self._entries.get(key)
            if there is None:
                try:
                    self._entries[key] = Entry(key, values, self._update, whole)
                except UpdateError as error:
                    raise StoreError(f"{key!r}: {error}") from None
                self._value_bytes += values.nbytes
                return True
        if (there.whole, there.dtype) != (whole, values.dtype):
            raise StoreError(
                f"{key!r} is there with shape {there.whole} and {there.dtype}, and was to be made with "
                f"{whole} and {values.dtype}"
            )
        if there.shape != values.shape:
            raise StoreError(
                f"{key!r} is there with {there.shape.numel()} elements of its tensor, and was to be made "
                f"with {values.shape.numel()}: give the same servers and chunk_bytes everywhere"
            )
        return False

    def entry(self, key: str) -> Entry:
        """Raise StoreError for a key that was never made."""
        found = self._entries.get(key)
        if found is None:
            raise StoreError(f"there is no key {key!r}: init() it before push() and pull()")
        return found

    def create_table(self, key: str, spec: TableSpec) -> bool:
        """Make an embedding table, unless it is there already.

        Args:
            key: to be made.
            spec: how the table is made and trained.

        Returns:
            False: it was there.

        Raises:
            StoreError: it is there with another specification, or there is no room.
        """
        with self._lock:
            self.check_room(key, 0)
            there = self._tables.get(key)
            if there is None:
                self._tables[key] = Table(spec, self.memory_limit, lambda: self._beside(key))
                return True
        if there.spec != spec:
            raise StoreError(f"table {key!r} is there as {there.spec}, and was to be made as {spec}")
        return False

    def _beside(self, key: str) -> int:
        """Bytes of everything but that table. Without a lock: a table asks for it in its own."""
        return self.held_bytes - self._tables[key].nbytes + self.others()

    def table(self, key: str) -> Table:
        """Raise StoreError for a table that was never made."""
        found = self._tables.get(key)
        if found is None:
            raise StoreError(f"there is no table {key!r}: make it with table() first")
        return found

    def use(self, update: Update) -> None:
        """Make every push from now on do this, for all keys, those to come included. Raises StoreError."""
        with self._lock:
            for entry in self._entries.values():
                try:
                    update.bind(torch.zeros(1, dtype=entry.dtype))
                except UpdateError as error:
                    raise StoreError(f"{entry.key!r}: {error}") from None
            for entry in self._entries.values():
                entry.use(update)
            self._update = update

    def status(self) -> dict[str, int]:
        with self._lock:
            updates = sum(entry.version for entry in self._entries.values())
            rows = sum(len(table) for table in self._tables.values())
            evicted = sum(table.evicted for table in self._tables.values())
            counts = {
                "keys": len(self._entries),
                "tables": len(self._tables),
                "rows": rows,
                "evicted": evicted,
            }
            return {**counts, "bytes": self.held_bytes, "updates": updates}
