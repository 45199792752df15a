"""`Embedding` and `EmbeddingBag` over tables of rows by id; used as torch's modules of that name."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from springtide.embedding.handle import Handle
from springtide.embedding.local import LocalRows, as_ids
from springtide.embedding.unmanaged import Collected
from springtide.errors import UsageError
from springtide_ps.params.embedding import TableError, TableSpec
from springtide_ps.params.embedding_shard import SLICES_LIMIT

_EXPORT_ROWS = 65_536


class _TableModule(torch.nn.Module):
    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        *,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        seed: int | None,
        init: str,
        scale: float,
        max_rows: int,
        max_age: int,
        slices: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        if num_embeddings is not None and num_embeddings < 1:
            raise UsageError(f"num_embeddings is {num_embeddings}, expected 1 or more, or None for any int64")
        if padding_idx is not None and num_embeddings is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError(f"padding_idx is {padding_idx}, and there are {num_embeddings} embeddings")
            padding_idx %= num_embeddings
        if not 1 <= slices <= SLICES_LIMIT:
            raise UsageError(f"slices is {slices}, expected 1 to {SLICES_LIMIT}")
        if seed is None:
            # As torch's own: another seed of torch's makes other values.
            seed = int(torch.randint(2**62, ()))
        try:
            spec = TableSpec(
                embedding_dim,
                init=init,
                scale=scale,
                seed=seed,
                max_rows=max_rows,
                max_age=max_age,
                max_norm=max_norm,
                norm_type=norm_type,
                by_frequency=bool(scale_grad_by_freq),
            )
        except TableError as error:
            raise UsageError(f"{type(self).__name__}: {error}") from None
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.weight = torch.nn.Parameter(torch.empty(0, embedding_dim, device=device))
        self.table = Handle(self.weight, LocalRows(spec, slices), num_embeddings or 0)
        self._watch()

    def _watch(self) -> None:
        self.table.collected = Collected(self.table)
        self.weight.register_post_accumulate_grad_hook(self.table.collected.collect)  # type: ignore[no-untyped-call]

    def _follow(self) -> None:
        """Another parameter may stand for the rows now: `load_state_dict(assign=True)`, conversions."""
        if self.weight is not self.table.weight:
            self.table.stand_for(self.weight)
            self._watch()

    def _apply(self, *args: Any, **named: Any) -> Any:
        super()._apply(*args, **named)  # type: ignore[no-untyped-call]
        self._follow()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._follow()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy that is averaged or trained parameter by parameter would leave the rows as they are.
        raise UsageError(
            f"a model with springtide.{type(self).__name__} is neither copied nor pickled whole "
            "(copy.deepcopy, torch.save(model), AveragedModel): state_dict() has the rows; load it into "
            "another model of the same kind. An average of the weights can be one of the dense layers only"
        )

    def _gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """(rows of the ids, each once, where each id's row is, where the padding's row is)."""
        if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
            raise UsageError(f"{type(self).__name__}: ids are integers, got {ids.dtype}")
        unique, inverse = torch.unique(as_ids(ids), return_inverse=True)
        if self.num_embeddings is not None and len(unique):
            low, high = int(unique[0]), int(unique[-1])
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"{type(self).__name__}: id {low if low < 0 else high} is out of range: there are "
                    f"{self.num_embeddings} embeddings; give num_embeddings=None to take any int64"
                )
        padding = None
        if self.padding_idx is not None and bool((found := unique == self.padding_idx).any()):
            padding = int(found.nonzero()[0])
        return self.table.lookup(unique, inverse), inverse.to(self.weight.device).view(ids.shape), padding

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n] in order, rows float32 [n, dim]): all rows that were trained and not let go.

        In a job they are those of the last committed step, or of now where workers do not step together; call
        it in the loop and not in a step.
        """
        return self.table.held()

    def to_dense(self) -> torch.Tensor:
        """float32 [num_embeddings, dim]: the weight that torch's module has; untrained rows are as made.

        With max_norm a row is bounded here from its next step on, not from its next lookup. Raise
        UsageError without num_embeddings. In a job: as `export`.
        """
        if self.num_embeddings is None:
            raise UsageError("to_dense() needs num_embeddings: use export() for a table of any int64")
        parts = []
        for start in range(0, self.num_embeddings, _EXPORT_ROWS):
            ids = torch.arange(start, min(start + _EXPORT_ROWS, self.num_embeddings))
            parts.append(self.table.rows(ids))
        dense = torch.cat(parts)
        if self.padding_idx is not None:
            dense[self.padding_idx] = 0
        return dense

    def get_extra_state(self) -> dict[str, Any]:
        ids, rows = self.export()
        spec = self.table.local.spec
        return {"ids": ids, "rows": rows, "seed": spec.seed, "init": spec.init, "scale": spec.scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if self.table.read is not None:
            raise UsageError(
                "load_state_dict() of a model with tables comes before springtide.distribute(): afterwards "
                "the rows lie on the parameter servers"
            )
        ids, rows, count = state["ids"], state["rows"], self.num_embeddings
        if count is not None and len(ids):
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= count:
                raise UsageError(
                    f"the state has rows of ids {low} to {high}, and there are {count} embeddings"
                )
        self.table.load(ids, rows, state["seed"], state["init"], state["scale"])

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        bound = "" if (most := self.table.local.spec.max_norm) is None else f", max_norm={most}"
        counted = ", scale_grad_by_freq=True" if self.table.has_counts else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{bound}{counted}"


class Embedding(_TableModule):
    """`torch.nn.Embedding` whose rows lie on parameter servers in a job, and in this process without one.

    num_embeddings: ids are 0 to num_embeddings - 1; None: any int64 is an id. A row is made when it is first
    used, from (seed, id) alone: by `init` "normal" (mean 0, standard deviation `scale`), "uniform" (-scale to
    scale) or "zeros". seed: None takes one from torch's generator. max_rows: beyond it the rows that were
    trained longest ago go; max_age: rows that were not trained in so many steps go; 0: none. A row that went
    begins anew. slices: into how many parts the table is cut to be spread; at least as many as servers.
    sparse changes nothing. max_norm, norm_type: rows that are looked up have at most this norm, as torch's.
    scale_grad_by_freq: a row's gradient is divided by how often one call of the module looks it up, in the
    whole global batch. Raise UsageError for what cannot be.

    The optimizer is the script's: SGD, Adagrad, Adam or AdamW without momentum and weight decay; it moves
    only rows that were used, as torch's do with sparse gradients.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        device: torch.device | str | None = None,
        seed: int | None = None,
        init: str = "normal",
        scale: float = 1.0,
        max_rows: int = 0,
        max_age: int = 0,
        slices: int = 8,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            seed=seed,
            init=init,
            scale=scale,
            max_rows=max_rows,
            max_age=max_age,
            slices=slices,
            device=device,
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """float [*ids.shape, dim]. Raise IndexError for an id out of range."""
        rows, inverse, padding = self._gather(ids)
        if padding is not None:
            # torch leaves the padding's gradient out, and its row is zero from the beginning.
            rows = rows.index_fill(0, torch.tensor([padding], device=rows.device), 0.0)
        return F.embedding(inverse, rows)


class EmbeddingBag(_TableModule):
    """`torch.nn.EmbeddingBag` as `Embedding` is: mode sum, mean or max, offsets, per_sample_weights."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        seed: int | None = None,
        init: str = "normal",
        scale: float = 1.0,
        max_rows: int = 0,
        max_age: int = 0,
        slices: int = 8,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise UsageError(f"EmbeddingBag: mode is {mode!r}, expected sum, mean or max")
        if mode == "max" and scale_grad_by_freq:
            raise UsageError("EmbeddingBag: mode max does not scale gradients by frequency, nor does torch's")
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            seed=seed,
            init=init,
            scale=scale,
            max_rows=max_rows,
            max_age=max_age,
            slices=slices,
            device=device,
        )
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Reduce each bag of rows to one row.

        Args:
            ids: int64 or int32: [bags, n], or [n] with `offsets`.
            offsets: int64 or int32 [bags]: where each bag begins in `ids`; None for two-dimensional ids.
            per_sample_weights: float, of the shape of `ids`, for mode "sum"; None: all 1.

        Returns:
            float [bags, dim].

        Raises:
            IndexError: an id is out of range.
        """
        rows, inverse, padding = self._gather(ids)
        if not len(rows):
            rows = rows.new_zeros(1, self.embedding_dim)  # torch looks at a row even for empty bags
        return F.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"
