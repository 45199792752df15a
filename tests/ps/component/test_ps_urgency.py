"""Chunks that a forward pass needs first are smaller and are sent first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_members import Store, members, together
from ps_servers import TOKEN, names, servers

from springtide.ps.sharding import chunk_starts
from springtide_ps.params.placement import CHUNK_BYTES
from springtide_ps.server.send_queue import SendQueue
from springtide_ps.wire.frames import Frame, Kind
from springtide_ps.wire.stream import connect, parse_address

KIB = 1024


@given(
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 26),
    st.sampled_from([2, 4, 8]),
    st.integers(0, 1 << 26),
    st.sampled_from([64, 100 * KIB, CHUNK_BYTES]),
)
@settings(deadline=None, max_examples=200)
def test_chunks_grow_with_what_is_needed_before_them(
    first: int, count: int, itemsize: int, before: int, limit: int
) -> None:
    count = min(count, 3000 * limit // itemsize)
    starts = chunk_starts(first, first + count, itemsize, before, limit)
    assert starts == sorted(set(starts), reverse=True)
    assert starts[-1] == first
    for start, end in pairwise([*starts[::-1], first + count]):
        nbytes, earlier = (end - start) * itemsize, before + (first + count - end) * itemsize
        assert 0 < nbytes <= min(limit, max(256 * KIB, earlier // 4))


def test_a_large_first_layer_makes_few_chunks_more() -> None:
    large = 512 * KIB * KIB
    assert len(chunk_starts(0, large // 4, 4, 0, CHUNK_BYTES)) < large // CHUNK_BYTES + 24
    assert [
        4 * (b - a) for a, b in pairwise([*chunk_starts(0, 256 * KIB, 4, 0, CHUNK_BYTES)[::-1], 256 * KIB])
    ] == [64 * KIB * 4] * 4


def test_values_are_asked_for_by_place_in_the_forward_pass(monkeypatch: Any) -> None:
    asked: list[int] = []
    opened = SendQueue.open

    def note(self: SendQueue, request: int, nbytes: int, rank: int = 0) -> None:
        asked.append(rank)
        opened(self, request, nbytes, rank)

    def sgd(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with servers(1) as running, members(2, sgd, early=True) as (a, b):
        store, both = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, both, running, store, fresh=True),
            lambda: b.begin(1, both, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        together(a.values, b.values)
        monkeypatch.setattr(SendQueue, "open", note)
        for _ in range(2):  # asked for after the first step, and during the second one
            together(lambda: a.push(0, 2), lambda: b.push(1, 2))
            together(a.commit, b.commit)
            together(a.values, b.values)
        count = len(a.exchange.chunks)
        assert count > 1
        assert [asked.count(rank) for rank in range(1, count)] == [4] * (count - 1)


@pytest.mark.parametrize("rank", [-1, True, "0", 1 << 40, None])
def test_a_rank_that_is_none_is_refused(rank: Any) -> None:
    with servers(1) as running:
        stream, _ = connect(parse_address(names(running)[0]), TOKEN, 30.0)
        try:
            stream.send(Frame(Kind.FETCH, 1, {"t": [1, 0, 1], "s": 0, "k": "0.0", "rank": rank}))
            header, _ = stream.receive()
            assert header.kind == Kind.REFUSED
        finally:
            stream.close()
