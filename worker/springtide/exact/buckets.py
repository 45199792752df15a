"""Gradients on their way into an exact sum: like `exchange.buckets`, with integers on the wire.

Each part's gradient is rounded into an int32 sum as backward makes it. Buckets leave during the backward of
this worker's last part; the same number of bytes travels as with float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from springtide.errors import UsageError
from springtide.exact import exponents as scale
from springtide.exact.rounding import BLOCK, Rounder, restore
from springtide.exchange.buckets import Buckets
from springtide.exchange.groups import Work
from springtide.exchange.layout import Layout

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExactBuckets(Buckets):
    """The integer sums of one model, and its gradients once they are restored.

    A step: `begin`, `put`..., then for each further part of this worker `begin_part`, `put`...; at the last
    one `flush` and `wait`. A part that is not the last one ends with `end_part`.
    """

    def __init__(self, layout: Layout, parts: int) -> None:
        """layout: slots aligned to BLOCK elements. parts: most parts that are added up in a step."""
        for field in layout.fields:
            if field.dtype not in _DTYPES:
                raise UsageError(
                    f"exact mode sums float32, bfloat16 and float16 gradients; {field.name} is "
                    f"{field.dtype}: convert the model, or set strategy.allReduce.exact to false"
                )
        self._parts = parts
        starts = [sum(layout.sizes[:bucket]) // BLOCK for bucket in range(len(layout.sizes) + 1)]
        self._bucket_blocks = [slice(a, b) for a, b in itertools.pairwise(starts)]
        self._blocks = [
            slice(first := starts[slot.bucket] + slot.offset // BLOCK, first - (-field.numel // BLOCK))
            for field, slot in zip(layout.fields, layout.slots, strict=True)
        ]
        self._owners = torch.zeros(starts[-1], dtype=torch.int64)
        for index, blocks in enumerate(self._blocks):
            self._owners[blocks] = index
        self.exponents = scale.Exponents(starts[-1])
        self._rounder = Rounder(scale.part_bits(parts))
        self._totals: list[torch.Tensor] = []
        super().__init__(layout)

    def allocate(self) -> None:
        super().allocate()
        self._totals = [torch.zeros(size, dtype=torch.int32) for size in self.layout.sizes]
        self._sums = [
            self._totals[slot.bucket].narrow(0, slot.offset, field.numel)
            for field, slot in zip(self.layout.fields, self.layout.slots, strict=True)
        ]

    def begin(
        self,
        start_sum: Callable[[torch.Tensor], Work],
        last: bool = True,
        exponents: torch.Tensor | None = None,
    ) -> None:
        """Start a step with its first part. last: it is the only one of this worker. exponents: int32 by
        block, if not the committed ones."""
        super().begin(start_sum)
        self._exponents = self.exponents.values if exponents is None else exponents
        self._factors = scale.factors(self._exponents, self._parts)
        self._units = scale.units(self._exponents, self._parts)
        self._largest = torch.zeros(self._units.shape)
        self._ever = [False] * len(self._names)
        self._fresh = [True] * len(self._names)
        self._staged = [False] * len(self._names)
        self._last = last
        self.needed = torch.full(self._exponents.shape, scale.LOWEST, dtype=torch.int32)
        """By block: the exponent that the largest value needs which did not fit; LOWEST where all did."""

    def begin_part(self, last: bool) -> None:
        """Start the next part of the same step. last: of this worker."""
        self._last = last
        self._round = [-1] * len(self._names)
        self._missing = [len(indices) for indices in self.layout.members]
        self._versions = [flat._version for flat in self._flats]

    @property
    def used(self) -> list[bool]:
        return [ever or number >= 0 for ever, number in zip(self._ever, self._round, strict=True)]

    @property
    def exceeded(self) -> bool:
        """Whether a value of this worker's parts did not fit."""
        return bool((self.needed > scale.LOWEST).any())

    @property
    def bytes(self) -> int:
        return sum(total.numel() * total.element_size() for total in self._totals)

    def put(self, index: int, gradient: torch.Tensor, weight: float, micro: int, last: bool) -> torch.Tensor:
        """As `Buckets.put`; the view that is returned holds the gradient only after `wait`."""
        self._check_new(index, gradient, micro)
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        view = self.views[index]
        first = self._round[index] < 0
        self._round[index] = micro
        self._ever[index] = True
        if weight != 0.0 and first and last:
            self._round_in(index, gradient, weight)
        elif weight != 0.0:
            # Micro-batches of one part are added up as floats: their order is the part's own.
            if self._staged[index]:
                view.add_(gradient, alpha=weight)
            else:
                torch.mul(gradient, weight, out=view)
            self._versions[bucket] = self._flats[bucket]._version
            self._staged[index] = True
        if last:
            self._unstage(index)
            self._missing[bucket] -= 1
            if self._last:
                self._send_complete()
        return view

    def end_part(self) -> None:
        """The part is over and is not the last one."""
        for index in range(len(self._names)):
            self._unstage(index)

    def flush(self) -> None:
        self.end_part()
        for index, fresh in enumerate(self._fresh):
            if fresh:
                self._sums[index].zero_()
                self._fresh[index] = False
        self._missing = [0] * len(self._missing)
        self._send_complete()

    def wait(self) -> None:
        for bucket, work in enumerate(self._works):
            work.wait()
            self._check(bucket)
            blocks = self._bucket_blocks[bucket]
            restore(self._totals[bucket], self._units[blocks], self._flats[bucket], self._largest[blocks])
            self._versions[bucket] = self._flats[bucket]._version

    def raised(self, needed: torch.Tensor) -> torch.Tensor:
        """Exponents for doing the step again. needed: the maximum of `needed` over the members."""
        return scale.raised(self._exponents, needed)

    def commit(self) -> None:
        """The step is about to be committed, and with it the exponents that follow from its sum."""
        self.exponents.values = scale.after_commit(
            self.exponents.values, self._exponents, self._largest, self._owners, len(self._names)
        )

    def _round_in(self, index: int, gradient: torch.Tensor, weight: float) -> None:
        blocks = self._blocks[index]
        misfits = self._rounder.add(
            gradient, weight, self._factors[blocks], self._sums[index], self._fresh[index]
        )
        self._fresh[index] = False
        if misfits is not None:
            needed = scale.exponent_of(misfits)
            # A block that is known not to be finite was left out on purpose.
            needed[self._exponents[blocks] == scale.NOT_FINITE] = scale.LOWEST
            self.needed[blocks] = torch.maximum(self.needed[blocks], needed)

    def _unstage(self, index: int) -> None:
        if self._staged[index]:
            self._staged[index] = False
            self._round_in(index, self.views[index], 1.0)

    def _outgoing(self) -> Sequence[torch.Tensor]:
        return self._totals
