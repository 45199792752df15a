"""Reading rows of tables from servers, as they are after a step."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch

from springtide.embedding.local import cut_anew
from springtide.errors import SpringtideError
from springtide.ps.tables import Homes, PlannedSlice, TableIndex, table_name
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.load_parts import spans
from springtide_ps.wire.client import Answer
from springtide_ps.wire.frames import Kind

_ALL_ROWS: Final = "all rows of a table"
_AHEAD: Final = 2  # parts that are asked for before the first of them has come


class Ask(Protocol):
    """Send a request to a server. Raises ServerError."""

    def __call__(
        self,
        server: str,
        kind: Kind,
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]: ...


class Result(Protocol):
    """Wait for an answer; what: for the error that names what did not come. Raises ServerError."""

    def __call__(self, future: Future[Answer], server: str, what: str) -> Answer: ...


def read(
    table_index: TableIndex,
    index: int,
    ids: torch.Tensor,
    homes: Homes,
    step: int,
    ask: Ask,
    result: Result,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> torch.Tensor:
    """Read rows of a table from the servers.

    Args:
        table_index: The tables.
        index: Number of the table.
        ids: int64 [n], each once.
        homes: Servers of each slice.
        step: After which they are wanted.
        ask: Makes a request of a server.
        result: Waits for an answer.
        more: To be said in the requests.

    Returns:
        float32 [n, dim].

    Raises:
        ServerError: A server does not answer.
    """
    found = torch.empty(len(ids), table_index.handles[index].dim)
    asked = []
    for part in table_index.split(index, ids, homes, empty=False):
        out = torch.empty(len(part.own), found.shape[1])
        numbers, counts = zip(*part.slices, strict=True)
        about = {"k": table_name(index), "s": step, "p": list(numbers), "n": list(counts), **more}
        asked.append((part, out, ask(part.server, Kind.ROWS, about, ids[part.own], out)))
    for part, out, future in asked:
        result(future, part.server, "rows of a table")
        found[part.own] = out
    return found


def read_all(
    table_index: TableIndex, index: int, homes: Homes, step: int, ask: Ask, result: Result, part_bytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read all rows of a table from the servers.

    Args:
        table_index: The tables.
        index: Number of the table.
        homes: Servers of each slice.
        step: After which they are wanted.
        ask: Makes a request of a server.
        result: Waits for an answer.
        part_bytes: So many of a slice are read at a time.

    Returns:
        (ids int64 [n] in order, rows float32 [n, dim]).

    Raises:
        ServerError: A server does not answer.
    """
    parts = []
    for _, piece in read_slices(table_index, [index], homes, step, ask, result, part_bytes):
        held = piece.table.held()
        parts.append((held[0], held[2]))
    ids, rows = (torch.cat([part[kind] for part in parts]) for kind in (0, 1))
    order = torch.argsort(ids)
    return ids[order], rows[order]


def read_slices(
    table_index: TableIndex,
    indices: Iterable[int],
    homes: Homes,
    step: int,
    ask: Ask,
    result: Result,
    part_bytes: int,
) -> Iterator[tuple[PlannedSlice, Slice]]:
    """Yield the slices of tables, with the optimizer's state, as they are after a step.

    Args:
        table_index: The tables.
        indices: Numbers of the tables.
        homes: Servers of each slice.
        step: After which they are wanted.
        ask: Makes a request of a server.
        result: Waits for an answer.
        part_bytes: So many of a slice are read at a time.

    Raises:
        ServerError: A server does not answer.
    """
    wanted = set(indices)
    for index in wanted:
        for part in table_index.split(index, torch.empty(0, dtype=torch.int64), homes, empty=True):
            # Answered when the step is made there.
            numbers = [number for number, _ in part.slices]
            about = {"k": table_name(index), "s": step, "p": numbers, "n": [0] * len(numbers)}
            none = torch.empty(0, table_index.handles[index].dim)
            result(ask(part.server, Kind.ROWS, about, part.own, none), part.server, _ALL_ROWS)
    for planned in table_index.slices:
        if planned.parameter in wanted:
            server = homes[planned.key][0]
            yield planned, _read_slice(planned.key, server, ask, result, part_bytes)


def _read_slice(key: str, server: str, ask: Ask, result: Result, part_bytes: int) -> Slice:
    """Read a slice in parts, as it is when the first of them is asked for."""

    def part(at: int, more: Mapping[str, Any]) -> Future[Answer]:
        about = {"k": key, "at": at, "most": part_bytes, **more}
        return ask(server, Kind.DUMP, about, any_size=True)

    first = result(part(0, {}), server, _ALL_ROWS)
    assert first.payload is not None
    made, total = Slice.begin(first.meta, int(first.meta["of"])), int(first.meta["of"])
    made.write(0, first.payload)
    reading = {"reading": first.meta["reading"]} if "reading" in first.meta else {}
    asked = deque[tuple[int, Future[Answer]]]()
    for at, _ in spans(len(first.payload), total, part_bytes):
        asked.append((at, part(at, reading)))
        if len(asked) > _AHEAD:
            _write(made, *asked.popleft(), server, result)
    while asked:
        _write(made, *asked.popleft(), server, result)
    made.finish()
    return made


def _write(made: Slice, at: int, future: Future[Answer], server: str, result: Result) -> None:
    answer = result(future, server, _ALL_ROWS)
    assert answer.payload is not None
    made.write(at, answer.payload)


class TableState:
    """The tables as a part of the workers' state: what servers hold is saved with theirs (`snapshot`)."""

    def __init__(self, table_index: TableIndex) -> None:
        self._table_index = table_index

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hold the tables in this process, from where a fresh start takes them; each is cut as the script has
        it now. By slice: what it is as JSON, and its memory. Raise SpringtideError for other tables.
        """
        saved: dict[str, dict[int, Mapping[str, Any]]] = {}
        for key, held in state.items():
            name, _, number = key.rpartition(".")
            saved.setdefault(name, {})[int(number)] = held
        wanted = {table_name(index): index for index in self._table_index.handles}
        if saved.keys() != wanted.keys():
            raise SpringtideError(
                f"it has {len(saved)} tables and this script {len(wanted)}, of other parameters: is the "
                "script the same?"
            )
        for name, slices in saved.items():
            self._load(wanted[name], [slices[number] for number in sorted(slices)])

    def _load(self, index: int, saved: list[Mapping[str, Any]]) -> None:
        local = self._table_index.handles[index].local
        pieces = [
            Slice.load(json.loads(held["about"]), held["memory"].to("cpu", torch.uint8).contiguous())
            for held in saved
        ]
        old, now = pieces[0].table.spec, local.spec  # the script's
        if (old.dim, old.optimizer) != (now.dim, now.optimizer):
            raise SpringtideError(
                f"table {self._table_index.name(index)} has rows of {old.dim} elements trained by "
                f"{old.optimizer}, "
                f"and in this script of {now.dim} by {now.optimizer}: is the script the same?"
            )
        if len(pieces) != len(local.slices):
            pieces = cut_anew(pieces, len(local.slices))
        each = local.slices[0].table.spec
        for piece in pieces:
            piece.table.spec = replace(
                piece.table.spec,
                max_rows=each.max_rows,
                max_age=each.max_age,
                max_norm=now.max_norm,
                norm_type=now.norm_type,
                by_frequency=now.by_frequency,
            )
        local.slices[:] = pieces
