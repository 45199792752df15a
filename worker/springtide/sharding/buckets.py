"""Buckets whose memory is given back as soon as their gradients have left.

Where each worker keeps the sums of its own shards only, nobody needs the gradients of a whole bucket after
they were sent. Then memory is taken for the buckets that backward is filling, not for all. From then on a
script sees zeros as its gradients, which take no room.

A large gradient is not copied into its bucket at all: it stays where autograd has made it until it is packed
for its way, and is weighted there.

The sum of all micro-batches but the last one has to be there as a whole when the last one begins. So to keep
it until the step is over (`keeps_base`) takes no more memory than a step has then anyhow: the last one's sums
take memory a few buckets at a time. It is let go before the next forward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from springtide.comm.buckets import Buckets, StartSum, changed
from springtide.comm.layout import Layout
from springtide.sharding.collectives import Interval

_LARGE_BYTES = {"cpu": 16 << 10, "cuda": 1 << 20}
"""Size above which a gradient is not copied, by device. A GPU launches a kernel for each that is packed."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements start..stop-1 of a bucket that are in one place.

    Attributes:
        index: Number of the large parameter that they are; -1: small ones and the gaps behind them.
        offset: Of small ones, in the memory that the bucket has for those.
    """

    start: int
    stop: int
    index: int
    offset: int


def runs_of(layout: Layout, bucket: int, is_large: Collection[bool]) -> tuple[Run, ...]:
    """Return of which runs a bucket consists, ascending and without gaps. PURE.

    Args:
        layout: Of the parameters.
        bucket: Its number.
        is_large: By parameter.
    """
    large = list(is_large)
    found: list[Run] = []
    at = offset = 0
    for index in sorted(layout.members[bucket], key=lambda index: layout.slots[index].offset):
        if not large[index]:
            continue
        start = layout.slots[index].offset
        if start > at:
            found.append(Run(at, start, -1, offset))
            offset += start - at
        at = start + layout.fields[index].numel
        found.append(Run(start, at, index, 0))
    if (size := layout.sizes[bucket]) > at:
        found.append(Run(at, size, -1, offset))
    return tuple(found)


@dataclass(slots=True)
class Loose:
    """A large gradient that lies by itself.

    Attributes:
        scale: Factor that it is still to be multiplied by.
        version: Of the tensor, as it was when it came.
        is_own: It was made here, so that it may be written into.
    """

    tensor: torch.Tensor
    scale: float
    version: int
    is_own: bool


class BucketSource:
    """A bucket's gradients: small ones in memory of the bucket's, large ones each by itself."""

    def __init__(self, runs: tuple[Run, ...], flat: torch.Tensor, loose: dict[int, Loose]) -> None:
        """Take what there is.

        Args:
            runs: Of the bucket.
            flat: Memory of the small ones; empty where none has a gradient.
            loose: Large ones by number; those without a gradient are missing.
        """
        self._runs, self._flat, self._loose = runs, flat, loose
        self._starts = [run.start for run in runs]

    def copy(self, elements: Interval, into: torch.Tensor) -> None:
        """Write some of the bucket's elements, weighted.

        Args:
            elements: Of the bucket.
            into: As many.
        """
        start, stop = elements
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            run = self._runs[at]
            end = min(stop, run.stop)
            part = into[start - elements[0] : end - elements[0]]
            loose = self._loose.get(run.index)
            if run.index < 0 and self._flat.numel():
                first = run.offset + start - run.start
                part.copy_(self._flat[first : first + end - start])
            elif loose is None:
                part.zero_()
            else:
                own = loose.tensor.view(-1)[start - run.start : end - run.start]
                if loose.scale == 1.0:
                    part.copy_(own)
                else:
                    torch.mul(own, loose.scale, out=part)
            start, at = end, at + 1


class PassingBuckets(Buckets):
    """The buckets of a step, each with memory from its first gradient until it is sent."""

    may_expect_unused = False

    def allocate(self) -> None:
        """Have memory for no bucket."""
        layout = self.layout
        limit = _LARGE_BYTES["cpu" if self._is_on_cpu else "cuda"]
        self._is_large = [field.numel * field.dtype.itemsize > limit for field in layout.fields]
        self._runs = [runs_of(layout, bucket, self._is_large) for bucket in range(len(layout.sizes))]
        self._small_sizes = [
            sum(run.stop - run.start for run in runs if run.index < 0) for runs in self._runs
        ]
        self._small = [
            [index for index in indices if not self._is_large[index]] for indices in layout.members
        ]
        self._in_memory, self._offsets = self._small, [0] * len(layout.fields)
        for indices in layout.members:
            left_out = 0
            for index in sorted(indices, key=lambda index: layout.slots[index].offset):
                self._offsets[index] = layout.slots[index].offset - left_out
                left_out += layout.fields[index].numel * self._is_large[index]
        self._most_deferred = [len(indices) for indices in self._small]
        self._loose: dict[int, Loose] = {}
        """Large parameters that have a gradient, by number."""
        self._free: list[torch.Tensor] = []
        """Memory that is used again, on the CPU: new memory costs more than copying into it. The one that was
        used last comes last."""
        self._memory: dict[int, torch.Tensor] = {}
        """Memory that each bucket has, on the CPU."""
        self._used_memory: set[int] = set()
        """Addresses of what buckets have had since the last backward pass began."""
        self._flats = [torch.empty(0, dtype=dtype, device=self._device) for dtype in layout.dtypes]
        """The small gradients of each bucket."""
        self._nothing = [
            torch.zeros((), dtype=field.dtype, device=self._device).expand(field.shape)
            for field in layout.fields
        ]
        self.views = list(self._nothing)
        self._spans = [[] for _ in layout.members]

    def begin(self, start_sum: StartSum) -> None:
        """Start a step, or a backward pass, and let go of memory that the one before it had no need of.

        A process's first step fills all buckets before it sends one; later ones fill a few at a time.
        """
        super().begin(start_sum)
        for index in self._loose:  # of a step that was dropped
            self.views[index] = self._nothing[index]
        self._loose.clear()
        # What was kept in case the step was dropped would lie beside the next forward pass's activations.
        self._base, self._base_views, self._memory_of_copies = [], [], {}
        if self._used_memory:
            self._free = [memory for memory in self._free if memory.data_ptr() in self._used_memory]
        self._used_memory = {memory.data_ptr() for memory in self._memory.values()}

    @property
    def bytes(self) -> int:
        layout = self.layout
        return sum(size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True))

    def source(self, bucket: int) -> BucketSource:
        """Return the gradients of a bucket that is being sent.

        Args:
            bucket: Its number.
        """
        return BucketSource(self._runs[bucket], self._flats[bucket], self._loose)

    def _make_room(self, bucket: int) -> None:
        """Take memory for the small gradients of a bucket that has none."""
        size = self._small_sizes[bucket]
        if self._flats[bucket].numel() == size:
            return
        flat = self._taken(bucket, size, self.layout.dtypes[bucket])
        self._flats[bucket] = flat
        self._versions[bucket] = flat._version
        for index in self._small[bucket]:
            field = self.layout.fields[index]
            self.views[index] = flat.narrow(0, self._offsets[index], field.numel).view(field.shape)
        self._spans[bucket] = [flat]

    def _taken(self, bucket: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        if self._is_on_cpu:
            nbytes = size * dtype.itemsize
            fitting = [place for place, memory in enumerate(self._free) if memory.numel() >= nbytes]
            if fitting:
                # The smallest, and of those of one size the one that was used last: so the others are seen
                # not to be needed.
                memory = self._free.pop(min(fitting, key=lambda place: (self._free[place].numel(), -place)))
            else:
                memory = torch.zeros(nbytes, dtype=torch.uint8)
            self._memory[bucket] = memory
            self._used_memory.add(memory.data_ptr())
            return memory[:nbytes].view(dtype)
        # Between parameters are gaps, which are summed too: a NaN there would be one in the norm.
        return torch.zeros(size, dtype=dtype, device=self._device)

    @property
    def _is_on_cpu(self) -> bool:
        return self._device is None or self._device.type == "cpu"

    def _release(self, bucket: int) -> None:
        for index in self.layout.members[bucket]:
            leaf = self._leaves[index] if self._leaves else None
            if leaf is not None and leaf.grad is self.views[index]:
                leaf.grad = self._nothing[index]
            self.views[index] = self._nothing[index]
            loose = self._loose.pop(index, None)
            if loose is not None and not self._is_on_cpu:
                loose.tensor.record_stream(torch.cuda.current_stream(self._device))
        flat = self._flats[bucket]
        if not flat.numel():
            return
        if self._is_on_cpu:
            self._free.append(self._memory.pop(bucket))
        else:
            flat.record_stream(torch.cuda.current_stream(self._device))
        # Not a view of the memory, whose version moves when another bucket writes into it.
        self._flats[bucket] = torch.empty(0, dtype=flat.dtype, device=flat.device)
        self._versions[bucket] = self._flats[bucket]._version
        self._spans[bucket] = []

    # ---- what writes into a bucket, and what sends it

    def _write(self, index: int, bucket: int, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        if self._to_base:
            return super()._write(index, bucket, gradient, scale)
        if not self._is_large[index]:
            self._make_room(bucket)
            return super()._write(index, bucket, gradient, scale)
        self._writers.write(bucket, onto=index in self._loose or index in self._only_in_base)
        return self._keep(index, gradient, scale)

    def _keep(self, index: int, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        """Take a large gradient as it lies, or add it to what is there; return what holds it."""
        if index in self._only_in_base:
            self._take_base(index)
        found, field = self._loose.get(index), self.layout.fields[index]
        if scale == 0.0:
            return self.views[index]
        if found is not None:
            if not found.is_own:
                # Not in place: autograd may have given other parameters a part of the same memory.
                found = Loose(torch.mul(found.tensor, found.scale), 1.0, 0, True)
            found.tensor.add_(gradient, alpha=scale)
        elif gradient.dtype == field.dtype and gradient.is_contiguous() and gradient.shape == field.shape:
            found = Loose(gradient, scale, 0, False)
        else:
            own = torch.empty(field.shape, dtype=field.dtype, device=gradient.device)
            found = Loose(torch.mul(gradient, scale, out=own), 1.0, 0, True)
        found.version = found.tensor._version
        self._loose[index], self.views[index] = found, found.tensor
        return found.tensor

    def _take_base(self, index: int) -> None:
        """Have the base of a large parameter be its gradient, where it lies; nobody writes into it there."""
        self._only_in_base.discard(index)
        base = self._base_views[index]
        self._loose[index], self.views[index] = Loose(base, 1.0, base._version, False), base

    def _gather(self, bucket: int) -> None:
        if any(not self._is_large[index] for index in self._waiting[bucket]):
            self._make_room(bucket)
        super()._gather(bucket)

    def _copy(self, bucket: int, indices: list[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        pairs = list(zip(indices, gradients, strict=True))
        small = [(index, gradient) for index, gradient in pairs if not self._is_large[index]]
        if len(small) == len(pairs):
            return super()._copy(bucket, indices, gradients)
        if small:
            super()._copy(bucket, [index for index, _ in small], [gradient for _, gradient in small])
        for index, gradient in pairs:
            if self._is_large[index]:
                self._keep(index, gradient, self._scale)
        return [self.views[index] for index in indices]

    def _fill(self, bucket: int, indices: Iterable[int]) -> None:
        chosen = list(indices)
        small = [index for index in chosen if not self._is_large[index]]
        if small:
            self._make_room(bucket)
            super()._fill(bucket, small)
        for index in chosen:
            if self._is_large[index] and index in self._only_in_base:
                self._writers.write(bucket, onto=True)
                self._take_base(index)

    def _new_base(self) -> list[torch.Tensor]:
        layout = self.layout
        return [
            torch.zeros(size, dtype=dtype, device=self._device)
            for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
        ]

    def _copied(self, bucket: int, into: torch.Tensor | None = None) -> torch.Tensor:
        size = self.layout.sizes[bucket]
        if into is None:
            into = torch.empty(size, dtype=self.layout.dtypes[bucket], device=self._device)
        self.source(bucket).copy((0, size), into)
        return into

    def go_on_with(self, own: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
        """Begin with what an earlier try at the step has put in.

        Args:
            own: as from `own` or `base`; it stays as it is, and is read until the step is over.
            used: by parameter, whether there is a gradient of it.
        """
        for index, view in enumerate(self._views_of(own)):
            if not used[index]:
                continue
            if self.keeps_base:
                self._writers.write(self.layout.slots[index].bucket, onto=False)
                self._into_base(index).copy_(view)
                self._carried.add(index)
            else:
                self.carry(index, view)

    def carry(self, index: int, gradient: torch.Tensor) -> None:
        """Begin with what an earlier backward pass has left for a parameter.

        Args:
            index: Number of the parameter.
            gradient: Weighted already, of the parameter's shape.
        """
        bucket = self.layout.slots[index].bucket
        if not self._is_large[index]:
            self._make_room(bucket)
            super().carry(index, gradient)
            return
        self._writers.write(bucket, onto=False)
        self._loose.pop(index, None)
        self._keep(index, gradient, 1.0)
        self._carried.add(index)

    def start_late(self, indices: Collection[int], start_sum: object) -> list[object]:  # type: ignore[override]
        """Refuse: nothing is late where no parameter is expected to be unused.

        Args:
            indices: Numbers of parameters.
            start_sum: Starts a sum.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("may_expect_unused is False")

    def _send(self, bucket: int) -> None:
        for index in self.layout.members[bucket]:
            if (loose := self._loose.get(index)) is not None and loose.tensor._version != loose.version:
                raise changed()
        super()._send(bucket)
        self._release(bucket)
