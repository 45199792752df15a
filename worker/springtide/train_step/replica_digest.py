"""Find replicas that have drifted apart: a hash of one piece of the parameters, every few steps.

Replicas are equal because they make equal steps from equal states. A fault that breaks this (memory that
flips a bit, a kernel that reads past its tensor, a script that changes parameters on one worker) shows
nowhere: sums are the same on all, and each goes on from its own numbers. So every INTERVAL steps the commit
vote carries a hash of one of PIECES pieces of the parameters, as the last step has left them: all of them are
seen in PIECES * INTERVAL steps, for less than a thousandth of a step's reading.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from springtide.pods.tensors import local_shard

INTERVAL = 16
PIECES = 64
LIMIT = 1 << 20
"""Hashes are below it, so that the vote's sums of squares are exact."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 65521
CHUNK = 1 << 20


class ReplicaDigest:
    """Hashes of a model's parameters, by piece: of those that are divided in a pod, of this process's parts.

    named: the trained parameters by name, in the same order on all members.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = [(name, tensor) for name, tensor in named if tensor.numel()]
        self._total = sum(_real_numbers(local_shard(tensor)) for _, tensor in self._named)

    def due(self, step: int) -> bool:
        """Whether the vote of this step has a hash."""
        return step % INTERVAL == 0 and bool(self._named)

    def hash(self, step: int) -> int:
        """Return the hash, 1..LIMIT-1, of the piece that is due at this step. The host waits for a GPU."""
        return digest_of([part for _, part in self._parts(step)])

    def names(self, step: int) -> list[str]:
        """The parameters that the step's piece has something of."""
        return [name for name, _ in self._parts(step)]

    def _parts(self, step: int) -> list[tuple[str, torch.Tensor]]:
        """One-dimensional views, in the order of memory, of what the piece has of each parameter."""
        piece = step // INTERVAL % PIECES
        begin, end = piece * self._total // PIECES, (piece + 1) * self._total // PIECES
        if end == begin:
            end = begin + 1  # a very small model
        parts, offset = [], 0
        for name, parameter in self._named:
            tensor = local_shard(parameter)
            size = _real_numbers(tensor)
            first, last = max(begin - offset, 0), min(end - offset, size)
            if first < last:
                parts.append((name, _in_memory(tensor)[first:last]))
            offset += size
        return parts


def digest_of(parts: Sequence[torch.Tensor]) -> int:
    """Return a hash, 1..LIMIT-1, of the bits of one-dimensional tensors, in their order.

    It takes memory for CHUNK elements, whatever their sizes, and a device is waited for once in each tensor.
    """
    total = 0
    for part in parts:
        sums = torch.zeros(2, dtype=torch.int64, device=part.device)
        for start in range(0, part.numel(), CHUNK):
            words = part[start : start + CHUNK].view(_WORDS[part.element_size()]).to(torch.int64)
            places = torch.arange(start + 1, start + words.numel() + 1, device=words.device)
            # Both sums may wrap around, everywhere alike.
            sums[1] += words.sum()
            sums[0] += places.remainder_(_PERIOD).add_(1).mul_(words).sum()
        weighted, plain = sums.tolist()
        total = total * 1_000_003 + weighted + 31 * plain
    return total % (LIMIT - 1) + 1


def _real_numbers(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in one dimension, as real numbers; a copy where they do not lie side by
    side.
    """
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    if plain.is_contiguous():
        return plain.view(-1)
    order = sorted(range(plain.dim()), key=plain.stride, reverse=True)
    return plain.permute(order).reshape(-1)


def odd_ones(hashes: Sequence[int]) -> list[int]:
    """Ranks whose hash is not that of most members; where no value has most, not that of the first one."""
    votes = {value: hashes.count(value) for value in hashes}
    most = max(votes.values())
    right = next(value for value in hashes if votes[value] == most)
    return [rank for rank, value in enumerate(hashes) if value != right]


def odd_pods(hashes: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of the pods of which a process has another part than most others of its local rank.

    The first pod is none of them where all would be, since somebody has to have the state.

    Args:
        hashes: by local rank, and then by pod.
    """
    odd = sorted({pod for row in hashes for pod in odd_ones(row)})
    return odd[1:] if len(odd) == len(hashes[0]) else odd


def balance_in_row(own: int, pod: int, pods: int) -> int:
    """Return what a process adds to a sum that is 0 where those of each local rank have equal hashes.

    Processes of one pod have other hashes than each other, so that a sum of squares would tell nothing. A
    difference that the sum does not show is as likely as that two hashes are equal by chance.

    Args:
        own: hash of this process.
        pod: number of its pod.
        pods: how many there are.
    """
    return own * (pods - 1) if pod == 0 else -own
