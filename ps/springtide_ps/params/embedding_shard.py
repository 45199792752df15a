"""A slice of an embedding table in a job: the rows whose ids fall to it.

A table is cut by a hash of the id into a number of slices that never changes, so that a slice is to servers
what a chunk is: placed, copied, filled and moved as a whole. Its values are a function of the steps that were
made alone: a lookup makes no row, it computes what the row's first value is. Where workers do not step
together, it counts the batches that are in its rows, as a chunk does; a batch without any of its
rows counts there as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch

from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.chunk import GROUPS_LIMIT, ChunkError, StepSpec, options_of
from springtide_ps.params.embedding import OPTIMIZERS, Table, TableError, TableSpec
from springtide_ps.params.frequencies import divided, ids_of, summed
from springtide_ps.params.idmap import Ids, mix
from springtide_ps.wire.keys import APPLIED_BATCHES_KEY

ID_WORDS: Final = 2
SLICES_LIMIT: Final = 4096
ROW_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")
}
"""Types in which gradients of rows may travel."""
_ID_BYTES: Final = 8
Others = Callable[[int], int]
"""How many bytes a server holds beside a slice that has so many."""
_WORDS: Final = {4: torch.int32, 2: torch.int16}
_SEED: Final = 2  # bits that neither a server's id map nor raw tables use


def slice_numbers(ids: Ids, slices: int) -> Ids:
    """Return the slice into which each id falls, int64 [len(ids)] in 0 to slices - 1.

    Args:
        ids: int64.
        slices: of the table.
    """
    return ((mix(ids, seed=_SEED) >> np.uint64(32)) % np.uint64(slices)).astype(np.int64)


def records(heads: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Return gradients of rows in the form in which they travel: a head, then the gradient.

    A head is an id, and of counted ones another int64 (see `frequencies`). Of gradients in 16 bits it is
    int16 [n, 4 + dim], which `widened` makes the other form of.

    Args:
        heads: int64 [n], or [n, 2] of counted ones.
        gradients: [n, dim] in 32 or 16 bits.

    Returns:
        int32 [n, 2 + dim], or [n, 4 + dim] of counted ones.
    """
    word = _WORDS[gradients.dtype.itemsize]
    width = heads.dim() * heads.itemsize // word.itemsize
    if not len(heads):
        return torch.empty(0, width + gradients.shape[1], dtype=word)
    words = heads.reshape(-1).view(word).view(-1, width)
    return torch.cat((words, gradients.contiguous().view(word)), 1)


def record_bytes(dim: int, dtype: torch.dtype, has_counts: bool = False) -> int:
    """Return the bytes of one record.

    Args:
        dim: of the table.
        dtype: of the gradient in it.
        has_counts: its head says how often the row was looked up.
    """
    return _ID_BYTES * (1 + has_counts) + dim * dtype.itemsize


def widened(payload: torch.Tensor, dim: int, dtype: torch.dtype, has_counts: bool = False) -> torch.Tensor:
    """Return records with float32 gradients, made of records with 16-bit ones.

    Args:
        payload: the records' memory, uint8.
        dim: of the table.
        dtype: of the gradients.
        has_counts: the heads say how often each row was looked up.

    Returns:
        Flat int32.
    """
    width = _ID_BYTES * (1 + has_counts) // 2
    parts = payload.view(torch.int16).view(-1, width + dim)
    heads = _heads(parts[:, :width], has_counts)
    gradients = parts[:, width:].contiguous().view(dtype)
    return records(heads, gradients.to(torch.float32)).view(-1)


def unpack(rows: torch.Tensor, dim: int, has_counts: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Take records apart.

    Args:
        rows: int32, flat or not.
        dim: of the table.
        has_counts: the heads say how often each row was looked up.

    Returns:
        (heads int64 [n], or [n, 2] of counted ones, gradients float32 [n, dim]).
    """
    width = ID_WORDS * (1 + has_counts)
    table = rows.view(-1, width + dim)
    return _heads(table[:, :width], has_counts), table[:, width:].contiguous().view(torch.float32)


def _heads(words: torch.Tensor, has_counts: bool) -> torch.Tensor:
    if not len(words):
        return torch.empty((0, 2) if has_counts else 0, dtype=torch.int64)
    heads = words.reshape(-1).view(torch.int64)
    return heads.view(-1, 2) if has_counts else heads


class Slice:
    """parameter: number of the table among the model's parameters. groups: of all optimizers, one after
    another. group: whose options its steps have. first: where the groups of the table's optimizer begin.
    applied_batches: which batches the rows hold, where workers do not step together.

    Raise ChunkError or TableError for what cannot be.
    """

    dtype = torch.int32

    def __init__(
        self,
        spec: TableSpec,
        parameter: int,
        group: int,
        groups: Sequence[Mapping[str, Any]],
        memory: int = 0,
        first: int = 0,
        others: Others = lambda own: 0,
    ) -> None:
        if not 0 <= first <= group < len(groups):
            raise ChunkError(f"a table of parameter group {group}, and there are {len(groups)} from {first}")
        self.first = first
        self.table = Table(spec, memory, lambda: others(self.table.nbytes))
        self.parameter, self.group, self.groups = parameter, group, groups
        self.applied_batches: AppliedBatches | None = None
        self._memory, self._others = memory, others

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    @property
    def has_counts(self) -> bool:
        """Whether its records have counts, by which their gradients are divided."""
        return self.table.spec.by_frequency

    @property
    def record_words(self) -> int:
        """Return the words of 4 bytes that a record with a float32 gradient has."""
        return ID_WORDS * (1 + self.has_counts) + self.table.spec.dim

    def record_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one record with a gradient of that type."""
        return record_bytes(self.table.spec.dim, dtype, self.has_counts)

    def check_gradient(self, nbytes: int, dtype: torch.dtype | None) -> None:
        """Refuse bytes that are no whole records with float32 gradients.

        Args:
            nbytes: of the records.
            dtype: of their words; None: the slice's.

        Raises:
            ChunkError: they are none.
        """
        width = 4 * self.record_words
        if nbytes % width or dtype not in (None, self.dtype):
            raise ChunkError(f"{nbytes} bytes are no gradients of rows, which have {width} bytes each")

    def check_records(self, nbytes: int, dtype: torch.dtype) -> None:
        """Refuse bytes that are no whole records with gradients of that type.

        Args:
            nbytes: of the records.
            dtype: of the gradients.

        Raises:
            ChunkError: they are none.
        """
        if dtype not in ROW_DTYPES.values():
            raise ChunkError(f"gradients of rows travel as one of {', '.join(ROW_DTYPES)}, not {dtype}")
        width = self.record_bytes(dtype)
        if nbytes % width:
            raise ChunkError(f"{nbytes} bytes are no gradients of rows, which have {width} bytes each")

    def records_in(self, payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return records as `apply` takes them.

        Args:
            payload: the memory of checked ones, uint8.
            dtype: of their gradients.

        Returns:
            Flat int32, which may be the same memory.
        """
        if dtype.itemsize < torch.float32.itemsize:
            return widened(payload, self.table.spec.dim, dtype, self.has_counts)
        return payload.view(self.dtype)

    def check(self, step_spec: StepSpec) -> None:
        """Raise ChunkError for a step of another optimizer."""
        if len(step_spec.groups) != len(self.groups):
            raise ChunkError(f"the step has {len(step_spec.groups)} parameter groups, not {len(self.groups)}")

    def add(
        self, total: torch.Tensor | None, gradient: torch.Tensor, spare: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum of records, those of an id that is in both as one.

        Args:
            total: flat records so far; None: there are none.
            gradient: records to add.
            spare: not used.

        Returns:
            Flat records; their memory is not the gradient's.
        """
        if total is None or not total.numel():
            return gradient.clone()
        if not gradient.numel():
            return total
        dim = self.table.spec.dim
        ids, rows = unpack(torch.cat((total, gradient.view(-1))), dim, self.has_counts)
        if self.has_counts:
            return records(*summed(ids, rows)).view(-1)
        unique, inverse = np.unique(ids.numpy(), return_inverse=True)
        sums = torch.zeros(len(unique), dim).index_add_(0, torch.from_numpy(inverse.reshape(-1)), rows)
        return records(torch.from_numpy(unique), sums).view(-1)

    def apply(self, total: torch.Tensor, step_spec: StepSpec, keep: bool = False) -> None:
        """Make one step of the sparse optimizer with the sums; none if no worker used the table.

        Args:
            total: flat records; used up unless `keep`.
            step_spec: how the step is made.
            keep: the sums are needed again.

        Raises:
            ChunkError: the step is of other parameter groups.
        """
        self.check(step_spec)
        if step_spec.skip:
            return
        self.groups = step_spec.groups
        if self.parameter in step_spec.unused:
            return
        ids, gradients = self._gradients(total.clone() if keep else total)
        options = self.groups[self.group]
        factor = -step_spec.scale if options.get("maximize") else step_spec.scale
        if step_spec.factors:
            factor *= step_spec.factors[self.group]
        if factor != 1.0:
            gradients.mul_(factor)
        known = OPTIMIZERS[self.table.spec.optimizer]
        given = {name: value for name, value in options_of(options).items() if name in known}
        self.table.push(ids.numpy(), gradients, given)

    def square_norm(self, total: torch.Tensor) -> float:
        """Sum of the squares of the sums."""
        return float(self._gradients(total)[1].to(torch.float64).square().sum())

    def _gradients(self, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, gradients) that the sums are."""
        return divided(*unpack(total, self.table.spec.dim, self.has_counts))

    def rows(self, ids: Ids) -> torch.Tensor:
        """float32 [len(ids), dim]; what is not there yet as it would be made."""
        return self.table.peek(ids)

    def ids_in(self, total: torch.Tensor) -> torch.Tensor:
        """Return the ids of the rows that the sums are of, int64 [n]."""
        return ids_of(unpack(total, self.table.spec.dim, self.has_counts)[0])

    def some(self, ids: Ids) -> Slice:
        """Return a slice that lets no row go, with those of these rows (each once) that it has, and their
        state.
        """
        made = Slice(
            self.table.spec,
            self.parameter,
            self.group,
            self.groups,
            self._memory,
            self.first,
            self._others,
        )
        made.table = self.table.some(ids)
        return made

    def dump(self) -> tuple[dict[str, Any], torch.Tensor]:
        """(JSON, uint8 [n]) from which `load` makes an equal slice; the memory is a copy."""
        return self.about(), self.memory(0, self.dumped_bytes)

    def memory(self, start: int, stop: int) -> torch.Tensor:
        """Return a copy of bytes of a dump's memory.

        Args:
            start: number of the first byte.
            stop: number of the byte after the last.

        Returns:
            uint8 [stop - start].
        """
        return self.table.memory(start, stop)

    def about(self) -> dict[str, Any]:
        """The JSON of a dump."""
        return {
            **({} if self.applied_batches is None else {APPLIED_BATCHES_KEY: self.applied_batches.to_json()}),
            "table": spec_to_json(self.table.spec),
            "parameter": self.parameter,
            "group": self.group,
            "groups": len(self.groups),
            "options": dict(self.groups[self.group]),
            "rows": len(self.table),
            **({"first": self.first} if self.first else {}),
            "pushes": self.table.pushes,
            "evicted": self.table.evicted,
        }

    @property
    def dumped_bytes(self) -> int:
        """Return the bytes of a dump's memory."""
        return self.table.held_bytes

    def again(self, meta: Mapping[str, Any], payload: torch.Tensor) -> Slice:
        """Return this slice as it was when it was dumped.

        Args:
            meta: the dump's JSON.
            payload: the dump's memory, uint8.

        Raises:
            ChunkError: it is no dump of a slice.
            TableError: there is no room.
        """
        return Slice.load(meta, payload, self._memory, self._others)

    @classmethod
    def load(
        cls, meta: Mapping[str, Any], payload: torch.Tensor, memory: int = 0, others: Others = lambda own: 0
    ) -> Slice:
        """Return the slice that was dumped.

        Args:
            meta: the dump's JSON.
            payload: the dump's memory, uint8.
            memory: bytes that everything on the server may take; 0: there is no limit.
            others: how many bytes everything else takes.

        Raises:
            ChunkError: it is no dump of a slice.
            TableError: there is no room.
        """
        made = cls.begin(meta, payload.numel(), memory, others)
        made.write(0, payload)
        made.finish()
        return made

    @classmethod
    def begin(
        cls, meta: Mapping[str, Any], nbytes: int, memory: int = 0, others: Others = lambda own: 0
    ) -> Slice:
        """Return a slice whose dump is to be written.

        Args:
            meta: the dump's JSON.
            nbytes: of the dump's memory.
            memory: bytes that everything on the server may take; 0: there is no limit.
            others: how many bytes everything else takes.

        Raises:
            ChunkError: it is no dump of a slice; no memory was taken.
            TableError: there is no room.
        """
        try:
            about = spec_from_json(meta["table"]), int(meta["parameter"]), int(meta["group"])
            groups = _groups_in(meta, about[-1])
            made = cls(*about, groups, memory, int(meta.get("first", 0)), others)
            count, dim = int(meta.get("rows", 0)), made.table.spec.dim
            if count < 0 or nbytes != count * (16 + 4 * dim * made.table.width):
                raise ChunkError(f"{nbytes} bytes are not {count} rows of dimension {dim}")
            if APPLIED_BATCHES_KEY in meta:
                made.applied_batches = AppliedBatches.from_json(meta[APPLIED_BATCHES_KEY])
            made.table.begin(count, int(meta.get("pushes", 0)))
            made.table.evicted = int(meta.get("evicted", 0))
        except (ChunkError, TableError):
            raise
        except (ArithmeticError, KeyError, TypeError, ValueError, RuntimeError, MemoryError) as error:
            raise ChunkError(f"this is no slice of a table: {error!r}") from None
        return made

    def write(self, at: int, memory: torch.Tensor) -> None:
        """Write bytes of the dump into a slice that was begun; each byte once.

        Args:
            at: number of the first byte.
            memory: uint8.
        """
        self.table.write(at, memory)

    def finish(self) -> None:
        """The dump is written: from now on this is the slice."""
        self.table.finish()


def _groups_in(meta: Mapping[str, Any], number: int) -> list[Mapping[str, Any]]:
    """Return the options of all parameter groups, which are said of group `number` alone."""
    count = int(meta["groups"])
    if not 0 <= number < count <= GROUPS_LIMIT:
        raise ChunkError(f"a table of parameter group {number}, and there are {count} of {GROUPS_LIMIT}")
    groups: list[Mapping[str, Any]] = [{}] * count
    groups[number] = dict(meta["options"])
    return groups


def spec_to_json(spec: TableSpec) -> dict[str, Any]:
    return {
        **asdict(spec),
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in spec.options.items()},
    }


def spec_from_json(value: Mapping[str, Any]) -> TableSpec:
    """Raise TableError, TypeError."""
    if not isinstance(value, Mapping) or not isinstance(value.get("options", {}), Mapping):
        raise TableError("a table is described by an object, and so are its options")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in value.get("options", {}).items()}
    return TableSpec(**{**value, "options": options})
