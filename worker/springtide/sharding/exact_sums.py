"""Exact sums where each member has those of its own shards.

The integers travel to owners and buddies as gradients do otherwise, in the same exchanges; integer addition
has no order, so any number of members makes the same sums. All know the worth of an integer, so each holder
makes numbers of the sums that it has. The exponents of the next step follow from the largest magnitude
of each block, which only the block's holders see: its owner tells the others, by one sum over the members of
a number for each block. Blocks and shards begin at multiples of 256 elements, so a block has one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.comm.process_group import Group
from springtide.exact.buckets import ExactBuckets
from springtide.sharding.collectives import Interval
from springtide.sharding.shard_map import Shard


def restore_held(
    buckets: ExactBuckets,
    group: Group,
    held: Sequence[Sequence[Interval]],
    owned: Sequence[Shard],
) -> list[torch.Tensor]:
    """Make numbers of the integer sums that are here, and have all members know each block's largest one.

    Args:
        buckets: Hold the sums; all members of the group call this.
        group: Of the generation.
        held: By bucket, the elements whose sums are here.
        owned: The shards that this member owns.

    Returns:
        The gradients by bucket, of versions of their own: sums where they are held.

    Raises:
        RuntimeError: The group's.
    """
    for bucket, intervals in enumerate(held):
        for start, stop in intervals:
            buckets.restore_sums(bucket, start, stop)
    largest = torch.zeros_like(buckets.largest)
    for shard in owned:
        blocks = buckets.blocks(shard.bucket, shard.start, shard.stop)
        largest[blocks] = buckets.largest[blocks]
    # A sum and not a maximum: only the owner's is not zero, and NaN must arrive.
    group.start_sum(largest).wait()
    buckets.largest.copy_(largest)
    return [flat.data for flat in buckets.flats]
