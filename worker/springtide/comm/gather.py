"""Bytes from all members to all members, over the group's sums and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from springtide.comm.process_group import Group, Work

CHUNK_BYTES = 8 << 20


def gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """Return what each member gives, by rank; for small data.

    Args:
        group: of the generation; all members call this.
        data: this member's.

    Raises:
        RuntimeError: the group's, when a member is lost meanwhile.
    """
    sizes = torch.zeros(group.size, dtype=torch.int64)
    sizes[group.rank] = len(data)
    group.start_sum(sizes).wait()
    ends = sizes.cumsum(0).tolist()
    everything = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = ends[group.rank] - len(data)
    if data:
        everything[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if ends[-1]:
        group.start_sum(everything).wait()
    raw = everything.numpy().tobytes()
    return [raw[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True)]


def chunks(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield byte tensors in order, in lists of CHUNK_BYTES at most; large ones are cut, as views."""
    found: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for part in parts:
        for piece in torch.split(part, CHUNK_BYTES) if part.numel() else ():
            if piece.numel() > room:
                yield found
                found, room = [], CHUNK_BYTES
            found.append(piece)
            room -= piece.numel()
    if found:
        yield found


def pass_around(
    group: Group,
    blocks: Sequence[Sequence[torch.Tensor]],
    check: Callable[[int, int, torch.Tensor], None],
) -> int:
    """Bring each member's block to all members, along a ring; return the bytes that came.

    All members go through the same steps in the same order: in each one a member sends its neighbour what it
    got in the one before.

    Args:
        group: of the members.
        blocks: byte tensors in memory, by the rank that has them; the others' are filled. The same sizes at
            all members.
        check: is given each chunk that came: (rank of its block, number in it, bytes).

    Raises:
        RuntimeError: of the group's.
    """
    size, rank = group.size, group.rank
    cut = [list(chunks(block)) for block in blocks]
    came = 0
    for step in range(size - 1):
        outgoing, source = cut[(rank - step) % size], (rank - step - 1) % size
        incoming = cut[source]
        for number in range(max(len(outgoing), len(incoming))):
            works: list[Work] = []
            room = None
            if number < len(incoming):
                room = _room(incoming[number])
                works.append(group.start_receive(room, (rank - 1) % size))
            if number < len(outgoing):
                works.append(group.start_send(_joined(outgoing[number]), (rank + 1) % size))
            for work in works:
                work.wait()
            if room is not None:
                check(source, number, room)
                _scatter(room, incoming[number])
                came += room.numel()
    return came


def _room(chunk: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(chunk) == 1:
        return chunk[0]
    return torch.empty(sum(part.numel() for part in chunk), dtype=torch.uint8)


def _joined(chunk: Sequence[torch.Tensor]) -> torch.Tensor:
    return chunk[0] if len(chunk) == 1 else torch.cat(list(chunk))


def _scatter(room: torch.Tensor, chunk: Sequence[torch.Tensor]) -> None:
    if len(chunk) > 1:
        for part, piece in zip(chunk, torch.split(room, [part.numel() for part in chunk]), strict=True):
            part.copy_(piece)
