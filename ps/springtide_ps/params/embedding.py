"""Embedding tables of one server: rows by id, made on first touch, with sparse optimizers.

Updates are those of torch with sparse gradients: `SGD` without momentum, `Adagrad`, and `SparseAdam` (moments
move only where a row was touched; its clock counts the pushes to the table).

Threads and locks: any thread may call a table. `_lock` guards its map of ids, rows and optimizer state, and
is held by each method that reads or changes rows, so that a lookup sees no half of a push; the rows it
returns are copies. Sizes are read without it. `others` is called in it, and must not wait for this table.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from springtide_ps.params.idmap import IdMap, Ids
from springtide_ps.params.row_init import KINDS, first_rows
from springtide_ps.params.row_norms import bounded

OPTIMIZERS: Final[dict[str, dict[str, Any]]] = {
    "sgd": {"lr": 0.01},
    "adagrad": {"lr": 0.01, "eps": 1e-10, "initial_accumulator_value": 0.0, "lr_decay": 0.0},
    "adam": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8},
}
_STATES: Final = {"sgd": 0, "adagrad": 1, "adam": 2}
DIM_LIMIT: Final = 65_536


class TableError(ValueError):
    """A table that cannot be, or a request that it cannot answer."""


@dataclass(frozen=True)
class TableSpec:
    """Say how a table is made and trained: the same on every server and worker.

    init, scale, seed: see `row_init.first_rows`. max_rows: of one server, 0 is no limit; beyond it the rows
    that were touched longest ago go. max_age: rows that were not touched in so many pushes go; 0 keeps all.
    max_norm, norm_type: a row is bounded before each of its steps, see `row_norms.bounded`; None: none is.
    by_frequency: in a job, gradients come with counts by which they are divided (`frequencies`).
    """

    dim: int
    optimizer: str = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    init: str = "normal"
    scale: float = 1.0
    seed: int = 0
    max_rows: int = 0
    max_age: int = 0
    max_norm: float | None = None
    norm_type: float = 2.0
    by_frequency: bool = False

    def __post_init__(self) -> None:
        def whole(value: object, least: int, most: int) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

        if not whole(self.dim, 1, DIM_LIMIT):
            raise TableError(f"dim is {self.dim!r}, expected 1 to {DIM_LIMIT}")
        if not isinstance(self.optimizer, str) or self.optimizer not in OPTIMIZERS:
            raise TableError(
                f"tables have no optimizer {self.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
            )
        if unknown := sorted(set(self.options) - set(OPTIMIZERS[self.optimizer])):
            known = ", ".join(OPTIMIZERS[self.optimizer])
            raise TableError(f"{self.optimizer} has no option {', '.join(unknown)}: its options are {known}")
        for name, value in self.options.items():
            values = (
                value if name == "betas" and isinstance(value, (list, tuple)) and len(value) == 2 else [value]
            )
            if not all(_is_number(v) and 0 <= v < math.inf for v in values):
                raise TableError(
                    f"{self.optimizer}: {name} is {value!r}, expected a number that is not negative"
                )
        if not isinstance(self.init, str) or self.init not in KINDS:
            raise TableError(f"there is no initialisation {self.init!r}: choose one of {', '.join(KINDS)}")
        if not _is_number(self.scale) or abs(self.scale) == math.inf:
            raise TableError(f"scale is {self.scale!r}, expected a finite number")
        if self.max_norm is not None and not (_is_number(self.max_norm) and 0 <= self.max_norm < math.inf):
            raise TableError(f"max_norm is {self.max_norm!r}, expected a finite number that is not negative")
        if not _is_number(self.norm_type):
            raise TableError(f"norm_type is {self.norm_type!r}, expected the order of a norm, as 2.0")
        if not isinstance(self.by_frequency, bool):
            raise TableError(f"by_frequency is {self.by_frequency!r}, expected true or false")
        for name in ("seed", "max_rows", "max_age"):
            if not whole(getattr(self, name), 0, 2**62):
                raise TableError(f"{name} is {getattr(self, name)!r}, expected 0 or more")

    @property
    def settings(self) -> dict[str, Any]:
        return {**OPTIMIZERS[self.optimizer], **self.options}


class Table:
    """The rows of one table that one server holds. float32. Methods may be called from any thread."""

    def __init__(self, spec: TableSpec, memory_limit: int = 0, others: Callable[[], int] = lambda: 0) -> None:
        """Make an empty one.

        Args:
            memory_limit: bytes that it and everything else on the server may take; 0: there is no limit.
            others: how many everything else takes.
        """
        self.spec = spec
        self.pushes = 0
        self.evicted = 0
        self._lock = threading.Lock()
        self._ids = IdMap()
        self._memory_limit, self._others = memory_limit, others
        # The rows, then the optimizer's state, row by row.
        width = 1 + _STATES[spec.optimizer]
        self._data = [torch.empty(0, spec.dim) for _ in range(width)]
        self._names = np.empty(0, np.int64)
        self._touched = np.empty(0, np.int64)

    def __len__(self) -> int:
        return self._ids.count

    @property
    def nbytes(self) -> int:
        """Return the bytes of rows, optimizer state and names, as they are allocated."""
        return sum(part.nbytes for part in self._data) + self._names.nbytes + self._touched.nbytes

    def lookup(self, ids: Ids) -> torch.Tensor:
        """float32 [len(ids), dim]; rows that are not there yet are made. Raises TableError without room."""
        with self._lock:
            rows = self._rows_of(ids)
            self._touched[rows] = self.pushes
            return self._data[0].index_select(0, torch.from_numpy(rows))

    def peek(self, ids: Ids) -> torch.Tensor:
        """Return the rows of these ids, float32 [len(ids), dim]; none is made or touched for it."""
        with self._lock:
            rows = self._ids.find(ids)
            missing = rows < 0
            if not missing.any():
                return self._data[0].index_select(0, torch.from_numpy(rows))
            found = torch.empty(len(ids), self.spec.dim)
            there = torch.from_numpy(~missing)
            found[there] = self._data[0].index_select(0, torch.from_numpy(rows[~missing]))
        spec = self.spec
        found[~there] = first_rows(spec.init, spec.scale, spec.seed, ids[missing], spec.dim)
        return found

    def has(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these are there, [len(ids)]."""
        with self._lock:
            return self._ids.find(ids) >= 0

    def some(self, ids: Ids) -> Table:
        """Return a table that lets no row go, with copies of those of these rows (each once) that it has."""
        made = Table(replace(self.spec, max_rows=0, max_age=0))
        with self._lock:
            rows = self._ids.find(ids)
            ids, rows = ids[rows >= 0], rows[rows >= 0]
            touched = torch.from_numpy(self._touched[rows])
            data = [part.index_select(0, torch.from_numpy(rows)) for part in self._data]
            made.restore(torch.from_numpy(ids), touched, data, self.pushes)
        return made

    def push(self, ids: Ids, gradients: torch.Tensor, options: Mapping[str, Any] | None = None) -> None:
        """Make one step of the optimizer with gradients of rows; those of a repeated id are summed.

        Args:
            ids: int64 [n].
            gradients: float32 [n, dim].
            options: of this step, before the table's own; None: the table's alone.

        Raises:
            TableError: there is no room.
        """
        with self._lock:
            self.pushes += 1
            if len(ids):
                unique, inverse = np.unique(ids, return_inverse=True)
                if len(unique) != len(ids):
                    summed = torch.zeros(len(unique), self.spec.dim)
                    gradients = summed.index_add_(0, torch.from_numpy(inverse.reshape(-1)), gradients)
                    ids = unique
                rows = self._rows_of(ids)
                self._touched[rows] = self.pushes
                self._bound(torch.from_numpy(rows))
                self._step(torch.from_numpy(rows), gradients, {**self.spec.settings, **(options or {})})
            self._evict()

    def page(self, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows by their place in the table.

        Args:
            start: number of the first row.
            count: rows at most.

        Returns:
            (ids int64 [n], rows float32 [n, dim]).
        """
        with self._lock:
            stop = max(start, min(start + count, len(self)))
            return torch.from_numpy(self._names[start:stop].copy()), self._data[0][start:stop].clone()

    @property
    def _row_bytes(self) -> int:
        return 4 * self.spec.dim * len(self._data) + 16

    @property
    def width(self) -> int:
        """How many numbers are held for each element of a row: its value and the optimizer's state."""
        return len(self._data)

    def held(self) -> tuple[torch.Tensor, ...]:
        """(ids int64 [n], when each was touched int64 [n], values and state float32 [n, dim]), copies."""
        with self._lock:
            count = len(self)
            names = (torch.from_numpy(names[:count].copy()) for names in (self._names, self._touched))
            return (*names, *(part[:count].clone() for part in self._data))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of what `held` gives."""
        return len(self) * self._row_bytes

    def memory(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of bytes of what `held` gives, one tensor after another.

        Args:
            start: number of the first byte.
            stop: number of the byte after the last.

        Returns:
            uint8 [stop - start].
        """
        with self._lock:
            made, end = torch.empty(stop - start, dtype=torch.uint8), 0
            for part in _between(self._held_memory(len(self)), start, stop):
                made[end : end + len(part)] = part
                end += len(part)
        return made

    def begin(self, count: int, pushes: int) -> None:
        """Make room in an empty table for rows that `write` brings.

        Args:
            count: how many rows.
            pushes: to the table so far.

        Raises:
            TableError: there is no room.
        """
        with self._lock:
            self.pushes = pushes
            if count:
                self._reserve(count, count)

    def write(self, at: int, memory: torch.Tensor) -> None:
        """Write bytes of what `memory` gave into a table that was begun.

        Args:
            at: number of the first byte.
            memory: uint8.
        """
        with self._lock:
            end = 0
            for part in _between(self._held_memory(len(self._names)), at, at + len(memory)):
                part.copy_(memory[end : end + len(part)])
                end += len(part)

    def finish(self) -> None:
        """All bytes are written: the rows are there."""
        with self._lock:
            self._ids.add(self._names)

    def restore(
        self, ids: torch.Tensor, touched: torch.Tensor, data: torch.Tensor | list[torch.Tensor], pushes: int
    ) -> None:
        """Hold what `held` gave, in an empty table.

        Args:
            ids: int64 [n].
            touched: int64 [n], the push that touched each row last.
            data: [width, n * dim] float32: the rows, then the optimizer's state.
            pushes: to the table so far.

        Raises:
            TableError: there is no room.
        """
        with self._lock:
            count = len(ids)
            self.pushes = pushes
            if not count:
                return
            self._reserve(count, count)
            self._ids.add(ids.numpy())
            self._names[:count], self._touched[:count] = ids.numpy(), touched.numpy()
            for part, values in zip(self._data, data, strict=True):
                part[:count] = values.view(count, self.spec.dim)

    # ---- with the lock held

    def _held_memory(self, count: int) -> list[torch.Tensor]:
        """The memory itself (uint8) of what `held` gives, of so many rows."""
        if not count:
            return []
        names = [torch.from_numpy(names[:count]) for names in (self._names, self._touched)]
        return [
            part.reshape(-1).view(torch.uint8) for part in (*names, *(data[:count] for data in self._data))
        ]

    def _rows_of(self, ids: Ids) -> Ids:
        rows = self._ids.find(ids)
        missing = rows < 0
        if missing.any():
            self._make(np.unique(ids[missing]))
            rows[missing] = self._ids.find(ids[missing])
        return rows

    def _make(self, ids: Ids) -> None:
        spec, start, stop = self.spec, len(self), len(self) + len(ids)
        if stop > len(self._names):
            self._reserve(max(stop, 2 * len(self._names), 1024), stop)
        self._ids.add(ids)
        self._names[start:stop] = ids
        self._touched[start:stop] = self.pushes
        self._data[0][start:stop] = first_rows(spec.init, spec.scale, spec.seed, ids, spec.dim)
        state = spec.settings.get("initial_accumulator_value", 0.0)
        for part in self._data[1:]:
            part[start:stop] = state

    def _reserve(self, rows: int, needed: int) -> None:
        each = self._row_bytes
        others = self._others() if self._memory_limit else 0
        if self._memory_limit and others + rows * each > self._memory_limit:
            rows = needed
        if self._memory_limit and others + rows * each > self._memory_limit:
            beside = f" beside {others} of others" if others else ""
            raise TableError(
                f"no room for {needed} rows of {each} bytes{beside}: {self._memory_limit} bytes are this "
                "server's limit; set max_rows, use more servers, or give them more memory"
            )
        count = len(self)
        for index, part in enumerate(self._data):
            grown = torch.empty(rows, self.spec.dim)
            grown[:count] = part[:count]
            self._data[index] = grown
        self._names, self._touched = (
            np.concatenate((old[:count], np.zeros(rows - count, np.int64)))
            for old in (self._names, self._touched)
        )

    def _bound(self, rows: torch.Tensor) -> None:
        if self.spec.max_norm is None:
            return
        values = self._data[0].index_select(0, rows)
        within = bounded(values, self.spec.max_norm, self.spec.norm_type)
        if within is not values:
            self._data[0].index_copy_(0, rows, within)

    def _step(self, rows: torch.Tensor, gradients: torch.Tensor, options: Mapping[str, Any]) -> None:
        values, lr = self._data[0], options["lr"]
        if self.spec.optimizer == "sgd":
            values.index_add_(0, rows, gradients, alpha=-lr)
        elif self.spec.optimizer == "adagrad":
            total = self._data[1].index_select(0, rows).addcmul_(gradients, gradients)
            self._data[1].index_copy_(0, rows, total)
            lr /= 1 + (self.pushes - 1) * options["lr_decay"]
            values.index_add_(0, rows, gradients.div(total.sqrt_().add_(options["eps"])), alpha=-lr)
        else:
            beta1, beta2 = options["betas"]
            first = self._data[1].index_select(0, rows).lerp_(gradients, 1 - beta1)
            second = self._data[2].index_select(0, rows)
            second.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
            self._data[1].index_copy_(0, rows, first)
            self._data[2].index_copy_(0, rows, second)
            scale = lr * math.sqrt(1 - beta2**self.pushes) / (1 - beta1**self.pushes)
            values.index_add_(0, rows, first.div_(second.sqrt_().add_(options["eps"])), alpha=-scale)

    def _evict(self) -> None:
        spec, count = self.spec, len(self)
        keep = np.ones(count, bool)
        if spec.max_age and self.pushes % max(1, spec.max_age // 8) == 0:
            keep = self._touched[:count] > self.pushes - spec.max_age
        if spec.max_rows and count > spec.max_rows:
            # Some more go than must, so that this does not happen at every push.
            left = max(1, spec.max_rows - spec.max_rows // 8)
            oldest = np.argsort(self._touched[:count], kind="stable")[: count - left]
            keep[oldest] = False
        if keep.all():
            return
        kept = np.flatnonzero(keep)
        self.evicted += count - len(kept)
        for part in self._data:
            part[: len(kept)] = part[torch.from_numpy(kept)]
        for names in (self._names, self._touched):
            names[: len(kept)] = names[kept]
        self._ids.rebuild(self._names[: len(kept)].copy())


def _between(parts: Iterable[torch.Tensor], start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the memory between two elements of parts that are thought of as one after another."""
    end = 0
    for part in parts:
        begin, end = end, end + len(part)
        if max(start, begin) < min(stop, end):
            yield part[max(start, begin) - begin : min(stop, end) - begin]


def _is_number(value: object) -> bool:
    """Whether it is one that a float can be, infinity included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # an integer beyond every float
        return False
