"""Find copies of a shard that differ: its owner and its buddy make the same updates of the same bits.

Memory that flips a bit, or a machine that computes otherwise, shows nowhere: the owner's values go to all,
and the buddy's copy is looked at by nobody until the owner is lost. So every INTERVAL steps the commit vote
carries hashes of one of PIECES pieces of all shards, of the optimizer's state and of the parameters' values
as the last step has left them. Owners add theirs, buddies take theirs away, and the sum is 0 where all copies
are equal (and by chance once in a million differences). All shards are seen in PIECES * INTERVAL steps.

Values at workers that hold no copy of a shard are not compared: they come anew in each step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from springtide.comm import codec
from springtide.comm.state_pieces import checksum
from springtide.sharding.backend import ShardedOptimizer
from springtide.sharding.shard_map import ShardMap
from springtide.train_step.replica_digest import INTERVAL, LIMIT, PIECES, digest_of


@dataclass(frozen=True, slots=True)
class Difference:
    """One pair of workers whose copies of some shards differ, by rank."""

    owner: int
    buddy: int
    shards: tuple[int, ...]


class CopyDigest:
    """Hashes of the shards that a worker holds."""

    def __init__(self, home: ShardedOptimizer) -> None:
        """Look at nothing yet.

        Args:
            home: Holds the shards.
        """
        self._home = home

    def due(self, step: int) -> bool:
        """Return whether the vote of this step has hashes."""
        return step % INTERVAL == 0

    def balance(self, step: int, rank: int) -> int:
        """Return the hashes of what this worker owns of the piece that is due, less those of what it has as
        a buddy.

        Args:
            step: Its number.
            rank: Of this worker.
        """
        pieces = min(PIECES, len(self._home.shards))
        total = 0
        for number in range(step // INTERVAL % pieces, len(self._home.shards), pieces):
            role = _role(self._assigned, number, rank)
            if role is not None:
                total += (1, -1)[role] * self.hash(number)
        return total

    def table(self, rank: int) -> torch.Tensor:
        """Return the hashes of all that this worker holds: float64 [shards, 2], the owner's and the buddy's,
        with zeros for what others have.

        Args:
            rank: Of this worker.
        """
        found = torch.zeros(len(self._home.shards), 2, dtype=torch.float64)
        for number in range(len(self._home.shards)):
            role = _role(self._assigned, number, rank)
            if role is not None:
                found[number, role] = self.hash(number)
        return found

    def hash(self, number: int) -> int:
        """Return the hash, above 0 and below 2^20, of a shard that is held here."""
        tensors: list[torch.Tensor] = []
        others = []
        for part in self._home.held.shard_parts(self._home.shards, number):
            tensors.append(self._home.held.values.of(part.stretch))
            for name in sorted(part.state):
                value = part.state[name]
                if isinstance(value, torch.Tensor):
                    tensors.append(value.detach().reshape(-1))
                else:
                    others.append((part.stretch.index, name, value))
        if others:
            tensors.append(torch.tensor([zlib.crc32(repr(others).encode())]))
        total = 0
        for tensor in tensors:
            # On a device what the host would have to copy is read where it is.
            on_host = tensor.device.type == "cpu"
            word = checksum(codec.as_bytes(tensor)) if on_host else digest_of([_real(tensor)])
            total = total * 1_000_003 + word
        return total % (LIMIT - 1) + 1

    def differences(self, table: torch.Tensor) -> list[Difference]:
        """Return the pairs whose copies differ.

        Args:
            table: The sum of all workers' tables.
        """
        by_pair: dict[tuple[int, int], list[int]] = {}
        for number, (owners, buddys) in enumerate(table.tolist()):
            owner, buddy = self._assigned.owners[number], self._assigned.buddies[number]
            if owner != buddy and owners != buddys:
                by_pair.setdefault((owner, buddy), []).append(number)
        return [Difference(*pair, tuple(shards)) for pair, shards in sorted(by_pair.items())]

    def doubt(self, differences: Sequence[Difference], rank: int) -> None:
        """Have this worker be sent again the shards that it has as a buddy, where others have told it to.

        Args:
            differences: To be mended.
            rank: Of this worker.
        """
        for found in differences:
            if found.buddy == rank:
                self._home.doubt(found.shards)

    @property
    def _assigned(self) -> ShardMap:
        assigned = self._home.assigned
        assert assigned is not None
        return assigned


def _role(assigned: ShardMap, number: int, rank: int) -> int | None:
    """Return 0 for the owner of a shard, 1 for its buddy, None for others, and where there is one member."""
    owner, buddy = assigned.owners[number], assigned.buddies[number]
    if owner == buddy:
        return None
    return {owner: 0, buddy: 1}.get(rank)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
