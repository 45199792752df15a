"""One worker's part of a global batch as the script sees it, and the account of the samples whose gradients
were put in.

How the runtime uses the account (`batch.micro`), so that the update equals the one that a single process
would compute:

1. in the first gradient hook of a backward: `micro.contribute()`;
2. each gradient is multiplied by `micro.scale` (weight / samples of the global batch) as it is added to the
   buckets; with scale 0 (a worker without samples) zeros are put in, since 0 x NaN is NaN. Buckets may leave
   when `micro.is_last`;
3. the commit vote sums `micro.contributed_weight`; where the sum differs from `micro.global_samples` (the
   script gave another denominator, so the divisor is known only now) the reduced gradients are multiplied by
   `micro.correction(sum)`;
4. the commit vote also sums count and hash of `micro.contributed_ids` for the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from springtide.data.partition import Part, pieces, pieces_together
from springtide.data.salvage import Carried, Places, among, merged


class Micro:
    """Which micro-batch the body is at, and what has gone into the gradients so far. One per dealt batch."""

    def __init__(
        self,
        ids: torch.Tensor,
        global_samples: int,
        is_counted: bool = True,
        places: Places = (),
        carried: Carried | None = None,
    ) -> None:
        """Begin at the only micro-batch, which is the whole part.

        Args:
            ids: this worker's part, int64 [n]; none for a stand-in.
            global_samples: of all workers' parts.
            is_counted: another process of the pod computes on the same samples and counts them, if False.
            places: of the part in the global batch; none where nobody asks for them.
            carried: samples whose gradients are in already.
        """
        self._is_counted = is_counted
        self._places, self._carried = places, carried
        self.before_next: Callable[[], object] = _nothing
        """Called between two micro-batches, when the first one's gradients are all there."""
        self.global_samples = global_samples
        self.part_samples = ids.numel()
        self._ids = ids
        self._parts = [Part(0, self.part_samples)]
        self._index = 0
        self._finished = False
        self._weight: float | None = None
        self._contributed: dict[int, float] = {}

    @property
    def index(self) -> int:
        """Number of the current micro-batch, from 0."""
        return self._index

    @property
    def count(self) -> int:
        return len(self._parts)

    @property
    def is_last(self) -> bool:
        return self._index == len(self._parts) - 1

    @property
    def current_samples(self) -> int:
        return self._parts[self._index].size

    @property
    def current_weight(self) -> float:
        """Denominator of the current micro-batch's mean loss: its samples unless `weight(n)` was called.

        0 for a stand-in.
        """
        if self.current_samples == 0:
            return 0.0
        return float(self.current_samples) if self._weight is None else self._weight

    @property
    def scale(self) -> float:
        """Factor for the gradients of the current micro-batch."""
        return self.current_weight / self.global_samples

    def correction(self, total_weight: float) -> float:
        """Factor for the reduced gradients, from the sum of `contributed_weight` over all workers.

        Raise ValueError when the sum is not positive: then the step has no denominator at all.
        """
        if not (math.isfinite(total_weight) and total_weight > 0):
            raise ValueError(
                f"the weights of this step add up to {total_weight}: some worker has to call "
                "batch.weight(n) with a positive n"
            )
        return self.global_samples / total_weight

    def contribute(self) -> None:
        """Gradients of the current micro-batch go in now.

        Idempotent. Raise RuntimeError after the loop over `split` has ended.
        """
        if self._finished:
            raise RuntimeError(
                "backward() after the loop over batch.split() has ended: "
                "call it inside the loop, once for each micro-batch"
            )
        self._contributed.setdefault(self._index, self.current_weight)

    @property
    def contributed_ids(self) -> torch.Tensor:
        """Ids whose gradients went in, int64 of shape (n,); none where another process counts them."""
        if not self._is_counted:
            return self._ids[:0]
        before = [] if self._carried is None else [self._carried.ids]
        if not before and len(self._contributed) == len(self._parts):
            return self._ids
        parts = self._contributed_parts
        own = (self._ids[part.start : part.start + part.size] for part in parts)
        return torch.cat([self._ids[:0], *before, *own])

    @property
    def _contributed_parts(self) -> list[Part]:
        return [self._parts[index] for index in sorted(self._contributed)]

    @property
    def contributed_weight(self) -> float:
        """Sum of the weights that went in; 0 where another process counts them."""
        if not self._is_counted:
            return 0.0
        before = 0.0 if self._carried is None else self._carried.weight
        return math.fsum((before, *self._contributed.values()))

    @property
    def places(self) -> Places:
        """Places of the part in the global batch."""
        return self._places

    def to_carry(self) -> Carried:
        """Return the account of all that went in, for the next try at the step."""
        places = [
            place
            for part in self._contributed_parts
            for place in among(self._places, part.start, part.start + part.size)
        ]
        before = () if self._carried is None else self._carried.places
        return Carried(self.contributed_ids.clone(), merged([*before, *places]), self.contributed_weight)

    @property
    def next_is_last(self) -> bool:
        """Whether the micro-batch after the current one is the last."""
        return self._index == len(self._parts) - 2

    @property
    def remaining_samples(self) -> int:
        """Samples of this part that no backward has put in yet: a step that commits now would lose them."""
        return self.part_samples - sum(self._parts[index].size for index in self._contributed)

    def set_weight(self, index: int, n: float | torch.Tensor) -> None:
        """Weigh a micro-batch's gradients with `n` in place of its number of samples.

        Args:
            index: number of the micro-batch in this worker's part, from 0; the one that the body is at.
            n: the weight, finite and not negative (a number of tokens, say); a tensor of one element is read.

        Raises:
            ValueError: `n` is negative or not finite.
            RuntimeError: the body is at another micro-batch, or its `backward()` has run already.
        """
        weight = float(n)
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"batch.weight(n): n must be finite and not negative, got {weight}")
        if index != self._index or self._finished:
            raise RuntimeError(
                "batch.weight(n) belongs to the micro-batch that the body is at; call it on that one"
            )
        if index in self._contributed:
            raise RuntimeError("batch.weight(n) after backward() comes too late: call it before")
        self._weight = weight

    def begin_split(self, parts: list[Part]) -> None:
        if self._contributed:
            raise RuntimeError(
                "batch.split() after backward() in the same step: its samples are already in the gradients"
            )
        if self._weight is not None:
            raise RuntimeError("batch.weight(n) before batch.split(): call it on each micro-batch instead")
        self._parts, self._index, self._finished = parts, 0, False

    def go_to(self, index: int) -> None:
        if index:
            self.before_next()
        self._index, self._weight = index, None

    def end_split(self, parts: list[Part]) -> None:
        if self._parts is parts:
            self._finished = True

    def begin_backward_pass(self) -> None:
        """The gradients so far are in a sum that is complete; all samples go in once more, if any do."""
        self._parts, self._index, self._finished = [Part(0, self.part_samples)], 0, False
        self._weight, self._contributed = None, {}


class Batch:
    """The collated samples of this worker's part: indexing, unpacking, length and attributes are theirs.

    A tuple unpacks (`x, y = batch`), a dict is read by key (`batch["x"]`, `batch.items()`); `batch.data` is
    the collated object itself. Samples are read at first use. When `batches(..., micro_batch=)` was given,
    use `for micro in batch.split():`.
    """

    def __init__(
        self,
        micro: Micro,
        ids: torch.Tensor,
        fetch: Callable[[torch.Tensor], Any],
        *,
        standin_ids: torch.Tensor | None = None,
        micro_batch: int | None = None,
        min_part: int = 1,
        piece: int | None = None,
        together: Sequence[int] = (),
        empty_ids: torch.Tensor | None = None,
    ) -> None:
        """Make it for one part, or one piece of a part.

        Args:
            micro: account of the part.
            ids: int64 [n].
            fetch: reads samples.
            standin_ids: samples to compute on when there are none to count.
            micro_batch: most samples of a piece.
            min_part: fewest samples of a piece.
            piece: number of the piece; set by `split`.
            together: samples of the parts of the pod's processes, which are split into equally many pieces;
                empty: this one is split by itself.
            empty_ids: with `together`, samples to compute on in a piece that has none.
        """
        self.micro = micro
        self.ids = ids
        self._fetch = fetch
        self._standin_ids = standin_ids
        self._micro_batch = micro_batch
        self._min_part = min_part
        self._piece = piece
        self._together = together
        self._empty_ids = empty_ids
        self._loaded = False
        self._data: Any = None

    @property
    def samples(self) -> int:
        """Samples that count; 0 for a stand-in."""
        return self.ids.numel()

    @property
    def standin(self) -> bool:
        """True when this worker has no samples in this step: it computes on others', and adds zeros."""
        return self._standin_ids is not None

    @property
    def data(self) -> Any:
        """The collated samples.

        Raise RuntimeError for a whole batch that `micro_batch` forbids to compute at once.
        """
        if not self._loaded:
            if self._micro_batch is not None and self._piece is None:
                raise RuntimeError(
                    f"batches(..., micro_batch={self._micro_batch}) was given, so it is computed in pieces: "
                    "use `for micro in batch.split():` and the micro-batches' data"
                )
            self._data = self._fetch(self.ids if self._standin_ids is None else self._standin_ids)
            self._loaded = True
        return self._data

    def split(self, m: int = 1) -> Iterator[Batch]:
        """Yield the micro-batches, each a Batch.

        There are m of them, more where `micro_batch` bounds their size, fewer where the part is small.
        The loss of each is the mean over its samples; call backward() once for each, inside the loop.
        """
        if self._piece is not None:
            raise RuntimeError("batch.split(): this is a micro-batch already")
        if type(m) is not int or m < 1:
            raise ValueError(f"batch.split(m): m must be an integer >= 1, got {m!r}")
        return self._pieces(m)

    def _pieces(self, m: int) -> Iterator[Batch]:
        parts = self._parts(m)
        self.micro.begin_split(parts)
        for index, part in enumerate(parts):
            self.micro.go_to(index)
            ids = self.ids[part.start : part.start + part.size]
            standin_ids = self._standin_ids if part.size or self.standin else self._empty_ids
            yield Batch(self.micro, ids, self._fetch, standin_ids=standin_ids, piece=index)
        self.micro.end_split(parts)

    def _parts(self, m: int) -> list[Part]:
        if self._together:
            return pieces_together(self.samples, self._together, m, self._micro_batch, self._min_part)
        return [Part(0, 0)] if self.standin else pieces(self.samples, m, self._micro_batch, self._min_part)

    def weight(self, n: float | torch.Tensor) -> None:
        """Say, before backward(), that the loss is a mean over n items (such as tokens), not samples.

        The step's gradient is then the mean over the items of all workers. n may be 0: such a micro-batch
        adds nothing. Raise ValueError for a negative or not finite n, RuntimeError when it comes too late.
        """
        self.micro.set_weight(self._piece or 0, n)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __getattr__(self, name: str) -> Any:
        # Only for names that Batch lacks: a dict's items(), a named tuple's fields, a tensor's to().
        if name.startswith("_"):
            raise AttributeError(f"Batch has no attribute {name!r}")
        try:
            return getattr(self.data, name)
        except AttributeError:
            raise AttributeError(
                f"neither Batch nor its {type(self.data).__name__} of samples has an attribute {name!r}"
            ) from None

    def __repr__(self) -> str:
        kind = "stand-in" if self.standin else f"{self.samples} samples"
        where = "" if self._piece is None else f", micro-batch {self._piece + 1} of {self.micro.count}"
        return f"<Batch of {kind}{where}; global batch {self.micro.global_samples}>"


def _nothing() -> None:
    pass
