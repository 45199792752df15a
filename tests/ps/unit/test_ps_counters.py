"""Counters of a server, which several of its threads add to at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from ps_slices import STEP_SPEC, make, record

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server import shard_store
from springtide_ps.server.kv_handler import Answer, Counters
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.sync_handler import SyncHandler
from springtide_ps.wire.frames import Header, Kind

TOKEN = (1, 0, 1)


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def server(counters: Counters) -> Iterator[SyncHandler]:
    """Holds two slices that let rows go beyond 8 each."""
    made = SyncHandler(lambda address: pytest.fail("it has no peers"), counters=counters)
    made.store.enter(TOKEN, ["a"], 0, "one", in_batches=True)
    for number in range(2):
        made.store.load(TOKEN, f"t2.{number}", 0, make(max_rows=8))
    yield made
    made.close()


def train(shards: ShardStore, key: str) -> None:
    """Apply twelve rows to a table that keeps at most eight of them, and lets go of more than it must."""
    with shards.locked(TOKEN, key) as lent:
        assert isinstance(lent.chunk, Slice)
        lent.chunk.apply(record(list(range(12))), STEP_SPEC)


def test_rows_that_another_thread_lets_go_meanwhile_count(
    server: SyncHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, look, looks = server.store, shard_store.rows_evicted, 0

    def meanwhile(piece: Chunk | Slice | None) -> int:
        nonlocal looks
        looks += 1
        if looks == 2:  # when the first slice has changed
            train(shards, "t2.1")
        return look(piece)

    monkeypatch.setattr(shard_store, "rows_evicted", meanwhile)
    train(shards, "t2.0")
    pieces = [shards.slice_of(f"t2.{number}") for number in range(2)]
    assert shards.evicted == sum(piece.table.evicted for piece in pieces) > 0


def test_rows_that_another_thread_looks_up_meanwhile_count(server: SyncHandler, counters: Counters) -> None:
    class Meanwhile(dict[str, Any]):
        """A request of which each reading of its slices takes so long that others are counted."""

        def get(self, key: str, default: Any = None) -> Any:
            if key == "n":
                counters.looked_up += 100
            return super().get(key, default)

    answered: Future[Answer] = Future()
    about = Meanwhile({"t": list(TOKEN), "k": "t2", "s": 0, "p": [0], "n": [3]})
    ids = torch.arange(3).view(torch.uint8)
    server.answer(Header(Kind.ROWS, 1, 0, ids.nbytes), about, ids, answered.set_result)
    assert answered.result(30).frame.kind is Kind.VALUES
    assert counters.looked_up % 100 == 3
    assert counters.looked_up > 200
