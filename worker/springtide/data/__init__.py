"""The samples that each step takes, who computes them, and the proof that each counted exactly once.

Scripts use `Shards` and `pack_tokens`. All else is the library's own: pure functions of (cursor, world size,
rank), of which nothing talks to peers and nothing waits. The runtime asks for a batch, and moves cursor and
ledger with its commit.
"""

from springtide.data.batch import Batch, Micro
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger, contribution, join_halves, split_halves
from springtide.data.loop import LoopPlan, plan_loop
from springtide.data.packing import pack_tokens
from springtide.data.partition import Part, partition, pieces
from springtide.data.permutation import shuffled
from springtide.data.shards import ShardedDataset, Shards
from springtide.data.source import Source, make_source

__all__ = [
    "Batch",
    "Cursor",
    "Ledger",
    "LoopPlan",
    "Micro",
    "Part",
    "ShardedDataset",
    "Shards",
    "Source",
    "contribution",
    "join_halves",
    "make_source",
    "pack_tokens",
    "partition",
    "pieces",
    "plan_loop",
    "shuffled",
    "split_halves",
]
