"""What an exchange asks servers for, in its generation's name; above all rows of tables."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from typing import Any

import torch

from springtide.ps import row_reads as rows
from springtide.ps.compression import Wire
from springtide.ps.connections import Links, ServerError
from springtide.ps.generation import Place
from springtide.ps.step_spec import ServerOptimizers
from springtide.ps.tables import TableBook, table_name
from springtide_ps.client import Answer
from springtide_ps.frames import Kind


class TableSteps:
    """A part of `ServerExchange`, which makes what is named here."""

    tables: TableBook
    optimizers: ServerOptimizers
    wire: Wire
    links: Links
    _me: str
    _place: Place | None
    _homes: dict[str, list[str]]
    _counts: dict[str, int]
    _round: int

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table: ids int64 [n], each once, or heads; sums float32 [n, dim].

        Raise ServerError.
        """
        step, place, sums = self._step + 1, self._entered, self.wire.shrunk(sums)
        try:
            for part in self.tables.cut(index, ids, self._homes, empty=True):
                gradients = self.tables.records(part, ids, sums)
                client, name = self.links[part.server], table_name(index)
                about = (place.token, step, self._me, name, part.slices)
                client.stage_rows(*about, gradients, sums.dtype, self._round)
                self._counts[part.server] = self._counts.get(part.server, 0) + len(part.slices)
        except ConnectionError as error:
            raise ServerError(str(error)) from None

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """As `servers.rows`; before the first generation the rows are as this process would make them.

        to_the_end: as in `settle`.
        """
        return self._rows_now(index, ids, to_the_end)

    def _rows_now(self, index: int, ids: torch.Tensor, to_the_end: bool) -> torch.Tensor:
        if self._place is None:
            return self.tables.handles[index].local.rows(ids)
        result = self._patient if to_the_end else self.links.answer
        return rows.read(self.tables, index, ids, self._homes, self._step, self._ask, result)

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """As `servers.rows`; before the first generation the rows that this process holds."""
        if self._place is None:
            return self.tables.handles[index].local.held()
        result = self._patient if to_the_end else self.links.answer
        links = self.links
        return rows.read_all(self.tables, index, self._homes, self._step, self._ask, result, links.part_bytes)

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Of all members' gradients that are there, of this optimizer, as of the last `prepare`."""
        return self.optimizers.norm_of(optimizer)

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """As `StepHome.stage_tables`: they make it when the step is committed."""
        self.optimizers.stage(optimizer, None, scale, factor)

    @property
    def any_staged(self) -> bool:
        return bool(self.optimizers.staged)

    def _patient(self, future: Future[Answer], server: str, what: str) -> Answer:
        """The answer about a step that this member has committed, also when the generation is over."""
        raise NotImplementedError

    @property
    def _entered(self) -> Place:
        if self._place is None:
            raise ServerError("no generation has begun")
        return self._place

    @property
    def _step(self) -> int:
        return self._entered.step

    def _ask(
        self,
        server: str,
        kind: Kind,
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]:
        return self.links.ask(server, kind, self._entered.token, meta, payload, out, any_size)
