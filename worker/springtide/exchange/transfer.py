"""The committed state on its way from a holder to members that lack it, over the new generation's group.

The tree is flattened (`codec`): a JSON header and raw tensors, which travel as one packed stream of bytes cut
into pieces. The receiver fills a buffer of its own beside the state that it still has, so that a transfer is
whole or has not happened. No pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from springtide import codec
from springtide.exchange.groups import Group, Work

PIECE_BYTES = 8 << 20
_MOST_HEADER_BYTES = 256 << 20


def send_state(
    group: Group, receivers: Sequence[int], tree: Any, on_piece: Callable[[], None] = lambda: None
) -> int:
    """Send the tree to the ranks `receivers`; return the bytes sent to each. Raise RuntimeError of the
    group's.

    on_piece is called before each piece.
    """
    header, tensors = codec.flatten(tree)
    stream = list(_packed(tensors))
    total = sum(part.numel() for part in stream)
    _to_all(group, receivers, torch.tensor([len(header), total], dtype=torch.int64))
    _to_all(group, receivers, torch.frombuffer(bytearray(header), dtype=torch.uint8))
    # Two buffers: one is filled while the other is on its way.
    buffers = [torch.empty(min(PIECE_BYTES, max(total, 1)), dtype=torch.uint8) for _ in range(2)]
    works: list[list[Work]] = [[], []]
    for number, parts in enumerate(_cut(stream)):
        on_piece()
        slot = number % 2
        _wait(works[slot])
        size = _gather(parts, buffers[slot])
        works[slot] = [group.start_send(buffers[slot][:size], receiver) for receiver in receivers]
    for pending in works:
        _wait(pending)
    return len(header) + total


def receive_state(
    group: Group, holder: int, limit_bytes: int, on_piece: Callable[[], None] = lambda: None
) -> tuple[Any, int]:
    """Return (tree, bytes) as sent by rank `holder`.

    limit_bytes: most memory to take. Raise RuntimeError of the group's, ValueError for a header that cannot
    be.
    """
    sizes = torch.zeros(2, dtype=torch.int64)
    group.start_receive(sizes, holder).wait()
    header_bytes, total = (int(number) for number in sizes)
    if not 0 < header_bytes <= _MOST_HEADER_BYTES or not 0 <= total <= limit_bytes:
        raise ValueError(
            f"state transfer: {header_bytes} bytes of header and {total} of tensors were announced; "
            f"{limit_bytes} bytes are the limit here"
        )
    raw = torch.zeros(header_bytes, dtype=torch.uint8)
    group.start_receive(raw, holder).wait()
    header = raw.numpy().tobytes()
    if codec.packed_size(codec.specs(header, limit_bytes)) != total:
        raise ValueError("state transfer: the header's shapes do not add up to the announced size")
    buffer = torch.empty(total, dtype=torch.uint8)
    for start in range(0, total, PIECE_BYTES):
        on_piece()
        group.start_receive(buffer[start : start + PIECE_BYTES], holder).wait()
    return codec.unpack(header, buffer), header_bytes + total


def _packed(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The bytes of `codec.pack` without the copy: the tensors' own memory, with padding between."""
    padding = torch.zeros(codec.ALIGNMENT, dtype=torch.uint8)
    end = 0
    for tensor in tensors:
        if gap := -end % codec.ALIGNMENT:
            yield padding[:gap]
        raw = codec.as_bytes(tensor)
        yield raw
        end += gap + raw.numel()


def _cut(stream: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut the concatenation of byte tensors into pieces of PIECE_BYTES (the last one shorter), as lists of

    views.
    """
    piece: list[torch.Tensor] = []
    room = PIECE_BYTES
    for part in stream:
        offset = 0
        while offset < part.numel():
            size = min(room, part.numel() - offset)
            piece.append(part[offset : offset + size])
            offset += size
            room -= size
            if room == 0:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _gather(parts: Sequence[torch.Tensor], target: torch.Tensor) -> int:
    offset = 0
    for part in parts:
        target[offset : offset + part.numel()] = part
        offset += part.numel()
    return offset


def _to_all(group: Group, receivers: Sequence[int], tensor: torch.Tensor) -> None:
    _wait([group.start_send(tensor, receiver) for receiver in receivers])


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()
