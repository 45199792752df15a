"""The rendezvous of a group through the coordinator's stream: no store server runs on a member."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from springtide.exchange.entries import Entries, FormationCancelled, Publish

__all__ = ["FormationCancelled", "StreamStore"]


class StreamStore(Entries, dist.Store):  # type: ignore[name-defined,misc]
    """The entries as a store of torch's. The creator keeps a reference as long as a group uses it."""

    def __init__(self, publish: Publish, owners: Sequence[str], timeout_seconds: float) -> None:
        dist.Store.__init__(self)  # type: ignore[attr-defined]
        Entries.__init__(self, publish, owners, timeout_seconds)
