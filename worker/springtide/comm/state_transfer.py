"""The committed state on its way from a holder to members that lack it, over the new generation's group.

The tree is flattened (`codec`): a JSON header and raw tensors, which travel as one packed stream of bytes cut
into pieces. A receiver fills a buffer of its own beside the state that it still has, so that a transfer is
whole or has not happened. No pickle.

The receivers of one holder are a chain: each passes a piece on while the next one comes, so a state reaches
many members in about the time that one takes, whatever their number. On each link of it:

1. up: of how many pieces from the front something is here, from an earlier transfer of the same state;
2. down: the sizes, the header, and the checksums of that many pieces;
3. up, if there are any: which pieces are wanted;
4. down: those pieces;
5. down: the checksums of all pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.comm import codec
from springtide.comm.process_group import Group, Work
from springtide.comm.state_pieces import MOST_PIECE_BYTES, Incoming, OutgoingState, checksum
from springtide.comm.transfer_progress import Progress

_MOST_HEADER_BYTES = 256 << 20
_IN_FLIGHT = 3
"""Pieces that are asked for or sent at once, so that the link never waits for a member's next call."""

OnPiece = Callable[[int, int, int], None]
"""(its place among those that travel, their number, bytes): a piece is about to be sent, or has come."""


@dataclass(frozen=True, slots=True)
class Route:
    """Ranks from which the state comes (None: it is here) and to which it goes on (None: nobody)."""

    upstream: int | None
    downstream: int | None


def route(transfers: Sequence[tuple[int, int]], rank: int) -> Route | None:
    """The rank's place in the chains; None if it is in none. transfers: (receiver, holder) ranks."""
    for holder in dict.fromkeys(holder for _, holder in transfers):
        chain = [holder, *(receiver for receiver, source in transfers if source == holder)]
        if rank in chain:
            at = chain.index(rank)
            return Route(chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None)
    return None


def send_state(
    group: Group,
    receiver: int,
    tree: Any,
    progress: Progress | None = None,
    on_piece: OnPiece = lambda *_: None,
) -> int:
    """Send the tree to the rank `receiver`; return the bytes sent. Raise RuntimeError of the group's."""
    progress = progress or Progress("", sends=True)
    header, tensors = codec.flatten(tree)
    pieces = OutgoingState(tensors)
    with _Link(group) as link:
        reach = int(link.receive(torch.zeros(1, dtype=torch.int64), receiver)[0])
        known = pieces.checksums(reach)
        wanted = _announce(link, receiver, header, pieces.total, pieces.size, known, len(pieces))
        sums = dict(enumerate(known))
        progress.kept = progress.done = pieces.total - sum(pieces.length(number) for number in wanted)
        progress.total = pieces.total
        rooms = [torch.empty(min(pieces.size, pieces.total), dtype=torch.uint8) for _ in range(_IN_FLIGHT)]
        sent: list[Work] = []
        for order, number in enumerate(wanted):
            if order >= _IN_FLIGHT:
                sent[order - _IN_FLIGHT].wait()
            piece = pieces.gather(number, rooms[order % _IN_FLIGHT])
            on_piece(order, len(wanted), piece.numel())
            sent.append(link.send(piece, receiver))
            sums[number] = checksum(piece)
            progress.done += piece.numel()
        _tell_sums(link, receiver, [sums[number] for number in range(len(pieces))])
        return len(header) + progress.done - progress.kept


def receive_state(
    group: Group,
    where: Route,
    limit_bytes: int,
    here: Incoming | None = None,
    progress: Progress | None = None,
    on_piece: OnPiece = lambda *_: None,
) -> tuple[Any, int]:
    """Return (tree, bytes that came), and pass the state on as it comes.

    limit_bytes: most memory to take. here: what an earlier transfer of the same state has brought; it takes
    what comes now. Raise RuntimeError of the group's, ValueError for what cannot be or came wrong.
    """
    upstream, downstream = where.upstream, where.downstream
    assert upstream is not None
    here = Incoming() if here is None else here
    progress = progress or Progress("", sends=False)
    with _Link(group) as link:
        reach = here.reach
        if downstream is not None:
            reach = max(reach, int(link.receive(torch.zeros(1, dtype=torch.int64), downstream)[0]))
        link.send(torch.tensor([reach], dtype=torch.int64), upstream)
        header, size, known = _announced(link, upstream, limit_bytes)
        here.open(codec.specs(header, limit_bytes), size)
        here.compare(known)
        missing = here.missing
        if known:
            mask = torch.zeros(len(here), dtype=torch.uint8)
            mask[missing] = 1
            link.send(mask, upstream)
        onward: list[int] = []
        if downstream is not None:
            onward = _announce(link, downstream, header, here.buffer.numel(), size, known, len(here))
        progress.kept = progress.done = here.bytes_here()
        progress.total = here.buffer.numel()
        passed = deque(onward)

        def pass_on(until: int) -> None:
            while downstream is not None and passed and passed[0] < until:
                link.send(here.piece(passed.popleft()), downstream)

        for order, number in enumerate(_in_flight(link, here, missing, upstream)):
            here.arrived(number)
            pass_on(number + 1)
            progress.done += here.piece(number).numel()
            on_piece(order, len(missing), here.piece(number).numel())
        pass_on(len(here))
        sums = torch.zeros(len(here), dtype=torch.int64)
        theirs: list[int] = link.receive(sums, upstream).tolist() if len(here) else []
        if downstream is not None:
            _tell_sums(link, downstream, theirs)
        here.check(theirs)
    return codec.unpack(header, here.buffer), len(header) + progress.done - progress.kept


def _announce(
    link: _Link, receiver: int, header: bytes, total: int, size: int, known: list[int], count: int
) -> list[int]:
    """Say what comes; return the numbers of the pieces that the receiver wants."""
    link.send(torch.tensor([len(header), total, size, len(known)], dtype=torch.int64), receiver)
    link.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), receiver)
    if not known:
        return list(range(count))
    link.send(torch.tensor(known, dtype=torch.int64), receiver)
    mask = link.receive(torch.zeros(count, dtype=torch.uint8), receiver)
    return [int(number) for number in mask.nonzero().flatten()]


def _announced(link: _Link, sender: int, limit_bytes: int) -> tuple[bytes, int, list[int]]:
    """(header, bytes of a piece, checksums of the first pieces), checked before memory is taken."""
    header_bytes, total, size, known = link.receive(torch.zeros(4, dtype=torch.int64), sender).tolist()
    if not 0 < header_bytes <= _MOST_HEADER_BYTES or not 0 <= total <= limit_bytes:
        raise ValueError(
            f"state transfer: {header_bytes} bytes of header and {total} of tensors were announced; "
            f"{limit_bytes} bytes are the limit here"
        )
    if not 1024 <= size <= MOST_PIECE_BYTES or not 0 <= known * size < total + size:
        raise ValueError(f"state transfer: {known} pieces of {size} bytes cannot be part of {total} bytes")
    header = link.receive(torch.zeros(header_bytes, dtype=torch.uint8), sender).numpy().tobytes()
    if codec.packed_size(codec.specs(header, limit_bytes)) != total:
        raise ValueError("state transfer: the header's shapes do not add up to the announced size")
    sums = link.receive(torch.zeros(known, dtype=torch.int64), sender).tolist() if known else []
    return header, size, sums


def _tell_sums(link: _Link, receiver: int, sums: list[int]) -> None:
    if sums:
        link.send(torch.tensor(sums, dtype=torch.int64), receiver)


def _in_flight(link: _Link, here: Incoming, numbers: Sequence[int], sender: int) -> Iterator[int]:
    """Yield the numbers of pieces as they have come; the next ones are asked for before."""
    asked: deque[tuple[int, Work]] = deque()
    left = deque(numbers)
    while left or asked:
        while left and len(asked) < _IN_FLIGHT:
            asked.append((left[0], link.ask(here.piece(left.popleft()), sender)))
        number, work = asked.popleft()
        work.wait()
        yield number


class _Link:
    """Sends and receives of one transfer: at its end nothing is under way any more, and if it fails the group
    is shut.

    The group can be freed only after each has been waited for.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Work] = []

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = error
        for work in self._works:
            if failed is not None:
                self._group.shut()
            try:
                work.wait()
            except RuntimeError as another:
                failed = failed or another
        if error is None and failed is not None:
            raise failed

    def send(self, tensor: torch.Tensor, receiver: int) -> Work:
        self._works.append(self._group.start_send(tensor, receiver))
        return self._works[-1]

    def ask(self, tensor: torch.Tensor, sender: int) -> Work:
        self._works.append(self._group.start_receive(tensor, sender))
        return self._works[-1]

    def receive(self, tensor: torch.Tensor, sender: int) -> torch.Tensor:
        self.ask(tensor, sender).wait()
        return tensor
