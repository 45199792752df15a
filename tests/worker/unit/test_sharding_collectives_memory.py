"""The memory of exchanges: it is used again, and a generation's first values leave none behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from springtide.sharding.collectives import Exchanges, Flat
from springtide.sharding.shard_map import Shard, ShardMap

BUCKETS, SIZE = 12, 512


class Ended:
    """An exchange that has come at once, or fails."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def wait(self) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return True

    def is_completed(self) -> bool:
        return True


class OneOfTwo:
    """Rank 0 of a group whose other member sends ones; it keeps all that it was given, as a log would."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.error = ""

    def start_exchange(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: Sequence[int], sizes: Sequence[int]
    ) -> Ended:
        assert (received.numel(), sent.numel()) == (sum(received_sizes), sum(sizes))
        received.fill_(1.0)
        self.given += [received, sent]
        return Ended(self.error)

    def memories(self) -> set[int]:
        return {tensor.untyped_storage().data_ptr() for tensor in self.given if tensor.numel()}


def exchanges(group: Any) -> Exchanges:
    """Each bucket in two shards, of which each member owns one; the other one is its buddy."""
    shards = [
        Shard(bucket, start, start + SIZE // 2) for bucket in range(BUCKETS) for start in (0, SIZE // 2)
    ]
    assigned = ShardMap((0, 1) * BUCKETS, (1, 0) * BUCKETS)
    return Exchanges(group, shards, assigned, [torch.empty(0)] * BUCKETS)


def reduce(made: Exchanges, bucket: int) -> None:
    flat = torch.zeros(SIZE)
    made.reduce(bucket, Flat(flat), flat, False)


def test_memory_of_sums_is_used_again_in_the_same_step() -> None:
    group = OneOfTwo()
    made = exchanges(group)
    flats = [torch.full((SIZE,), 2.0) for _ in range(BUCKETS)]
    made.begin_step()
    for bucket, flat in enumerate(flats):
        made.reduce(bucket, Flat(flat), flat, False)
    made.finish_sums()
    assert len(group.given) == 2 * 2 * BUCKETS
    # Two for each of the three buckets that are under way, one for a sum that is passed on as it lies.
    assert len(group.memories() - {flat.untyped_storage().data_ptr() for flat in flats}) <= 7
    for flat in flats:
        assert flat.tolist() == [3.0] * (SIZE // 2) + [1.0] * (SIZE // 2)


def test_sums_that_do_not_come_are_an_error_at_the_next_bucket() -> None:
    group = OneOfTwo()
    made = exchanges(group)
    made.begin_step()
    for bucket in range(2):
        reduce(made, bucket)
    group.error = "Connection closed by peer"
    with pytest.raises(RuntimeError, match="Connection closed"):
        reduce(made, 2)
