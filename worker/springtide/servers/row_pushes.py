"""What an exchange without common steps does about tables: rows are pushed by range, and read as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

import torch

from springtide.ps.connections import ServerError
from springtide.ps.early_push import Offering, Outgoing
from springtide.ps.row_gradients import cut_rows
from springtide.servers.table_steps import TableSteps
from springtide_ps.client import Answer


class RowPushes(TableSteps):
    """A part of `AsynchronousExchange`, which makes what is named here."""

    _offering: Offering
    _outgoing: dict[str, Outgoing]
    _fetches: dict[str, tuple[Future[Answer], str]]
    _slices_of: Mapping[int, list[str]]
    _ahead_of_end: set[str]

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Send all gradients of a table on their way, as `push`."""
        self.make_way()
        for key, rows in cut_rows(self.tables, index, ids, self.wire.shrunk(sums)).items():
            if key in self._ahead_of_end:
                continue  # it has the range
            self._outgoing[key] = rows
            if not len(rows.ids):
                continue  # nothing that could leave earlier
            try:
                self._offering.offer(self.links[self._homes[key][0]], self._entered.token, key, rows)
            except ConnectionError as error:
                raise ServerError(str(error)) from None

    def read_rows(self, index: int, ids: torch.Tensor, to_the_end: bool = False) -> torch.Tensor:
        """As in `ServerExchange`: the newest ones, with this worker's own pushes and steps."""
        if self.optimizers.has_stepped(index):
            self._push_staged()
        self._settle_rows([index], to_the_end)
        return self._rows_now(index, ids, to_the_end)

    def all_rows(self, index: int, to_the_end: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self._settle_rows([index], to_the_end)
        return super().all_rows(index, to_the_end)

    def _settle_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """Wait until what was pushed of these tables is in their slices. Raise ServerError."""
        self._take_rows(tables, to_the_end)
        self._conclude()

    def _take_rows(self, tables: Iterable[int], to_the_end: bool) -> None:
        """As `_settle_rows`, and nobody is told that the range is done."""
        for key in [key for index in tables for key in self._slices_of[index]]:
            if key in self._fetches:
                self._receive(key, to_the_end)

    def _patient(self, future: Future[Answer], server: str, what: str) -> Answer:
        # Needs no other member.
        return self.links.answer(future, server, what, to_the_end=True)

    def _conclude(self) -> None:
        raise NotImplementedError

    def _push_staged(self) -> None:
        raise NotImplementedError

    def make_way(self) -> None:
        raise NotImplementedError

    def _receive(self, key: str, to_the_end: bool) -> None:
        raise NotImplementedError
