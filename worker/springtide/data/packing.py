"""Pack documents of tokens into blocks of one length, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from springtide.data.shards import ShardedDataset, Shards

IGNORED = -100
"""The label of a place that has no token; losses of torch leave it out."""


def pack_tokens(
    dataset: ShardedDataset,
    length: int,
    *,
    tokens: str | Callable[[Any], Sequence[int] | torch.Tensor] = "input_ids",
    padding: int = 0,
    end: int | None = None,
) -> Shards:
    """Return the same shards as blocks of tokens: no token is lost, and none is in two blocks.

    The documents of a shard follow each other; a block takes them up where the one before ends. Only the last
    block of a shard is filled up. So a block follows from its shard alone, whoever reads it.

    A block is a dict of int64 tensors of shape (length,). `input_ids` are the tokens, `labels` the same and
    -100 where there is no token. `position_ids` are the tokens' places in their document, as far as that is
    in the block. `segment_ids` are the numbers of the documents in the block, from 0, and -1 where there is
    no token: tokens of different documents should not attend to each other.

    Args:
        dataset: its samples are documents.
        length: tokens of a block, at least 1.
        tokens: the key of a document's tokens, or a function that returns them (a tokenizer, say).
        padding: what stands where a block has no token.
        end: a token that is put behind each document; None: none.

    Raises:
        ValueError: the length is below 1.
        TypeError: the data set is not one of shards.
    """
    if type(length) is not int or length < 1:
        raise ValueError(f"pack_tokens(): length must be an integer >= 1, got {length!r}")
    if not isinstance(dataset, ShardedDataset):
        raise TypeError(
            f"pack_tokens(): {type(dataset).__name__} has no shards; give springtide.data.Shards(...), or "
            "what springtide.integrations.sources makes of a data set"
        )
    take: Callable[[Any], Any] = tokens if callable(tokens) else lambda document: document[tokens]

    def read(shard: Any) -> Iterator[dict[str, torch.Tensor]]:
        block = _Block(length, padding)
        for document in dataset.read_shard(shard, 0):
            found = torch.as_tensor(take(document), dtype=torch.int64).reshape(-1)
            if end is not None:
                found = torch.cat((found, torch.tensor([end])))
            while found.numel():
                found = block.add(found)
                if block.is_full:
                    yield block.made()
                    block = _Block(length, padding)
        if block.used:
            yield block.made()

    return Shards(dataset.shards, read)


class _Block:
    def __init__(self, length: int, padding: int) -> None:
        self.used = 0
        self._segments = 0
        self._tokens = torch.full((length,), padding)
        self._positions = torch.zeros(length, dtype=torch.int64)
        self._numbers = torch.full((length,), -1)

    @property
    def is_full(self) -> bool:
        return self.used == self._tokens.numel()

    def add(self, found: torch.Tensor) -> torch.Tensor:
        """Take in as many tokens of a document as there is room for; return the others."""
        count = min(found.numel(), self._tokens.numel() - self.used)
        place = slice(self.used, self.used + count)
        self._tokens[place] = found[:count]
        self._positions[place] = torch.arange(count)
        self._numbers[place] = self._segments
        self.used, self._segments = self.used + count, self._segments + 1
        return found[count:]

    def made(self) -> dict[str, torch.Tensor]:
        labels = torch.where(self._numbers < 0, IGNORED, self._tokens)
        return {
            "input_ids": self._tokens,
            "labels": labels,
            "position_ids": self._positions,
            "segment_ids": self._numbers,
        }
