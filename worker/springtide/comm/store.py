"""The rendezvous of a group through the coordinator's stream: no store server runs on a member."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from springtide.comm.store_entries import Entries, FormationCancelled, Publish

__all__ = ["FormationCancelled", "StreamStore"]


class StreamStore(Entries, dist.Store):  # type: ignore[name-defined,misc]
    """The entries as a store of torch's. The creator keeps a reference as long as a group uses it."""

    def __init__(self, publish: Publish, owners: Sequence[str], timeout_seconds: float) -> None:
        dist.Store.__init__(self)  # type: ignore[attr-defined]
        super().__init__(publish, owners, timeout_seconds)

    def with_prefix(self, prefix: str) -> StreamStore:
        """Return a view of this store for a group of some of the members; it is cancelled with the whole."""
        return _Part(self, prefix)


class _Part(StreamStore):
    def __init__(self, whole: StreamStore, prefix: str) -> None:
        dist.Store.__init__(self)  # type: ignore[attr-defined]
        self._whole, self._prefix = whole, prefix

    @property
    def cancelled(self) -> str | None:
        return self._whole.cancelled

    def set(self, key: str, value: bytes) -> None:
        self._whole.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        return self._whole.get(self._prefix + key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._whole.wait([self._prefix + key for key in keys], timeout)

    def check(self, keys: list[str]) -> bool:
        return self._whole.check([self._prefix + key for key in keys])
