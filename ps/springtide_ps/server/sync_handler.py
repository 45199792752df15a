"""Requests of synchronous training: what each of their frames brings, and how it is answered.

Threads and locks: each client's reading thread calls `check`, `spare_for` and `answer`; the answer is given
by it, by one of the store's threads, or by the thread that receives another server's answer. `_lock` guards
changes to the set of connections to other servers; none is made in it. Shards have locks of their own
(`shard_store`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from springtide_ps.params.chunk import Chunk
from springtide_ps.params.embedding_shard import ROW_DTYPES, SLICES_LIMIT, Slice
from springtide_ps.params.sparse_gradient import SparseGradient, unpack
from springtide_ps.server.generation_spans import GenerationSpans
from springtide_ps.server.intermediate import NO_ROOM
from springtide_ps.server.kv_handler import Answer, Counters
from springtide_ps.server.kv_store import KEY_LIMIT
from springtide_ps.server.shard import Sum
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.snapshot import DumpPiece
from springtide_ps.server.step_protocol import MEMBERS_LIMIT, NoRoomError, StepProtocolError, Token
from springtide_ps.wire.client import ServerClient, in_backward_pass
from springtide_ps.wire.frames import (
    DTYPES,
    PART_BYTES,
    PAYLOAD_LIMIT,
    Frame,
    FrameError,
    Header,
    Kind,
    memory,
)
from springtide_ps.wire.keys import (
    BACKWARD_PASS_KEY,
    KEEPS_APPLIED_BATCHES_KEY,
    RUN_ID_KEY,
    STEP_SPEC_KEY,
    SUBSTEPS_KEY,
)
from springtide_ps.wire.options import spec_in
from springtide_ps.wire.stream import parse_address

_OF_BATCHES: Final = {Kind.FINISHED, Kind.EARLY_PUSH, Kind.COPY_EARLY_PUSH}
KINDS: Final = frozenset(k for k in Kind if Kind.ENTER <= k < Kind.PUSH_BATCH) - _OF_BATCHES
_GRADIENTS: Final = (Kind.STAGE, Kind.STAGE_SPECULATIVE, Kind.STAGE_SPARSE)
_PAYLOAD_KINDS: Final = (*_GRADIENTS, Kind.LOAD, Kind.SUM, Kind.ROWS, Kind.STAGE_ROWS)
_EMPTY: Final = memoryview(b"")

Reply = Callable[[Answer], None]
Connect = Callable[[tuple[str, int]], ServerClient]


@dataclass(slots=True)
class _Request:
    """A checked request of a step, and where its answer goes, now or later, from any thread."""

    kind: Kind
    number: int
    token: Token
    meta: dict[str, Any]
    payload: torch.Tensor
    """Bytes that are used no longer than the request is carried out, unless it `is_own`."""
    is_own: bool
    reply: Reply

    def answer(self, frame: Frame, payload: memoryview = _EMPTY) -> None:
        """Give the answer, with what it brings."""
        self.reply(Answer(frame, payload))

    def done(self, about: dict[str, Any] | None = None) -> None:
        """Answer that it is done, and with what there is to say."""
        self.reply(Answer(Frame(Kind.DONE, self.number, about or {}), _EMPTY))

    def later(
        self, make: Callable[[Any], tuple[Frame, memoryview | None]]
    ) -> Callable[[Any, Exception | None], None]:
        """Return a call that takes a result or an error, and answers with what `make` makes of the result."""
        number, reply = self.number, self.reply  # the request itself would keep its payload meanwhile

        def done(result: Any, error: Exception | None) -> None:
            if error is not None:
                refusal = {"error": type(error).__name__, "message": str(error)}
                reply(Answer(Frame(Kind.REFUSED, number, refusal)))
                return
            frame, payload = make(result)
            reply(Answer(frame, _EMPTY if payload is None else payload))

        return done

    def values_later(self) -> Callable[[Any, Exception | None], None]:
        """Return a call that takes values or an error, and answers with them."""
        number = self.number
        return self.later(lambda values: (Frame(Kind.VALUES, number, {}, values.nbytes), memory(values)))


class SyncHandler:
    """Answer the requests of workers that make their steps together, and of servers that keep copies.

    Methods raise StepProtocolError, ChunkError, SparseGradientError or UpdateError for what cannot be done,
    and FrameError for what no client of ours sends.

    Args:
        connect: opens a connection to another server of the job.
        memory_limit: bytes that the server may hold; 0: as many as there are.
        counters: of the server.
        part_bytes: a slice of more goes to another server in parts of so many.
        threads: that make steps, as of `ShardStore`.
        spans: are told of generations; None: nobody is.

    Attributes:
        memory_limit: as given.
        others: returns the bytes that the server holds beside the shards.
        store: the shards.
        entered: called when a generation has begun.
        spans: told of generations.
    """

    def __init__(
        self,
        connect: Connect,
        memory_limit: int = 0,
        counters: Counters | None = None,
        part_bytes: int = PART_BYTES,
        threads: int = 0,
        spans: GenerationSpans | None = None,
    ) -> None:
        self._connect, self.memory_limit = connect, memory_limit
        self._counters = counters or Counters()
        self.others: Callable[[], int] = lambda: 0
        self._peers: dict[str, ServerClient] = {}
        self._lock = threading.Lock()
        self.store = ShardStore(self._forward, self._fill, part_bytes, threads)
        self.entered: Callable[[Token], None] = lambda token: None
        self.spans = spans or GenerationSpans()
        self.store.replicator.copied = self.spans.copied
        self._requests: dict[Kind, Callable[[_Request], None]] = {
            Kind.ENTER: self._enter,
            Kind.RESOLVE: self._resolve,
            Kind.LOAD: self._load,
            Kind.INVENTORY: self._inventory,
            Kind.ARRANGE: self._arrange,
            Kind.STAGE: self._stage,
            Kind.STAGE_SPARSE: self._stage,
            Kind.STAGE_SPECULATIVE: self._stage_speculative,
            Kind.STAGE_ROWS: self._stage_rows,
            Kind.ROWS: self._rows,
            Kind.SUM: self._take_sum,
            Kind.PREPARE: self._prepare,
            Kind.COMMIT: self._commit,
            Kind.TRY: self._try,
            Kind.FETCH: self._fetch,
            Kind.EXPECT: self._expect,
            Kind.FETCH_INTERMEDIATE: self._fetch_intermediate,
            Kind.REPORT_SUBSTEPS: self._report_substeps,
            Kind.DUMP: self._dump,
            Kind.SNAPSHOT: self._snapshot,
            Kind.READ_SNAPSHOT: self._read_snapshot,
            Kind.RELEASE_SNAPSHOT: self._release_snapshot,
        }

    def close(self) -> None:
        self.store.close()
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()

    def check(self, header: Header, meta: dict[str, Any]) -> None:
        """Refuse a payload of another size than it must have, before memory is allocated.

        Args:
            header: of the request.
            meta: its JSON.

        Raises:
            FrameError: the request says what cannot be.
            StepProtocolError: the shard is not here, or the step is far ahead.
            ChunkError: the gradient does not fit the shard.
            NoRoomError: there is no memory for it.
        """
        kind, nbytes = header.kind, header.payload_bytes
        if kind not in _PAYLOAD_KINDS:
            if nbytes:
                raise FrameError(f"{kind.name} brings no tensor")
            return
        key = key_in(meta)
        if kind in _GRADIENTS and _selects(kind, meta):
            self.store.dense(key).check_sparse(nbytes, DTYPES.get(str(meta.get("d"))))
        elif kind in _GRADIENTS:
            self.store.check_gradient(key, nbytes, dtype_in(meta) if "d" in meta else None)
        elif kind in (Kind.ROWS, Kind.STAGE_ROWS):
            slices = _slices(meta)
            piece = self.store.slice_of(slices[0][0])
            dim, total = piece.table.spec.dim, sum(count for _, count in slices)
            each = 8 if kind is Kind.ROWS else piece.record_bytes(_row_dtype(meta))
            if nbytes != total * each:
                raise StepProtocolError(
                    f"{total} rows of {key} bring {nbytes} bytes, {total * each} belong there"
                )
            if total * 4 * dim > PAYLOAD_LIMIT:
                raise StepProtocolError(
                    f"{total} rows of {key} are too many for one answer: ask for them in parts"
                )
        elif kind is Kind.LOAD and "of" in meta:
            at, total = number_in(meta, "at"), number_in(meta, "of")
            if not nbytes or at + nbytes > total:
                raise FrameError(f"a part of {nbytes} bytes from {at} on, of {total}")
            if not at:
                self.check_room(f"chunk {key!r}", total)
        elif kind is Kind.LOAD:
            said = 0 if "table" in meta else number_in(meta, "options")
            self.check_room(f"chunk {key!r}", max(0, nbytes - said))
        elif kind is Kind.SUM:
            self.store.check_sum(key, (_step(meta), _backward_pass_in(meta)), nbytes, dtype_in(meta))

    def check_room(self, what: str, nbytes: int, besides: int = 0) -> None:
        """Refuse bytes for which there is no room.

        Args:
            what: the thing that they are of, for the message.
            nbytes: that it takes.
            besides: bytes held beside the chunks.

        Raises:
            NoRoomError: they are too many.
        """
        taken = self.store.held_bytes + besides + self.others()
        if self.memory_limit and taken + nbytes > self.memory_limit:
            raise NoRoomError(
                f"{what} ({nbytes} bytes) does not fit: {taken} of {self.memory_limit} bytes are taken"
            )

    def _has_no_second_copy(self) -> bool:
        taken = self.store.held_bytes + self.store.dense_bytes + self.others()
        return bool(self.memory_limit) and taken > self.memory_limit

    def _besides_slice(self, own: int) -> int:
        """Bytes of everything but a slice that has so many. Without a lock: it asks in its own."""
        return max(0, self.store.unlocked_bytes - own) + self.others()

    def has_room_twice(self, besides: int = 0) -> bool:
        """Whether second copies of the chunks fit as well. besides: as in `check_room`."""
        taken = 2 * self.store.held_bytes + besides + self.others()
        return not self.memory_limit or taken <= self.memory_limit

    def spare_for(self, header: Header, meta: dict[str, Any]) -> torch.Tensor | None:
        """Return memory for the gradient of a checked request, which becomes the sum itself (uint8); None:
        there is none.

        Args:
            header: of the request.
            meta: its JSON.
        """
        kind = header.kind
        if kind not in _GRADIENTS or _selects(kind, meta):
            return None
        dtype = dtype_in(meta) if "d" in meta else None
        return self.store.take_spare(key_in(meta), header.payload_bytes, dtype)

    def answer(
        self, header: Header, meta: dict[str, Any], payload: torch.Tensor, reply: Reply, own: bool = False
    ) -> None:
        """Carry a checked request out.

        Args:
            header: of the request.
            meta: its JSON.
            payload: uint8; used no longer than this call, unless it is `own`.
            reply: gets the answer now or later, from any thread.
            own: the payload is memory of `spare_for`.
        """
        carry_out = self._requests.get(header.kind)
        if carry_out is None:
            raise FrameError(f"{header.kind.name} is no request of a step")
        carry_out(_Request(header.kind, header.request, token_in(meta), meta, payload, own, reply))

    # ---- generations

    def _enter(self, asked: _Request) -> None:
        meta, token = asked.meta, asked.token
        run_id, began = str(meta.get(RUN_ID_KEY)), time.time()
        in_batches = bool(meta.get(KEEPS_APPLIED_BATCHES_KEY))
        skipped = number_in(meta, "skipped") if in_batches else 0
        version = self.store.enter(token, _members(meta), _step(meta), run_id, in_batches, skipped)
        self.entered(token)
        self.spans.entered(token, str(meta.get("trace", "")), began, whole=in_batches)
        asked.done({"version": version})

    def _resolve(self, asked: _Request) -> None:
        step_spec = asked.meta.get(STEP_SPEC_KEY)
        self.store.resolve(asked.token, None if step_spec is None else spec_in(asked.meta))
        self.spans.resolved(asked.token)
        asked.done()

    def _load(self, asked: _Request) -> None:
        """Hold a chunk or a slice from now on; a slice may come in parts."""
        meta, token = asked.meta, asked.token
        if "of" in meta:
            at, total = number_in(meta, "at"), number_in(meta, "of")
            begin = partial(Slice.begin, meta, total, self.memory_limit, self._besides_slice)
            self.store.load_part(token, key_in(meta), _step(meta), begin, at, total, asked.payload)
        else:
            self.store.load(token, key_in(meta), _step(meta), self._loaded(meta, asked.payload))
        asked.done()

    def _inventory(self, asked: _Request) -> None:
        names = "\n".join(self.store.inventory(asked.token)).encode()
        about = {"version": self.store.version, "lost": self.store.failed_shards.reasons}
        asked.answer(Frame(Kind.VALUES, asked.number, about, len(names)), memoryview(names))

    def _arrange(self, asked: _Request) -> None:
        meta = asked.meta
        forward, fill = _lists(meta, "forward"), _lists(meta, "fill")
        for address in {address for lists in (forward, fill) for item in lists.values() for address in item}:
            self._peer(address)
        drop = meta.get("drop", [])
        if not isinstance(drop, list):
            raise FrameError("drop is a list of chunks")
        self.store.arrange(asked.token, forward, fill, [str(key) for key in drop])
        self.spans.arranged(asked.token)
        asked.done()

    # ---- gradients of a step, and how it is made

    def _stage(self, asked: _Request) -> None:
        """Add a gradient to the step's sum. It has no answer of its own: PREPARE counts them."""
        meta, payload = asked.meta, asked.payload
        key = key_in(meta)
        gradient: torch.Tensor | SparseGradient
        if _selects(asked.kind, meta):
            chunk = self.store.dense(key)
            gradient = unpack(payload, chunk.dtype, chunk.values.numel())
        else:
            gradient = payload.view(dtype_in(meta) if "d" in meta else self.store.dtype(key))
        backward_pass = _backward_pass_in(meta)
        self.store.stage(asked.token, _step(meta), _me(meta), key, gradient, backward_pass, asked.is_own)
        self._counters.pushes += 1

    def _stage_speculative(self, asked: _Request) -> None:
        self._stage(asked)
        self.store.fetch_speculative(asked.token, _step(asked.meta), key_in(asked.meta), asked.values_later())
        self._counters.pulls += 1

    def _stage_rows(self, asked: _Request) -> None:
        meta, start = asked.meta, 0
        slices = _slices(meta)
        piece = self.store.slice_of(slices[0][0])
        words = piece.records_in(asked.payload, _row_dtype(meta))
        for key, count in slices:
            stop = start + count * piece.record_words
            self.store.stage(
                asked.token, _step(meta), _me(meta), key, words[start:stop], _backward_pass_in(meta)
            )
            self._counters.pushes += 1
            self._counters.row_updates += count
            start = stop

    def _take_sum(self, asked: _Request) -> None:
        """Take the sum of all gradients, which the chunk's first server has made."""
        meta = asked.meta
        which = (_step(meta), _backward_pass_in(meta))
        self.store.take_sum(asked.token, which, key_in(meta), asked.payload.view(dtype_in(meta)))
        asked.done()

    def _prepare(self, asked: _Request) -> None:
        meta, number = asked.meta, asked.number
        self.store.prepare(
            asked.token,
            _step(meta),
            _me(meta),
            number_in(meta, "count"),
            bool(meta.get("norm")),
            asked.later(lambda norms: (Frame(Kind.DONE, number, {"square_norms": norms}), None)),
            _backward_pass_in(meta),
        )

    def _commit(self, asked: _Request) -> None:
        meta, number = asked.meta, asked.number
        later = asked.later(lambda _: (Frame(Kind.DONE, number), None))
        self.store.commit(asked.token, _step(meta), _me(meta), spec_in(meta), later)

    def _try(self, asked: _Request) -> None:
        self.store.try_step(asked.token, _step(asked.meta), _me(asked.meta))
        asked.done()

    def _expect(self, asked: _Request) -> None:
        if self._has_no_second_copy():
            raise StepProtocolError(f"{NO_ROOM} for a second copy of the chunks")
        meta = asked.meta
        step_spec = spec_in(meta)
        self.store.expect(asked.token, _step(meta), _me(meta), step_spec)
        asked.done()

    def _report_substeps(self, asked: _Request) -> None:
        if self._has_no_second_copy():
            raise StepProtocolError(
                f"{NO_ROOM} for a second copy of the chunks, which values within a body need"
            )
        meta = asked.meta
        step_spec = spec_in(meta)
        self.store.add_substeps(asked.token, _step(meta), _me(meta), step_spec)
        asked.done()

    # ---- values

    def _fetch(self, asked: _Request) -> None:
        self.store.fetch(asked.token, _step(asked.meta), key_in(asked.meta), asked.values_later())
        self._counters.pulls += 1

    def _fetch_intermediate(self, asked: _Request) -> None:
        meta = asked.meta
        count, values = number_in(meta, SUBSTEPS_KEY), asked.values_later()
        self.store.fetch_intermediate(asked.token, _step(meta), key_in(meta), count, values)
        self._counters.pulls += 1

    def _rows(self, asked: _Request) -> None:
        meta, start = asked.meta, 0
        ids = asked.payload.view(torch.int64).numpy().copy()
        wanted = []
        for key, count in _slices(meta):
            wanted.append((key, ids[start : start + count]))
            start += count
        values = asked.values_later()
        if SUBSTEPS_KEY in meta:
            count = number_in(meta, SUBSTEPS_KEY)
            self.store.fetch_intermediate_rows(asked.token, _step(meta), wanted, count, values)
        else:
            self.store.fetch_rows(asked.token, _step(meta), wanted, values)
        looked_up = sum(count for _, count in _slices(meta))  # before the counter is read: others count, too
        self._counters.looked_up += looked_up

    def _dump(self, asked: _Request) -> None:
        meta = asked.meta
        reading = number_in(meta, "reading") if "reading" in meta else 0
        version, part, reading = self.store.dump(asked.token, key_in(meta), *_part_in(meta), reading)
        about = {"version": version, **({"reading": reading} if reading else {})}
        asked.answer(*_part(asked.number, part, about))

    # ---- snapshots

    def _snapshot(self, asked: _Request) -> None:
        meta = asked.meta
        readers = number_in(meta, "readers")
        if not 0 < readers <= MEMBERS_LIMIT:
            raise FrameError("a snapshot has at least one reader")
        self.store.take_snapshot(asked.token, _snapshot_in(meta), _step(meta), readers)
        asked.done()

    def _read_snapshot(self, asked: _Request) -> None:
        """Answer with what a chunk holds; where none is named, with what is said about each."""
        meta, number = asked.meta, asked.number
        if "k" in meta:
            part = self.store.read_snapshot(_snapshot_in(meta), key_in(meta), *_part_in(meta))
            asked.answer(*_part(number, part, {}))
            return
        described = json.dumps(self.store.describe_snapshot(_snapshot_in(meta)))
        text = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
        asked.answer(Frame(Kind.VALUES, number, {}, text.nbytes), memory(text))

    def _release_snapshot(self, asked: _Request) -> None:
        self.store.snapshots.release(_snapshot_in(asked.meta), _me(asked.meta))
        asked.done()

    def _loaded(self, meta: dict[str, Any], payload: torch.Tensor) -> Chunk | Slice:
        if "table" in meta:
            return Slice.load(meta, payload, self.memory_limit, self._besides_slice)
        return Chunk.load(meta, payload)

    # ---- other servers

    def _peer(self, address: str) -> ServerClient:
        with self._lock:
            peer = self._peers.get(address)
            if peer is not None and peer.broken is None:
                return peer
        try:
            fresh = self._connect(parse_address(address))
        except (OSError, ValueError) as error:
            raise StepProtocolError(f"server {address} cannot be reached for copies: {error}") from None
        with self._lock:
            self._peers[address] = fresh
        if peer is not None:
            peer.close()
        return fresh

    def _forward(
        self,
        address: str,
        which: Sum,
        key: str,
        total: torch.Tensor,
        done: Callable[[Exception | None], None],
    ) -> None:
        token, (step, number) = self.store.token, which
        about = {"s": step, "k": key} | in_backward_pass(number)
        try:
            future = self._peers[address].ask_step(Kind.SUM, token, about, total, typed=True)
        except (KeyError, ConnectionError) as error:
            done(error)
            return

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            done(error if error is None or isinstance(error, Exception) else RuntimeError(repr(error)))

        future.add_done_callback(answered)

    def _fill(
        self, address: str, key: str, version: int, meta: dict[str, Any], payload: torch.Tensor
    ) -> Future[Any]:
        return self.ask_for_copy(
            address, Kind.LOAD, self.store.token, {**meta, "s": version, "k": key}, payload
        )

    def ask_for_copy(
        self, address: str, kind: Kind, token: Token, meta: dict[str, Any], payload: torch.Tensor
    ) -> Future[Any]:
        """Ask a server that copies go to; the requests of one thread arrive in their order.

        Args:
            address: of the server.
            kind: of the request.
            token: the generation's.
            meta: its JSON.
            payload: that it brings.

        Returns:
            The answer to come.

        Raises:
            KeyError: no copies go there.
            ConnectionError: the server is gone.
        """
        return self._peers[address].ask_step(kind, token, meta, payload)


def _selects(kind: Kind, meta: dict[str, Any]) -> bool:
    return kind is Kind.STAGE_SPARSE or (kind is Kind.STAGE_SPECULATIVE and meta.get("sel") is True)


def token_in(meta: dict[str, Any]) -> Token:
    """The generation that a request names. Raise FrameError."""
    value = meta.get("t")
    if (
        not isinstance(value, list)
        or len(value) != 3
        or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value)
    ):
        raise FrameError("a request names its generation by three numbers")
    return (value[0], value[1], value[2])


def key_in(meta: dict[str, Any]) -> str:
    """The chunk that a request names. Raise FrameError."""
    key = meta.get("k")
    if not isinstance(key, str) or not 0 < len(key) <= KEY_LIMIT:
        raise FrameError(f"a chunk is named by 1 to {KEY_LIMIT} characters")
    return key


def _me(meta: dict[str, Any]) -> str:
    return str(meta.get("me"))


def _step(meta: dict[str, Any]) -> int:
    return number_in(meta, "s")


def _part_in(meta: dict[str, Any]) -> tuple[int, int | None]:
    """(from which byte on, how many at most; None: all) of a chunk are asked for. Raise FrameError."""
    if "most" not in meta:
        return 0, None
    most = number_in(meta, "most")
    if not 0 < most <= PAYLOAD_LIMIT:
        raise FrameError(f"a part has 1 to {PAYLOAD_LIMIT} bytes, not {most}")
    return number_in(meta, "at"), most


def _part(number: int, part: DumpPiece, about: dict[str, Any]) -> tuple[Frame, memoryview]:
    """The answer that brings it; with its first bytes comes what it is of."""
    said, block, total = part
    return Frame(Kind.VALUES, number, {**said, **about, "of": total}, block.nbytes), memory(block)


def _snapshot_in(meta: dict[str, Any]) -> str:
    name = meta.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= KEY_LIMIT:
        raise FrameError(f"a snapshot is named by 1 to {KEY_LIMIT} characters")
    return name


def dtype_in(meta: dict[str, Any]) -> torch.dtype:
    """The type of numbers that a request brings. Raise FrameError."""
    dtype = DTYPES.get(str(meta.get("d")))
    if dtype is None:
        raise FrameError(f"{str(meta.get('d'))[:32]!r} is no type of numbers: {', '.join(DTYPES)} are")
    return dtype


def _backward_pass_in(meta: dict[str, Any]) -> int:
    return number_in(meta, BACKWARD_PASS_KEY) if BACKWARD_PASS_KEY in meta else 0


def number_in(meta: dict[str, Any], name: str) -> int:
    """Return a count that a request says.

    Args:
        meta: the request's JSON.
        name: of the count.

    Raises:
        FrameError: it is none.
    """
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise FrameError(f"{name!r} is no count")
    return value


def _slices(meta: dict[str, Any]) -> list[tuple[str, int]]:
    """(key of a slice, how many ids) of a request about a table."""
    key, numbers, counts = key_in(meta), meta.get("p"), meta.get("n")
    if (
        not isinstance(numbers, list)
        or not isinstance(counts, list)
        or not 0 < len(numbers) == len(counts) <= SLICES_LIMIT
        or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in numbers + counts
        )
    ):
        raise FrameError("slices of a table are named by numbers, each with a count of ids")
    return [(f"{key}.{number}", count) for number, count in zip(numbers, counts, strict=True)]


def _row_dtype(meta: dict[str, Any]) -> torch.dtype:
    """Return the type in which a request's gradients of rows travel."""
    name = str(meta.get("d", "float32"))
    if name not in ROW_DTYPES:
        raise FrameError(f"gradients of rows travel as one of {', '.join(ROW_DTYPES)}, not {name[:32]!r}")
    return ROW_DTYPES[name]


def _members(meta: dict[str, Any]) -> list[str]:
    members = meta.get("members")
    if (
        not isinstance(members, list)
        or not 0 < len(members) <= MEMBERS_LIMIT
        or not all(isinstance(m, str) for m in members)
    ):
        raise FrameError("a generation has at least one member")
    return members


def _lists(meta: dict[str, Any], name: str) -> dict[str, list[str]]:
    value = meta.get(name, {})
    if not isinstance(value, dict) or not all(
        isinstance(item, list) and all(isinstance(a, str) for a in item) for item in value.values()
    ):
        raise FrameError(f"{name} gives servers by chunk")
    return value
