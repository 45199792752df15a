"""A checkpoint of what lives on servers: frozen there at a step, and read by the writing thread while
training goes on. Each member reads and writes its own part of the chunks.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import torch

from springtide.checkpoint.shares import Piece
from springtide.checkpoint.staging import Collected, GoneError, specs_of
from springtide.comm import codec
from springtide.comm.layout import Layout
from springtide.ps.sharding import PlannedChunk
from springtide.ps.tables import PlannedSlice
from springtide_ps.params.chunk import Chunk
from springtide_ps.params.load_parts import spans
from springtide_ps.wire.client import Answer, RefusedError, ServerClient
from springtide_ps.wire.frames import DTYPES, PART_BYTES, Kind

_ANSWER_SECONDS: Final = 120.0
_AHEAD: Final = 4  # chunks, or parts of slices, that are asked for before the first of them has come

Descriptions = Mapping[str, Mapping[str, Any]]
"""The description that servers give of each chunk: see `springtide_ps.server.snapshot.describe`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Say where everything is.

    homes: server of each chunk and slice. positions: where the optimizer's state of a parameter stands in the
    tree, by the parameter's number.
    """

    layout: Layout
    chunks: Sequence[PlannedChunk]
    slices: Sequence[PlannedSlice]
    homes: Mapping[str, str]
    positions: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Reader:
    """One of those that read a snapshot.

    name: of the snapshot, the same at all readers. me: this one. readers: how many there are. part_bytes: so
    many of a slice of a table are read at a time.
    """

    name: str
    me: str
    readers: int
    part_bytes: int = PART_BYTES


class Snapshot:
    """Freezes, when it is made, what servers hold after a step; then for one other thread.

    clients: by server. token: the generation's. step: the last committed one.
    """

    kind = "servers"

    def __init__(
        self,
        clients: Mapping[str, ServerClient],
        plan: Plan,
        token: tuple[int, int, int],
        step: int,
        reader: Reader,
    ) -> None:
        self._part_bytes = reader.part_bytes
        self._slices = {piece.key for piece in plan.slices}
        self._plan, self._token, self._clients = plan, token, dict(clients)
        self._about = {"name": reader.name, "me": reader.me}
        self._asked_for: list[tuple[str, Future[Answer] | ConnectionError]] = []
        for server, client in self._clients.items():
            about = {**self._about, "s": step, "readers": reader.readers}
            try:
                self._asked_for.append((server, client.ask_step(Kind.SNAPSHOT, token, about)))
            except ConnectionError as error:
                self._asked_for.append((server, error))

    def collect(self, index: int, count: int) -> Collected:
        """Collect a share of what the servers hold.

        Args:
            index: Number of the share.
            count: How many there are.

        Raises:
            GoneError: A server does not have the snapshot any more.
        """
        for server, asked in self._asked_for:
            if isinstance(asked, ConnectionError):
                raise GoneError(f"parameter server {self._clients[server].address}: {asked}")
            self._result(asked, server)
        descriptions: dict[str, Any] = {}
        for server in self._clients:
            answer = self._result(self._ask(server, Kind.READ_SNAPSHOT, {}, any_size=True), server)
            assert answer.payload is not None
            said = json.loads(answer.payload.numpy().tobytes())
            descriptions |= {key: about for key, about in said.items() if self._plan.homes.get(key) == server}
        if missing := [key for key in self._plan.homes if key not in descriptions]:
            raise GoneError(f"{len(missing)} chunks are on no server, {missing[0]} for one")
        return self._read(descriptions, set(read_shares(self._plan, descriptions, count)[index]))

    def close(self) -> None:
        """Let the servers forget what they kept; nothing is waited for."""
        for server in self._clients:
            try:
                self._ask(server, Kind.RELEASE_SNAPSHOT, {})
            except GoneError:
                continue

    def _read(self, descriptions: Descriptions, own: Collection[str]) -> Collected:
        tree, places = outline(self._plan, descriptions)
        header, tensors = codec.flatten(tree, "parameter servers", move=False)
        specs, numbers = specs_of(tensors), {id(tensor): n for n, tensor in enumerate(tensors)}
        mine = [
            (place, Piece(numbers[id(place.tensor)], place.start, place.stop))
            for place in places
            if place.key in own
        ]
        # The widest first, so that every piece of a file is aligned.
        mine.sort(key=lambda item: (-specs[item[1].tensor].dtype.itemsize, item[1].tensor, item[1].start))
        sizes = [(piece.stop - piece.start) * specs[piece.tensor].dtype.itemsize for _, piece in mine]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8)
        into: dict[str, list[tuple[TensorPiece, torch.Tensor]]] = {key: [] for key in own}
        for (place, _), size, end in zip(mine, sizes, accumulate(sizes), strict=True):
            into[place.key].append((place, memory[end - size : end]))
        asked = deque[tuple[str, Future[Answer]]]()
        for key in own:
            for future in self._read_chunk(key, into[key]):
                asked.append((key, future))
                if len(asked) > _AHEAD:
                    self._take(*asked.popleft(), into)
        while asked:
            self._take(*asked.popleft(), into)
        return Collected(header, specs, [piece for _, piece in mine], memory)

    def _read_chunk(self, key: str, into: list[tuple[TensorPiece, torch.Tensor]]) -> Iterator[Future[Answer]]:
        """Ask for all of a chunk; of a slice the bytes come in parts, right to where they belong."""
        server = self._plan.homes[key]
        if key not in self._slices:
            yield self._ask(server, Kind.READ_SNAPSHOT, {"k": key}, any_size=True)
            return
        for _, memory in into:
            for at, size in spans(0, len(memory), self._part_bytes):
                about = {"k": key, "at": at, "most": size}
                yield self._ask(server, Kind.READ_SNAPSHOT, about, out=memory[at : at + size])

    def _take(
        self, key: str, future: Future[Answer], into: Mapping[str, list[tuple[TensorPiece, torch.Tensor]]]
    ) -> None:
        answer = self._result(future, self._plan.homes[key])
        if answer.payload is not None:
            fill(answer, into[key])

    def _ask(
        self,
        server: str,
        kind: Kind,
        about: dict[str, Any],
        any_size: bool = False,
        out: torch.Tensor | None = None,
    ) -> Future[Answer]:
        client = self._clients[server]
        try:
            return client.ask_step(kind, self._token, {**self._about, **about}, out=out, any_size=any_size)
        except ConnectionError as error:
            raise GoneError(f"parameter server {client.address}: {error}") from None

    def _result(self, future: Future[Answer], server: str) -> Answer:
        try:
            return future.result(_ANSWER_SECONDS)
        except FutureTimeoutError:
            why = f"does not answer for {_ANSWER_SECONDS:g} s"
        except (ConnectionError, RefusedError, ValueError) as error:
            why = str(error)
        raise GoneError(f"parameter server {self._clients[server].address}: {why}")


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """Elements start to stop of a tensor in the tree come from the chunk `key`: of its piece number `piece`
    the state `name`; of a slice (piece -1) its memory.
    """

    tensor: torch.Tensor
    start: int
    stop: int
    key: str
    piece: int = -1
    name: str = ""


def outline(plan: Plan, descriptions: Descriptions) -> tuple[dict[str, Any], list[TensorPiece]]:
    """Return the tree of a checkpoint without its numbers. PURE.

    Args:
        plan: Where everything is.
        descriptions: Of the chunks, by key.

    Returns:
        The tree, with tensors without memory, and where each part of them comes from.
    """
    states: dict[int, dict[str, torch.Tensor]] = {}
    places, single = [], set[int]()
    for planned in plan.chunks:
        for name, kind, scalar, present in descriptions[planned.key]["state"]:
            for number, (index, *_) in enumerate(planned.pieces):
                held = states.setdefault(index, {})
                if not present[number] or name in held:
                    continue
                shape = () if scalar else plan.layout.fields[index].shape
                held[name] = torch.empty(shape, dtype=DTYPES[kind], device="meta")
                if scalar:
                    single.add(id(held[name]))
                    places.append(TensorPiece(held[name], 0, 1, planned.key, number, name))
    for planned in plan.chunks:
        for number, (index, _, start, stop) in enumerate(planned.pieces):
            offset = planned.start + start - plan.layout.slots[index].offset
            # Where another piece of the parameter has state and this one has none, it is zero.
            places += [
                TensorPiece(tensor, offset, offset + stop - start, planned.key, number, name)
                for name, tensor in states.get(index, {}).items()
                if id(tensor) not in single
            ]
    tables = {}
    for piece in plan.slices:
        memory = torch.empty(int(descriptions[piece.key]["bytes"]), dtype=torch.uint8, device="meta")
        tables[piece.key] = {"about": json.dumps(descriptions[piece.key]["about"]), "memory": memory}
        if memory.numel():
            places.append(TensorPiece(memory, 0, memory.numel(), piece.key))
    optimizer = {plan.positions[index]: held for index, held in states.items() if held}
    return {"optimizer": optimizer, "tables": tables}, places


def read_shares(plan: Plan, descriptions: Descriptions, count: int) -> list[list[str]]:
    """Return the chunks that each member reads, in order, about equally many bytes each. PURE.

    Args:
        plan: Where everything is.
        descriptions: Of the chunks, by key.
        count: How many members read.
    """
    sizes = [(planned.key, planned.nbytes) for planned in plan.chunks]
    sizes += [(piece.key, int(descriptions[piece.key]["bytes"])) for piece in plan.slices]
    total, before = max(1, sum(size for _, size in sizes)), 0
    found: list[list[str]] = [[] for _ in range(count)]
    for key, size in sizes:
        found[min(count - 1, (before + size // 2) * count // total)].append(key)
        before += size
    return found


def fill(answer: Answer, into: Sequence[tuple[TensorPiece, torch.Tensor]]) -> None:
    """Put a chunk's state where it belongs; a piece without state stays zero.

    Args:
        answer: The chunk's dump.
        into: Places in the chunk, and their memory (uint8).
    """
    assert answer.payload is not None
    chunk = Chunk.load(answer.meta, answer.payload)
    for place, memory in into:
        held = chunk.state_of(place.piece).get(place.name)
        if held is not None:
            memory.copy_(held.reshape(-1).view(torch.uint8))
