"""Requests of raw form (`kv`): checked before their payload is received, carried out after. No sockets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.optim import Update
from springtide_ps.server.kv_store import Entry, Lease, Store, StoreError
from springtide_ps.wire.frames import DTYPES, PAYLOAD_LIMIT, Frame, FrameError, Header, Kind, joined, memory

_RANK_LIMIT: Final = 16
_SPEC: Final = tuple(field.name for field in fields(TableSpec))
_EMPTY: Final = memoryview(b"")


@dataclass
class Counters:
    """Count requests since the start. Bytes are of tensors; rows are of tables.

    batches: pushes of batches that were applied. repeated: those whose batch the chunk had already.

    Several threads add to them, so the amount to add is computed first: `+=` of a call loses what others add
    while it runs, and a counter may fall.
    """

    pushes: int = 0
    pulls: int = 0
    looked_up: int = 0
    row_updates: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0
    batches: int = 0
    repeated: int = 0


@dataclass(slots=True)
class Answer:
    """A frame and its payload; `done` is called when it has been sent, or cannot be. since: by
    `time.monotonic`, when it was there to be sent.
    """

    frame: Frame
    payload: memoryview = _EMPTY
    lease: Lease | None = None
    entry: Entry | None = None
    since: float = math.inf

    def done(self) -> None:
        if self.entry is not None and self.lease is not None:
            self.entry.give_back(self.lease)


class KvHandler:
    """Raises StoreError, UpdateError or TableError for what cannot be done; FrameError for what no client of
    ours sends. `clients` tells how many are connected.
    """

    def __init__(self, store: Store, counters: Counters, clients: Callable[[], int]) -> None:
        self._store, self._counters, self._clients = store, counters, clients

    def check(self, header: Header, meta: dict[str, Any]) -> None:
        """Refuse a request whose payload has another size than it must have, before memory is allocated.

        Args:
            header: of the request.
            meta: its JSON.

        Raises:
            FrameError: the request says what cannot be.
            StoreError: the key is not there, or there is no room.
        """
        key, kind = meta.get("key", ""), header.kind
        if not isinstance(key, str):
            raise FrameError("a key is a string")
        if kind in (Kind.PUSH, Kind.PUSH_PULL):
            nbytes = self._store.entry(key).nbytes
        elif kind is Kind.INIT:
            shape, dtype = _shape_of(meta)
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > PAYLOAD_LIMIT:
                raise StoreError(
                    f"{key!r} has {nbytes} bytes, {PAYLOAD_LIMIT} are the limit of one key: cut it"
                )
            self._store.check_room(key, nbytes)
        elif kind in (Kind.LOOKUP, Kind.TABLE_PUSH):
            dim = self._store.table(key).spec.dim
            count = _count(meta, "count")
            if count * (8 + 4 * dim) > PAYLOAD_LIMIT:
                raise StoreError(f"{count} rows of {key!r} are too many for one request: send them in parts")
            nbytes = count * (8 if kind is Kind.LOOKUP else 8 + 4 * dim)
        elif kind in (Kind.PULL, Kind.UPDATE, Kind.STATUS, Kind.TABLE, Kind.PAGE):
            nbytes = 0
        else:
            raise FrameError(f"{kind.name} is no request")
        if header.payload_bytes != nbytes:
            raise StoreError(
                f"{kind.name} of {key!r} brings {header.payload_bytes} bytes, {nbytes} belong there: push "
                "what init() had, in shape and dtype"
            )

    def answer(
        self,
        header: Header,
        meta: dict[str, Any],
        payload: torch.Tensor,
        reply: Callable[[Answer], None],
    ) -> None:
        """Carry a checked request out.

        Args:
            header: of the request.
            meta: its JSON.
            payload: uint8; used no longer than this call.
            reply: gets the answer in this call.
        """
        reply(self._answer(header, meta, payload))

    def _answer(self, header: Header, meta: dict[str, Any], payload: torch.Tensor) -> Answer:
        kind, number, key = header.kind, header.request, meta.get("key", "")
        if kind is Kind.STATUS:
            return Answer(Frame(Kind.DONE, number, {**self._store.status(), "clients": self._clients()}))
        if kind is Kind.UPDATE:
            options = {k: v for k, v in meta.items() if k != "name"}
            self._store.use(Update(str(meta.get("name")), options))
            return Answer(Frame(Kind.DONE, number))
        if kind is Kind.INIT:
            shape, dtype = _shape_of(meta)
            whole = _shape(meta["whole"]) if "whole" in meta else None
            created = self._store.create(key, payload.view(dtype).reshape(shape), whole)
            return Answer(Frame(Kind.DONE, number, {"created": created}))
        if kind is Kind.TABLE:
            created = self._store.create_table(key, _spec_of(meta))
            return Answer(Frame(Kind.DONE, number, {"created": created}))
        if kind in (Kind.LOOKUP, Kind.TABLE_PUSH, Kind.PAGE):
            return self._of_table(kind, number, key, meta, payload)
        entry = self._store.entry(key)
        if kind is Kind.PULL:
            self._counters.pulls += 1
            lease = entry.lease()
        else:
            self._counters.pushes += 1
            pushed = payload.view(entry.dtype)
            if pushed.shape != entry.shape:
                pushed = pushed.reshape(entry.shape)
            if kind is Kind.PUSH:
                return Answer(Frame(Kind.DONE, number, {"version": entry.push(pushed)}))
            lease = entry.push_pull(pushed)
        frame = Frame(Kind.VALUES, number, {"version": lease.version}, entry.nbytes)
        return Answer(frame, memory(lease.values), lease, entry)

    def _of_table(
        self, kind: Kind, number: int, key: str, meta: dict[str, Any], payload: torch.Tensor
    ) -> Answer:
        table, count = self._store.table(key), _count(meta, "count")
        if kind is Kind.PAGE:
            fits = PAYLOAD_LIMIT // (8 + 4 * table.spec.dim)
            names, rows = table.page(_count(meta, "start"), min(count, fits))
            both = joined(names, rows)
            return Answer(Frame(Kind.VALUES, number, {"count": len(names)}, both.nbytes), memory(both))
        ids = payload[: 8 * count].view(torch.int64).numpy().copy()
        if kind is Kind.LOOKUP:
            self._counters.looked_up += count
            rows = table.lookup(ids)
            return Answer(Frame(Kind.VALUES, number, {"version": table.pushes}, rows.nbytes), memory(rows))
        self._counters.row_updates += count
        table.push(ids, payload[8 * count :].view(torch.float32).reshape(count, table.spec.dim))
        return Answer(Frame(Kind.DONE, number, {"version": table.pushes}))


def _count(meta: dict[str, Any], name: str) -> int:
    value = meta.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**40:
        raise FrameError(f"{name} is no count")
    return value


def _spec_of(meta: dict[str, Any]) -> TableSpec:
    given = {name: meta[name] for name in _SPEC if name in meta}
    options = given.get("options", {})
    if not isinstance(options, dict) or "dim" not in given:
        raise FrameError("a table has a dim, and options that are an object")
    given["options"] = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return TableSpec(**given)


def _shape_of(meta: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    dtype = DTYPES.get(str(meta.get("dtype")))
    if dtype is None:
        raise StoreError(f"a tensor of {meta.get('dtype')!r} cannot be held: {', '.join(DTYPES)} can")
    return _shape(meta.get("shape")), dtype


def _shape(shape: object) -> tuple[int, ...]:
    if (
        not isinstance(shape, list)
        or len(shape) > _RANK_LIMIT
        or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in shape)
    ):
        raise StoreError(f"{shape!r} is no shape")
    return tuple(shape)
