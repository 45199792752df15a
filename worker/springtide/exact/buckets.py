"""Gradients on their way into an exact sum: like `comm.buckets`, with integers on the wire.

Each part's gradient is rounded into an int32 sum as backward makes it. Buckets leave during the backward of
this worker's last part; the same number of bytes travels as with float32. All of it lies where the gradients
are: on a GPU nothing passes the host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from springtide.comm.buckets import Buckets
from springtide.comm.layout import Layout
from springtide.comm.process_group import Work
from springtide.errors import UsageError
from springtide.exact import exponents as scale
from springtide.exact.on_device import DEVICE_PIECE, DeviceRounder
from springtide.exact.rounding import BLOCK, Rounder, Rounding, restore

_SMALL = 1 << 16
_MOST_TOGETHER = 1 << 17
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters that lie side by side and are rounded in one go: a large one alone, small ones together.

    start, end: in the bucket, in elements. blocks: of the whole layout.
    """

    bucket: int
    members: tuple[int, ...]
    start: int
    end: int
    blocks: slice


def plan_runs(layout: Layout) -> list[Run]:
    """Cut each bucket into runs; every element of it belongs to one."""
    runs: list[Run] = []
    first_block = 0
    for bucket, indices in enumerate(layout.members):
        groups: list[list[int]] = []
        for index in indices:
            slot, field = layout.slots[index], layout.fields[index]
            together = groups and field.numel < _SMALL and layout.fields[groups[-1][0]].numel < _SMALL
            if together and slot.offset + field.numel - layout.slots[groups[-1][0]].offset <= _MOST_TOGETHER:
                groups[-1].append(index)
            else:
                groups.append([index])
        starts = [layout.slots[group[0]].offset for group in groups]
        for group, (start, end) in zip(
            groups, itertools.pairwise([*starts, layout.sizes[bucket]]), strict=True
        ):
            blocks = slice(first_block + start // BLOCK, first_block + end // BLOCK)
            runs.append(Run(bucket, tuple(group), start, end, blocks))
        first_block += layout.sizes[bucket] // BLOCK
    return runs


class ExactBuckets(Buckets):
    """The integer sums of one model, and its gradients once they are restored.

    A step: `begin`, `put`..., then for each further part of this worker `begin_part`, `put`...; at the last
    one `flush` and `wait`. A part that is not the last one ends with `end_part`.
    """

    may_expect_unused = False  # parts of a step are summed as integers before they leave
    gathers = False  # each gradient is rounded as it comes
    may_reorder = False  # parts of a step come one after another

    whole = True
    """Whether all sums come to this worker. Otherwise those that do are restored by `restore_sums`, and all
    of `largest` is told by others, before `commit`."""

    def __init__(self, layout: Layout, parts: int, device: torch.device | None = None) -> None:
        """layout: slots aligned to BLOCK elements. parts: most parts that are added up in a step. device: of
        the gradients; None is the CPU."""
        for field in layout.fields:
            if field.dtype not in _DTYPES:
                raise UsageError(
                    f"exact mode sums float32, bfloat16 and float16 gradients; {field.name} is "
                    f"{field.dtype}: convert the model, or set strategy.allReduce.exact to false"
                )
        self._parts = parts
        starts = [sum(layout.sizes[:bucket]) // BLOCK for bucket in range(len(layout.sizes) + 1)]
        self._bucket_blocks = [slice(a, b) for a, b in itertools.pairwise(starts)]
        self._runs = plan_runs(layout)
        self._run_of = [0] * len(layout.fields)
        for number, run in enumerate(self._runs):
            for index in run.members:
                self._run_of[index] = number
        self._owners = torch.zeros(starts[-1], dtype=torch.int64)
        for index, (field, slot) in enumerate(zip(layout.fields, layout.slots, strict=True)):
            first = starts[slot.bucket] + slot.offset // BLOCK
            self._owners[first : first - (-field.numel // BLOCK)] = index
        bits, on_cpu = scale.part_bits(parts), device is None or device.type == "cpu"
        self._owners = self._owners.to(device or "cpu")
        self.exponents = scale.Exponents(starts[-1], device)
        self._rounder: Rounding = Rounder(bits) if on_cpu else DeviceRounder(bits)
        self._restored = {} if on_cpu else {"most": DEVICE_PIECE}
        self._totals: list[torch.Tensor] = []
        self._soiled = False
        """Whether the padding between parameters may hold something else than zeros."""
        super().__init__(layout, device)

    def allocate(self) -> None:
        super().allocate()
        self._totals = [
            torch.zeros(size, dtype=torch.int32, device=self._device) for size in self.layout.sizes
        ]
        self._sums = [self._totals[run.bucket][run.start : run.end] for run in self._runs]
        self._floats = [self._flats[run.bucket][run.start : run.end] for run in self._runs]

    def begin(
        self,
        start_sum: Callable[[torch.Tensor], Work],
        last: bool = True,
        exponents: torch.Tensor | None = None,
    ) -> None:
        """Start a step with its first part.

        Args:
            start_sum: starts the sum of a bucket's int32 integers over the workers.
            last: it is the only part of this worker.
            exponents: int32 by block; None: the committed ones.
        """
        if self._soiled:
            for flat in self._flats:
                flat.zero_()
            self._soiled = False
        super().begin(start_sum)
        self._exponents = self.exponents.values if exponents is None else exponents
        self._factors = scale.factors(self._exponents, self._parts)
        self._units = scale.units(self._exponents, self._parts)
        self._rounder.begin(self._exponents, self._factors)
        self.largest = torch.zeros(self._units.shape, device=self._device)
        """The largest magnitude of the step's sum in each block, once that is restored."""
        # Only a step that is done again knows of blocks that are not finite.
        self._broken = exponents is not None and bool((exponents == scale.NOT_FINITE).any())
        for bucket in range(len(self._flats)):
            self._writers.write(bucket, onto=False)  # scales, which streams that round have to wait for
        self._ever = [False] * len(self._names)
        self._fresh = [True] * len(self._runs)
        self._open = [len(run.members) for run in self._runs]
        self._staged = [False] * len(self._names)
        self._last = last

    def begin_part(self, last: bool) -> None:
        """Start the next part of the same step. last: of this worker."""
        self._last = last
        self._backward_pass = [-1] * len(self._names)
        self._open = [len(run.members) for run in self._runs]
        self._missing[:] = [len(indices) for indices in self.layout.members]
        self._versions = [flat._version for flat in self._flats]

    @property
    def any_used(self) -> bool:
        return any(self.used)

    @property
    def used(self) -> list[bool]:
        return [ever or number >= 0 for ever, number in zip(self._ever, self._backward_pass, strict=True)]

    @property
    def needed(self) -> torch.Tensor:
        """int32 by block: the exponent that the largest value needs which did not fit; LOWEST where all did.

        After `flush`.
        """
        self._writers.join(self._account)
        return self._rounder.needed

    @property
    def exceeded(self) -> bool:
        """Whether a value of this worker's parts did not fit. After `flush`; the host waits for a GPU."""
        return bool((self.needed > scale.LOWEST).any())

    @property
    def _account(self) -> int:
        """Return the number, for `_writers`, of the memory of values that do not fit, which runs of all
        buckets write.
        """
        return len(self._flats)

    @property
    def bytes(self) -> int:
        return sum(total.numel() * total.element_size() for total in self._totals)

    def put(self, index: int, gradient: torch.Tensor, weight: float, micro: int, last: bool) -> torch.Tensor:
        """Round a gradient into its bucket.

        Args:
            index: of the parameter.
            gradient: of any shape and floating type.
            weight: it is multiplied by.
            micro: number of the micro-batch.
            last: whether it is the last micro-batch.

        Returns:
            A view that holds the gradient only after `wait`.
        """
        self._check_new(index, gradient, micro, last)
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        view = self.views[index]
        first = self._backward_pass[index] < 0
        self._backward_pass[index] = micro
        self._ever[index] = True
        self._writers.write(bucket, onto=True)
        number = self._run_of[index]
        alone = len(self._runs[number].members) == 1
        if weight != 0.0 and first and last and alone:
            self._round_in(number, gradient.detach(), weight)
        elif weight != 0.0:
            # Micro-batches of one part are added up as floats: their order is the part's own.
            if self._staged[index]:
                view.add_(gradient, alpha=weight)
            else:
                torch.mul(gradient, weight, out=view)
            self._versions[bucket] = self._flats[bucket]._version
            self._staged[index] = True
        if last:
            self._open[number] -= 1
            if self._open[number] == 0:
                self._round_staged(number)
            self._missing[bucket] -= 1
            if self._last:
                self._send_complete(bucket)
        return view

    def _check_new(self, index: int, gradient: torch.Tensor, micro: int, last: bool) -> None:
        if self._backward_pass[index] == micro:
            raise UsageError(
                f"two gradients for {self._names[index]} in one micro-batch: exact mode takes one backward "
                "of each sample. Add the losses up first, or set strategy.allReduce.exact to false; and use "
                "checkpoint(..., use_reentrant=False)"
            )
        super()._check_new(index, gradient, micro, last)

    def end_part(self) -> None:
        """The part is over and is not the last one."""
        for number in range(len(self._runs)):
            self._round_staged(number)

    def flush(self) -> None:
        self.end_part()
        self._missing[:] = [0] * len(self._missing)
        self._send_complete(0)

    def wait(self) -> None:
        for bucket, work in enumerate(self._works):
            work.wait()
            self._check(bucket)
            if self.whole:
                self.restore_sums(bucket, 0, self.layout.sizes[bucket])
        self._soiled = self._broken

    @property
    def flats(self) -> Sequence[torch.Tensor]:
        """Return the gradients by bucket, flat."""
        return self._flats

    def blocks(self, bucket: int, start: int, stop: int) -> slice:
        """Return the blocks of some elements of a bucket.

        Args:
            bucket: its number.
            start: the first element, at which a block begins.
            stop: the one behind the last, at which a block or the bucket ends.
        """
        first = self._bucket_blocks[bucket].start
        return slice(first + start // BLOCK, first + stop // BLOCK)

    def restore_sums(self, bucket: int, start: int, stop: int) -> None:
        """Make numbers of the integer sums of some elements, which have come, and know the largest ones.

        Args:
            bucket: its number.
            start: as for `blocks`.
            stop: as for `blocks`.
        """
        blocks = self.blocks(bucket, start, stop)
        restore(
            self._totals[bucket][start:stop],
            self._units[blocks],
            self._flats[bucket][start:stop],
            self.largest[blocks],
            **self._restored,
        )
        self._versions[bucket] = self._flats[bucket]._version

    def scale(self, factor: float | torch.Tensor) -> None:
        super().scale(factor)
        # A device is not asked, which would wait for it.
        self._soiled = self._soiled or isinstance(factor, torch.Tensor) or not math.isfinite(factor)

    def raised(self, needed: torch.Tensor) -> torch.Tensor:
        """Exponents for doing the step again. needed: the maximum of `needed` over the members."""
        return scale.raised(self._exponents, needed)

    def commit(self, number: int) -> None:
        """Step `number` is about to be committed, and with it the exponents that follow from its sum."""
        self.exponents.values = scale.after_commit(
            self.exponents.values, self._exponents, self.largest, self._owners, len(self._names), number
        )

    def _round_in(self, number: int, values: torch.Tensor, weight: float) -> None:
        self._writers.write(self._account, onto=False)
        total = self._sums[number][: values.numel()]
        self._rounder.add(values, weight, self._runs[number].blocks, total, self._fresh[number])
        self._fresh[number] = False

    def _round_staged(self, number: int) -> None:
        """Round what has been staged of a run; its members without a gradient in this part count as zero."""
        run = self._runs[number]
        staged = [self._staged[index] for index in run.members]
        if not any(staged):
            return
        bucket = run.bucket
        self._check(bucket)
        self._writers.write(bucket, onto=True)
        for index, is_staged in zip(run.members, staged, strict=True):
            if not is_staged:
                self.views[index].zero_()
            self._staged[index] = False
        self._versions[bucket] = self._flats[bucket]._version
        self._round_in(number, self._floats[number], 1.0)

    def _send_complete(self, bucket: int) -> None:
        for complete in range(len(self._works), len(self._missing)):
            if self._missing[complete]:
                break
            self._zero_fresh(complete)
        super()._send_complete(bucket)

    def _zero_fresh(self, bucket: int) -> None:
        for number, run in enumerate(self._runs):
            # No part of this worker has put anything in: the last step's sum still lies there.
            if run.bucket == bucket and self._fresh[number]:
                self._writers.write(bucket, onto=True)
                self._sums[number].zero_()
                self._fresh[number] = False

    @property
    def has_own(self) -> bool:
        # Others would round with other exponents, and what did not fit would be forgotten.
        fits = self._exponents is self.exponents.values and not self.exceeded
        return fits and super().has_own

    def _contents(self, bucket: int) -> torch.Tensor:
        return self._totals[bucket]

    def _fill(self, bucket: int, indices: Iterable[int]) -> None:
        self._zero_fresh(bucket)

    def go_on_with(self, own: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
        """Begin with what an earlier try at the step has put in.

        Args:
            own: int32 sums by bucket, as from `own`.
            used: by parameter, whether there is a gradient of it.
        """
        super().go_on_with(own, ())
        self._fresh = [False] * len(self._runs)
        self._ever = list(used)

    @property
    def carried(self) -> list[bool]:
        return list(self._ever)

    def _outgoing(self, bucket: int) -> torch.Tensor:
        return self._totals[bucket]
