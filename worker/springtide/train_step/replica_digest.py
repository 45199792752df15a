"""Find replicas that have drifted apart: hashes of pieces of the parameters and the buffers.

Replicas are equal because they make equal steps from equal states. A fault that breaks this (memory that
flips a bit, a kernel that reads past its tensor, a script that changes parameters on one worker) shows
nowhere: sums are the same on all, and each goes on from its own numbers. So every INTERVAL steps the commit
vote carries a hash of one of PIECES pieces, as the last step has left them: all of them are seen in PIECES *
INTERVAL steps, for less than a thousandth of a step's reading. Before a state is saved, and where a loop
ends, all pieces are looked at together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate

import torch

from springtide.comm import codec
from springtide.comm.state_pieces import checksum
from springtide.pods.tensors import local_shard

INTERVAL = 16
PIECES = 64
LIMIT = 1 << 20
"""Hashes are below it, so that the vote's sums of squares are exact."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20
"""Words of 8 bytes that are hashed at once on a device."""

Named = Sequence[tuple[str, torch.Tensor]]


class ReplicaDigest:
    """Hashes of a model's parameters, and of buffers that are given along, by piece: of parameters that are
    divided in a pod, of this process's parts.

    named: the trained parameters by name, in the same order on all members.
    """

    def __init__(self, named: Named) -> None:
        self._named = _with_sizes(named)

    def due(self, step: int) -> bool:
        """Whether the vote of this step has a hash."""
        return step % INTERVAL == 0 and bool(self._named)

    def hash(self, step: int, buffers: Named = ()) -> int:
        """Return the hash, 1..LIMIT-1, of the piece that is due at this step. The host waits for a GPU.

        Args:
            step: its number.
            buffers: that all members have alike.
        """
        return digest_of([part for _, part in self._parts([step // INTERVAL % PIECES], buffers)[0]])

    def names(self, step: int, buffers: Named = ()) -> list[str]:
        """Return the names of what the step's piece has something of.

        Args:
            step: its number.
            buffers: as for `hash`.
        """
        return self.names_in(step // INTERVAL % PIECES, buffers)

    def hashes(self, buffers: Named = ()) -> list[int]:
        """Return the hashes of all pieces, each as of `hash`."""
        return [digest_of([part for _, part in parts]) for parts in self._parts(range(PIECES), buffers)]

    def names_in(self, piece: int, buffers: Named = ()) -> list[str]:
        """Return the names of what a piece has something of.

        Args:
            piece: its number, from 0.
            buffers: as for `hash`.
        """
        return [name for name, _ in self._parts([piece], buffers)[0]]

    def _parts(self, pieces: Sequence[int], buffers: Named) -> list[list[tuple[str, torch.Tensor]]]:
        """Return what each piece has of the tensors: names, and one-dimensional views in the order of memory.

        Args:
            pieces: their numbers.
            buffers: as for `hash`.
        """
        named = [*self._named, *_with_sizes(buffers)]
        if not named:
            return [[] for _ in pieces]
        ends, found = list(accumulate(size for *_, size in named)), []
        for piece in pieces:
            begin, end = piece * ends[-1] // PIECES, (piece + 1) * ends[-1] // PIECES
            end = max(end, begin + 1)  # a very small model
            parts = []
            for at in range(bisect_right(ends, begin), len(named)):
                name, parameter, size = named[at]
                offset = ends[at] - size
                if offset >= end:
                    break
                flat = _in_memory(local_shard(parameter))
                parts.append((name, flat[max(begin - offset, 0) : min(end - offset, size)].contiguous()))
            found.append(parts)
        return found


def digest_of(parts: Sequence[torch.Tensor]) -> int:
    """Return a hash, 1..LIMIT-1, of the bits of one-dimensional tensors, in their order.

    It takes memory for a few times CHUNK words of a device, whatever their sizes, which is waited for once.
    """
    on_device = [device_sums(part) for part in parts if part.device.type != "cpu"]
    known = iter(torch.stack(on_device).tolist() if on_device else ())
    total = 0
    for part in parts:
        word = checksum(codec.as_bytes(part)) if part.device.type == "cpu" else _one_number(*next(known))
        total = total * 1_000_003 + word
    return total % (LIMIT - 1) + 1


def device_sums(part: torch.Tensor) -> torch.Tensor:
    """Return int64 [2]: the sum of a one-dimensional tensor's words, and that of each times its place.

    Both may wrap around, everywhere alike. One word that differs changes both.
    """
    sums = torch.zeros(2, dtype=torch.int64, device=part.device)
    size, each = part.element_size(), 8 // part.element_size()
    odd = torch.arange(1, 2 * min(CHUNK, part.numel() // each) + 1, 2, device=part.device)
    for start in range(0, part.numel() // each, CHUNK):
        words = part[start * each : min(start + CHUNK, part.numel() // each) * each]
        if words.storage_offset() * size % 8:
            words = words.clone()  # only what begins at a word can be seen as words
        words = words.view(torch.int64)
        plain = words.sum()
        sums[0] += plain
        sums[1] += (words * odd[: len(words)]).sum() + 2 * start * plain
    rest = part[part.numel() // each * each :].view(_WORDS[size]).to(torch.int64)
    sums[0] += rest.sum()
    sums[1] -= (rest * torch.arange(3, 2 * len(rest) + 3, 2, device=part.device)).sum()
    return sums


def _one_number(plain: int, weighted: int) -> int:
    return weighted + 31 * plain


def _with_sizes(named: Named) -> list[tuple[str, torch.Tensor, int]]:
    return [(name, tensor, _real_numbers(local_shard(tensor))) for name, tensor in named if tensor.numel()]


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


def odd_ones(hashes: Sequence[Hashable]) -> list[int]:
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
