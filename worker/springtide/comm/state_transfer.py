"""The committed state on its way from the members that hold it to those that lack it, over the new
generation's group.

The tree is flattened (`codec`): a JSON header, and tensors as raw memory, cut into pieces (`state_pieces`).
Nobody copies the state: pieces leave the sender's live tensors, and come to the receiver's. No pickle.

All holders send, each its share of the pieces. The receivers of one holder's pieces are a chain: each passes
a piece on while the next one comes, so a state reaches many members in about the time that one takes. Each
holder's chain begins with another receiver.

Between the members of a transfer, in this order:

1. the first holder -> each receiver: sizes, the header, which tensors any holder may send;
2. each holder -> each receiver: 64 bits of the beginning of each piece of its share;
3. each receiver -> each holder: of which pieces it may have the same bytes;
4. each holder -> each receiver that may: the checksums of these pieces;
5. each receiver -> the member before it in each chain: which pieces it wants;
6. along the chains: those pieces;
7. each holder -> each receiver: the checksums of its share.

So nothing travels that a receiver has bit for bit: frozen weights of the same file, initial values of the
same seed, and what an earlier transfer brought before its sender was lost.

All handle the pieces in one order (`schedule`), and wait for a piece only behind all before it. So none waits
in a circle: by induction over that order, and over the places in a chain.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from springtide.comm import codec
from springtide.comm.process_group import Group, Work
from springtide.comm.state_pieces import (
    MOST_PIECE_BYTES,
    Piece,
    PieceMemory,
    Rooms,
    assign,
    checksum,
    into_pieces,
    length,
    piece_size,
    schedule,
)
from springtide.comm.transfer_progress import Progress

MAX_SENDERS = 8
"""More would be no faster: they fill the receiver's link."""
_MOST_HEADER_BYTES = 256 << 20
_IN_FLIGHT = 3
"""Pieces that are asked for or sent at once on a link, so that it never waits for a member's next call."""
_PASSED_ON = 8
"""Pieces that a member in the middle of a chain passes on at once."""

OnPiece = Callable[[int, int, int], None]
"""(its place among those that travel here, their number, bytes): a piece is about to be sent, or has come."""


@dataclass(frozen=True, slots=True)
class Roles:
    """Ranks that send the state, and those that receive it."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    def chain(self, sender: int) -> list[int]:
        """Return the way of the pieces of a sender, by its number: its rank, then those of the receivers."""
        turn = sender % len(self.receivers)
        return [self.senders[sender], *self.receivers[turn:], *self.receivers[:turn]]

    def upstream(self, sender: int, rank: int) -> int:
        """Return the rank from which a receiver gets the pieces of a sender.

        Args:
            sender: its number among the senders.
            rank: of the member.
        """
        chain = self.chain(sender)
        return chain[chain.index(rank) - 1]

    def downstream(self, sender: int, rank: int) -> int | None:
        """Return the rank to which a member passes the pieces of a sender; None: to nobody.

        Args:
            sender: its number among the senders.
            rank: of the member.
        """
        chain = self.chain(sender)
        at = chain.index(rank) + 1 if rank in chain else len(chain)
        return chain[at] if at < len(chain) else None


def roles(receivers: Sequence[int], size: int) -> Roles:
    """Return who sends and who receives in a group of `size`.

    Args:
        receivers: ranks that lack the state; all others hold it.
        size: of the group.
    """
    lacking = sorted(set(receivers))
    holders = [rank for rank in range(size) if rank not in lacking]
    return Roles(tuple(holders[:MAX_SENDERS]), tuple(lacking))


class Landing:
    """Memory that a receiver has made for tensors of a state, kept until the state is whole."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    def take(self, index: int, made: torch.Tensor) -> torch.Tensor:
        """Return memory that was made for a tensor before, if it has this form; otherwise keep and return the
        new one.

        Args:
            index: number of the tensor in the state.
            made: of the tensor's dtype and shape.
        """
        known = self._made.get(index)
        if known is None or _form(known) != _form(made):
            self._made[index] = known = made
        return known

    def known(self, index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return memory that was made for a tensor before, if it has this form; None otherwise.

        Args:
            index: number of the tensor in the state.
            dtype: of the tensor.
            shape: of the tensor.
        """
        known = self._made.get(index)
        return known if known is not None and _form(known)[:2] == (dtype, shape) else None


class Place(Protocol):
    """The place where a tensor of a state is received."""

    @property
    def tensor(self) -> torch.Tensor:
        """Return memory of the tensor's form."""

    @property
    def live(self) -> bool:
        """Whether the script sees it, rather than that it was made for the transfer."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Say where the tensors of one state go.

    places: by id of a tensor of its outline. Tensors without a place get memory of their own.
    in_place: write into live memory; otherwise into memory beside it, made for the tensors that differ.
    """

    places: Mapping[int, Place]
    in_place: bool = True


@dataclass(frozen=True, slots=True)
class Reception:
    """Say how a receiver takes a state in.

    prepare: looks whether an outline fits, or raises, and says where it goes.
    limit_bytes: most memory that a state may have.
    overwrite: is called before the first byte of live memory changes.
    landing: what earlier transfers have made.
    """

    prepare: Callable[[Any], Destination]
    limit_bytes: int
    overwrite: Callable[[], None] = lambda: None
    landing: Landing = field(default_factory=Landing)


def send_state(
    group: Group,
    who: Roles,
    state: codec.Flattened,
    spread: Callable[[str], bool] = lambda path: True,
    progress: Progress | None = None,
    on_piece: OnPiece = lambda *_: None,
) -> int:
    """Send this holder's share of the state; return the bytes sent.

    Args:
        group: of the generation.
        who: sends and receives.
        state: does not change before this returns.
        spread: whether all holders have the same bytes at a path of the tree, so that any may send them.
        progress: is brought up to date.
        on_piece: is called before each piece.

    Raises:
        RuntimeError: of the group's.
    """
    progress = progress or Progress("", sends=True)
    me = who.senders.index(group.rank)
    sizes = [tensor.numel() * tensor.element_size() for tensor in state.tensors]
    anybody = [spread(path) for path in state.paths]
    plan = _plan(sizes, anybody, piece_size(sum(sizes)), len(who.senders))
    memory = PieceMemory(state.tensors, plan.pieces)
    rooms = Rooms(pinned=any(tensor.is_cuda for tensor in state.tensors))
    own = plan.share(me)
    with _Connection(group) as connection:
        if me == 0:
            _announce(connection, who, state.header, [sum(sizes), plan.most], anybody)
        if not own:
            return len(state.header) if me == 0 else 0
        sums = _tell_what_is_here(connection, who, own, memory, rooms)
        receiver = who.chain(me)[1]
        wanted = set(_marked(own, connection.receive(torch.zeros(len(own), dtype=torch.uint8), receiver)))
        progress.total = sum(map(plan.length, own))
        progress.reused = progress.done = progress.total - sum(map(plan.length, wanted))
        going = _Going(connection, _IN_FLIGHT, rooms)
        for order, number in enumerate(number for number in plan.order if number in wanted):
            going.make_way()
            data, room = memory.direct(number), None
            if data is None:
                room = rooms.take(plan.length(number))
                data = memory.gather(number, room)
            on_piece(order, len(wanted), data.numel())
            going.send(data, receiver, room)
            sums[number] = checksum(data)
            progress.done += data.numel()
        for receiver in who.receivers:
            connection.send(torch.tensor([sums[number] for number in own], dtype=torch.int64), receiver)
    return (len(state.header) if me == 0 else 0) + progress.done - progress.reused


def receive_state(
    group: Group,
    who: Roles,
    reception: Reception,
    progress: Progress | None = None,
    on_piece: OnPiece = lambda *_: None,
) -> tuple[Any, int]:
    """Receive the state where it belongs, and pass it on as it comes.

    Args:
        group: of the generation.
        who: sends and receives.
        reception: of this process.
        progress: is brought up to date.
        on_piece: is called when a piece has come.

    Returns:
        The tree, whose tensors are the places, and the bytes that came.

    Raises:
        RuntimeError: of the group's.
        ValueError: what is announced cannot be a state, or a piece came wrong.
    """
    progress = progress or Progress("", sends=False)
    with ThreadPoolExecutor(1, "springtide-checksums") as checker, _Connection(group) as connection:
        header, layout, plan = _announced(connection, who, reception.limit_bytes)
        tree, placed = codec.outline(header, layout)
        destination = reception.prepare(tree)
        lying = _lying(layout, placed, destination.places, destination.in_place)
        arrival = _Arrival(reception, layout, lying, plan)
        missing, sums = _compared(connection, who, plan, arrival)
        progress.total = sum(map(plan.length, range(len(plan.pieces))))
        progress.reused = progress.done = progress.total - sum(map(plan.length, missing))
        onward = _wishes(connection, who, plan, missing)
        arrival.open(missing)
        incoming = _Incoming(connection, who, plan, missing, arrival)
        going = _Going(connection, _PASSED_ON, arrival.rooms)
        come, checked = 0, dict[int, Future[int]]()
        for number in plan.order:
            room = None
            if number in missing:
                data, room = incoming.take(number)
                if room is None:  # it stays where it is, so another thread reads it while the next one comes
                    checked[number] = checker.submit(checksum, data)
                else:
                    sums[number] = checksum(data)
                    arrival.memory.scatter(number, data)
                progress.done += data.numel()
                on_piece(come, len(missing), data.numel())
                come += 1
            if number in onward:
                going.make_way()
                if room is None:
                    data, room = _data(arrival, plan, number)
                going.send(data, onward[number], room)
            elif room is not None:
                arrival.rooms.give(room)
        sums |= {number: found.result() for number, found in checked.items()}
        _check(connection, who, plan, {number: sums[number] for number in missing})
    return codec.unflatten(header, arrival.whole), len(header) + progress.done - progress.reused


# ---- the plan


@dataclass(frozen=True, slots=True)
class _Plan:
    """The same at all members: the pieces, the sender of each (by its number), and their order."""

    most: int
    pieces: list[Piece]
    owners: list[int]
    order: list[int]

    def share(self, sender: int) -> list[int]:
        return [number for number, owner in enumerate(self.owners) if owner == sender]

    def shares(self, who: Roles) -> list[tuple[int, list[int]]]:
        """Return the senders' ranks and their pieces, of those that have any."""
        found = [(rank, self.share(sender)) for sender, rank in enumerate(who.senders)]
        return [(rank, own) for rank, own in found if own]

    def length(self, number: int) -> int:
        return length(self.pieces[number])


def _plan(sizes: Sequence[int], anybody: Sequence[bool], most: int, senders: int) -> _Plan:
    pieces, free = into_pieces(sizes, anybody, most)
    owners = assign([length(piece) for piece in pieces], free, senders)
    return _Plan(most, pieces, owners, schedule(owners))


def _marked(numbers: Sequence[int], mask: torch.Tensor) -> list[int]:
    return [number for number, marked in zip(numbers, mask.tolist(), strict=True) if marked]


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.device


def _announced(
    connection: _Connection, who: Roles, limit_bytes: int
) -> tuple[bytes, list[codec.TensorSpec], _Plan]:
    """Receive the header and what the plan is made of, checked before memory is taken."""
    sender = who.senders[0]
    header_bytes, total, most = connection.receive(torch.zeros(3, dtype=torch.int64), sender).tolist()
    if not 0 < header_bytes <= _MOST_HEADER_BYTES or not 0 <= total <= limit_bytes:
        raise ValueError(
            f"state transfer: {header_bytes} bytes of header and {total} of tensors were announced; "
            f"{limit_bytes} bytes are the limit here"
        )
    if not 1024 <= most <= MOST_PIECE_BYTES:
        raise ValueError(f"state transfer: pieces of {most} bytes were announced")
    header = connection.receive(torch.zeros(header_bytes, dtype=torch.uint8), sender).numpy().tobytes()
    layout = codec.specs(header, limit_bytes + codec.ALIGNMENT * codec.MAX_TENSORS)
    if sum(spec.nbytes for spec in layout) != total:
        raise ValueError("state transfer: the header's shapes do not add up to the announced size")
    anybody = [False] * len(layout)
    if layout:
        anybody = [
            bool(mark) for mark in connection.receive(torch.zeros(len(layout), dtype=torch.uint8), sender)
        ]
    plan = _plan([spec.nbytes for spec in layout], anybody, most, len(who.senders))
    return header, layout, plan


# ---- the receiver


class _Arrival:
    """The receiver's memory: what it has of a state, and where the pieces go."""

    def __init__(
        self, reception: Reception, layout: Sequence[codec.TensorSpec], lying: _Lying, plan: _Plan
    ) -> None:
        self._reception, self._layout, self._lying, self._plan = reception, layout, lying, plan
        landing = reception.landing
        self.tensors: list[torch.Tensor | None] = []
        """Tensors by their number in the header; None before `open` where there is nothing yet."""
        for index, spec in enumerate(layout):
            live, made = lying.live.get(index), lying.made.get(index)
            if made is not None:
                self.tensors.append(landing.take(index, made))
            elif live is not None and lying.in_place:
                self.tensors.append(live)
            else:
                kept = landing.known(index, spec.dtype, spec.shape)
                self.tensors.append(live if kept is None else kept)
        self.memory = PieceMemory(self.tensors, plan.pieces)
        self.rooms = Rooms(pinned=any(item is not None and item.is_cuda for item in self.tensors))

    def open(self, missing: set[int]) -> None:
        """Make memory for what comes; say it first when that is the live one."""
        reception, live, in_place = self._reception, self._lying.live, self._lying.in_place
        wanted = {part.tensor for part in self.memory.parts(sorted(missing))}
        for index, spec in enumerate(self._layout):
            found = self.tensors[index]
            if found is None:
                found = torch.empty(spec.shape, dtype=spec.dtype)
                self.tensors[index] = reception.landing.take(index, found)
            elif found is live.get(index) and index in wanted and not in_place:
                self.tensors[index] = reception.landing.take(index, found.clone())
        if any(self.tensors[index] is live.get(index) for index in wanted):
            reception.overwrite()
        self.memory = PieceMemory(self.tensors, self._plan.pieces)

    @property
    def whole(self) -> list[torch.Tensor]:
        """The tensors, by number in the header."""
        return [item for item in self.tensors if item is not None]


@dataclass(frozen=True, slots=True)
class _Lying:
    """Memory for the tensors of a transfer, by number in the header: live memory, and memory made for it.

    Attributes:
        in_place: as of a `Destination`.
    """

    live: dict[int, torch.Tensor]
    made: dict[int, torch.Tensor]
    in_place: bool


def _lying(
    layout: Sequence[codec.TensorSpec],
    placed: Sequence[codec.Placed],
    places: Mapping[int, Place],
    in_place: bool,
) -> _Lying:
    found, ranges = _Lying({}, {}, in_place), _Bytes()
    for item in placed:
        place, spec = places.get(id(item.outline)), layout[item.index]
        if place is None or item.index in found.live or item.index in found.made:
            continue
        raw = item.raw(place.tensor.detach())
        if (raw.dtype, tuple(raw.shape)) != (spec.dtype, spec.shape) or not raw.is_contiguous():
            continue
        if not place.live:
            found.made[item.index] = raw
        elif ranges.add(raw):
            found.live[item.index] = raw
    return found


class _Bytes:
    """Ranges of memory that do not overlap: what is written to one of them changes no other."""

    def __init__(self) -> None:
        self._known: dict[torch.device, list[tuple[int, int]]] = {}

    def add(self, tensor: torch.Tensor) -> bool:
        """Take the tensor's memory in; False if some of it is taken, or there is none."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        known = self._known.setdefault(tensor.device, [])
        at = bisect.bisect_right(known, (begin, end))
        free = (at == 0 or known[at - 1][1] <= begin) and (at == len(known) or end <= known[at][0])
        if free and end > begin:
            known.insert(at, (begin, end))
        return free and end > begin


def _compared(
    connection: _Connection, who: Roles, plan: _Plan, arrival: _Arrival
) -> tuple[set[int], dict[int, int]]:
    """Return the numbers of the pieces that are not here bit for bit, and the checksums of some that are."""
    memory, sums = arrival.memory, dict[int, int]()
    asked: list[tuple[list[int], torch.Tensor, Work]] = []
    for sender, own in plan.shares(who):
        glances = connection.receive(torch.zeros(len(own), dtype=torch.int64), sender).tolist()
        alike = [
            memory.has(number) and memory.glance(number) == glance
            for number, glance in zip(own, glances, strict=True)
        ]
        connection.send(torch.tensor(alike, dtype=torch.uint8), sender)
        if numbers := [number for number, may in zip(own, alike, strict=True) if may]:
            told = torch.zeros(len(numbers), dtype=torch.int64)
            asked.append((numbers, told, connection.ask(told, sender)))
    missing = set(range(len(plan.pieces)))
    for numbers, _, _ in asked:
        sums |= {number: memory.checksum(number, arrival.rooms) for number in numbers}
    for numbers, told, work in asked:
        work.wait()
        missing -= {n for n, theirs in zip(numbers, told.tolist(), strict=True) if sums[n] == theirs}
    return missing, sums


def _wishes(connection: _Connection, who: Roles, plan: _Plan, missing: set[int]) -> dict[int, int]:
    """Say what is wanted; return to whom which pieces are to be passed on."""
    onward: dict[int, int] = {}
    for sender, _ in enumerate(who.senders):
        if own := plan.share(sender):
            wanted = torch.tensor([number in missing for number in own], dtype=torch.uint8)
            connection.send(wanted, who.upstream(sender, connection.rank))
    for sender, _ in enumerate(who.senders):
        receiver = who.downstream(sender, connection.rank)
        if receiver is not None and (own := plan.share(sender)):
            mask = connection.receive(torch.zeros(len(own), dtype=torch.uint8), receiver)
            onward |= dict.fromkeys(_marked(own, mask), receiver)
    return onward


def _data(arrival: _Arrival, plan: _Plan, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bytes of a piece that is here, and the room that they were gathered in, if they were."""
    if (data := arrival.memory.direct(number)) is not None:
        return data, None
    room = arrival.rooms.take(plan.length(number))
    return arrival.memory.gather(number, room), room


def _check(connection: _Connection, who: Roles, plan: _Plan, sums: Mapping[int, int]) -> None:
    """Raise ValueError unless the pieces that came have the checksums that their senders tell."""
    theirs: dict[int, int] = {}
    for sender, own in plan.shares(who):
        told = connection.receive(torch.zeros(len(own), dtype=torch.int64), sender).tolist()
        theirs |= zip(own, told, strict=True)
    wrong = sorted(number for number, mine in sums.items() if mine != theirs[number])
    if wrong:
        raise ValueError(
            f"state transfer: the checksum of piece {wrong[0]} is wrong ({len(wrong)} of "
            f"{len(plan.pieces)} are); it is sent again"
        )


class _Incoming:
    """Pieces that are asked for: on each link the next few, so that it never waits."""

    def __init__(
        self, connection: _Connection, who: Roles, plan: _Plan, missing: set[int], arrival: _Arrival
    ) -> None:
        self._connection, self._plan, self._arrival = connection, plan, arrival
        self._from = {number: who.upstream(plan.owners[number], connection.rank) for number in missing}
        self._left: dict[int, deque[int]] = {}
        for number in plan.order:
            if number in missing:
                self._left.setdefault(self._from[number], deque()).append(number)
        self._asked: dict[int, tuple[Work, torch.Tensor, torch.Tensor | None]] = {}
        for upstream in self._left:
            for _ in range(_IN_FLIGHT):
                self._ask_next(upstream)

    def take(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for the piece; return its bytes, and the room that they are in, if it is not their place."""
        work, data, room = self._asked.pop(number)
        work.wait()
        self._ask_next(self._from[number])
        return data, room

    def _ask_next(self, upstream: int) -> None:
        if not (left := self._left[upstream]):
            return
        number = left.popleft()
        data, room = self._arrival.memory.direct(number), None
        if data is None:
            size = self._plan.length(number)
            room = self._arrival.rooms.take(size)
            data = room[:size]
        self._asked[number] = self._connection.ask(data, upstream), data, room


class _Going:
    """Pieces on their way to the next member, at most so many at once."""

    def __init__(self, connection: _Connection, limit: int, rooms: Rooms) -> None:
        self._connection, self._limit, self._rooms = connection, limit, rooms
        self._sent: deque[tuple[Work, torch.Tensor | None]] = deque()

    def make_way(self) -> None:
        """Wait until there may be one more."""
        while len(self._sent) >= self._limit:
            work, room = self._sent.popleft()
            work.wait()
            if room is not None:
                self._rooms.give(room)

    def send(self, data: torch.Tensor, receiver: int, room: torch.Tensor | None) -> None:
        """Send bytes; the room, if they are in one, is free when they are gone."""
        self._sent.append((self._connection.send(data, receiver), room))


# ---- the holder


def _announce(
    connection: _Connection, who: Roles, header: bytes, numbers: Sequence[int], anybody: Sequence[bool]
) -> None:
    """Send the receivers the header, and what the plan is made of."""
    for receiver in who.receivers:
        connection.send(torch.tensor([len(header), *numbers], dtype=torch.int64), receiver)
        connection.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), receiver)
        if anybody:
            connection.send(torch.tensor(anybody, dtype=torch.uint8), receiver)


def _tell_what_is_here(
    connection: _Connection, who: Roles, own: Sequence[int], memory: PieceMemory, rooms: Rooms
) -> dict[int, int]:
    """Have the receivers compare what they have with this share; return the checksums made for it."""
    sums: dict[int, int] = {}
    glances = torch.tensor([memory.glance(number) for number in own], dtype=torch.int64)
    for receiver in who.receivers:
        connection.send(glances, receiver)
    masks = [connection.receive(torch.zeros(len(own), dtype=torch.uint8), r) for r in who.receivers]
    for receiver, mask in zip(who.receivers, masks, strict=True):
        alike = _marked(own, mask)
        for number in alike:
            if number not in sums:
                sums[number] = memory.checksum(number, rooms)
        if alike:
            connection.send(torch.tensor([sums[number] for number in alike], dtype=torch.int64), receiver)
    return sums


class _Connection:
    """Sends and receives of one transfer: at its end nothing is under way any more, and if it fails the group
    is shut.

    The group can be freed only after each has been waited for.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[Work] = []

    @property
    def rank(self) -> int:
        return self._group.rank

    def __enter__(self) -> _Connection:
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
