"""Gradients on their way into the sum: weighted into flat buffers as backward makes them, sent bucket by
bucket.

A bucket is sent when its last gradient is there and all buckets before it have been sent, so that all members
send in the same order and sending overlaps the rest of backward.

[Note: unused parameters] A parameter without a gradient (BERT's pooler under MLM, an expert that nothing was
sent to) would hold up its bucket, and all behind it, until backward is over. So what no member has used in
the last step counts as there from the begin: its bucket leaves with zeros for it. If a gradient comes all the
same, and its bucket has left, it is late: it is kept apart, the commit vote tells all members, and they sum
the late ones once more. All members must expect the same, or they would send different things.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from springtide.comm.cuda_streams import Writers, current_stream_of
from springtide.comm.layout import Layout
from springtide.comm.process_group import Work
from springtide.errors import UsageError

StartSum = Callable[[torch.Tensor], Work]


class Buckets:
    """The flat gradient buffers of one model. One step at a time: `begin`, `put`..., `flush`, `wait`."""

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        self.layout = layout
        self._device = device
        self._writers = Writers(current_stream_of(device))
        self._names = [field.name for field in layout.fields]
        self._flats: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self.allocate()
        self.begin(lambda tensor: _unbound())

    def allocate(self) -> None:
        """New buffers: a collective of a dead group may still write into the old ones."""
        layout = self.layout
        self._flats = [
            torch.zeros(size, dtype=dtype, device=self._device)
            for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
        ]
        self.views = [
            self._flats[slot.bucket].narrow(0, slot.offset, field.numel).view(field.shape)
            for field, slot in zip(layout.fields, layout.slots, strict=True)
        ]

    def begin(self, start_sum: StartSum) -> None:
        """Start a step whose buckets go through start_sum."""
        self._start_sum = start_sum
        self._writers.begin()
        self._round = [-1] * len(self._names)
        self._carried: set[int] = set()
        self._missing = [len(indices) for indices in self.layout.members]
        self._versions = [flat._version for flat in self._flats]
        self._works: list[Work] = []
        self._unused: frozenset[int] = frozenset()
        self._late: dict[int, torch.Tensor] = {}

    patient = False
    """Whether no bucket leaves before `flush`: a micro-batch may have more than one backward."""

    may_expect_unused = True
    """Whether sums can be added to after they were made; see [Note: unused parameters]."""

    def expect_unused(self, indices: Iterable[int]) -> None:
        """After `begin`: these parameters hold up no bucket. All members must say the same ones."""
        self._unused = frozenset(indices)
        for index in self._unused:
            self._missing[self.layout.slots[index].bucket] -= 1

    def is_late(self, index: int) -> bool:
        """Whether a gradient for the parameter came after its bucket had left."""
        return index in self._late

    def start_late(self, indices: Sequence[int], start_sum: StartSum) -> list[tuple[torch.Tensor, Work]]:
        """Begin to sum what was late for these parameters, here or at other members; one sum for each dtype.

        Returns:
            (flat tensor, its sum) in the order of the dtypes' first parameters, for `add_late`.
        """
        self._writers.join(self._late_account)
        return [(flat, start_sum(flat)) for flat in self._late_flats(indices)]

    def add_late(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Add the sums of `start_late` to those of the buckets."""
        offsets = [0] * len(flats)
        numbers = {dtype: number for number, dtype in enumerate(self._dtypes_of(indices))}
        for index in indices:
            view, number = self.views[index], numbers[self.views[index].dtype]
            begin, offsets[number] = offsets[number], offsets[number] + view.numel()
            view.add_(flats[number][begin : offsets[number]].view_as(view))
        self._versions = [flat._version for flat in self._flats]

    def _late_flats(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [
            torch.cat(
                [
                    self._late.get(index, torch.zeros_like(self.views[index])).reshape(-1)
                    for index in indices
                    if self.views[index].dtype == dtype
                ]
            )
            for dtype in self._dtypes_of(indices)
        ]

    def _dtypes_of(self, indices: Sequence[int]) -> list[torch.dtype]:
        return list(dict.fromkeys(self.views[index].dtype for index in indices))

    @property
    def _late_account(self) -> int:
        """For `_writers`: late gradients, which lie in no bucket."""
        return -1

    def begin_round(self, start_sum: StartSum, left: Collection[int]) -> None:
        """Another backward pass of the step begins. left: parameters whose last sums are added to."""
        self.begin(start_sum)

    @property
    def used(self) -> list[bool]:
        """By parameter: whether a gradient was put in during this step."""
        return [number >= 0 or index in self._carried for index, number in enumerate(self._round)]

    def has(self, index: int, micro: int) -> bool:
        """Whether micro-batch number `micro` has put in a gradient for parameter `index`."""
        return self._round[index] == micro

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._flats)

    def carry(self, index: int, gradient: torch.Tensor) -> None:
        """Begin with what an earlier backward pass has left for parameter `index`, weighted already."""
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        self._writers.write(bucket, onto=False)
        self.views[index].copy_(gradient)
        self._versions[bucket] = self._flats[bucket]._version
        self._carried.add(index)

    def put(self, index: int, gradient: torch.Tensor, scale: float, micro: int, last: bool) -> torch.Tensor:
        """Add scale * gradient of micro-batch number `micro` to parameter `index`; return the view it lies
        in.

        More than one of a micro-batch add up; of the last micro-batch, only while `patient`.
        scale 0 puts zeros in, whatever the gradient (0 x NaN is NaN). last: nothing more comes for it in this
        step.
        """
        self._check_new(index, gradient, micro, last)
        again = self._round[index] == micro
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        view = self.views[index]
        if bucket < len(self._works):
            self._put_late(index, gradient, scale)
            self._round[index] = micro
            return view
        first = self._round[index] < 0 and index not in self._carried
        self._writers.write(bucket, onto=not first)
        if scale == 0.0:
            if first:
                view.zero_()
        elif not first:
            view.add_(gradient, alpha=scale)
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)
        self._versions[bucket] = self._flats[bucket]._version
        self._round[index] = micro
        if last and not again:
            if index not in self._unused:
                self._missing[bucket] -= 1
            if not self.patient:
                self._send_complete()
        return view

    def _put_late(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        self._writers.write(self._late_account, onto=index in self._late)
        late = self._late.get(index)
        if late is None:
            late = self._late[index] = torch.zeros_like(self.views[index])
        if scale != 0.0:
            late.add_(gradient, alpha=scale)

    def flush(self) -> None:
        """Send what has not been sent; parameters without a gradient count as zero."""
        for bucket, missing in enumerate(self._missing):
            if missing and bucket >= len(self._works):
                self._fill(bucket, self.layout.members[bucket])
            self._missing[bucket] = 0
        self._send_complete()

    def _fill(self, bucket: int, indices: Iterable[int]) -> None:
        """Put in zeros for those of the parameters that have no gradient yet."""
        for index in indices:
            if self._round[index] < 0 and index not in self._carried:
                self._check(bucket)
                self._writers.write(bucket, onto=False)
                self.views[index].zero_()
                self._versions[bucket] = self._flats[bucket]._version

    def wait(self) -> None:
        """Wait until all sums are there.

        Raise RuntimeError of the group's, UsageError if a gradient was changed meanwhile.
        """
        for work in self._works:
            work.wait()
        self.check_untouched()

    def check_untouched(self) -> None:
        """Raise UsageError when somebody else has changed a gradient."""
        for bucket in range(len(self._flats)):
            self._check(bucket)

    def scale(self, factor: float) -> None:
        for flat in self._flats:
            flat.mul_(factor)

    def square_norm(self, indices: Sequence[int]) -> torch.Tensor:
        """Sum of squares over the gradients of these parameters, float64 scalar."""
        if not indices:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm([self.views[index] for index in indices])
        return torch.stack(norms).to(torch.float64).square().sum()

    def settle(self, last: bool) -> None:
        """After the side reduction of the step. last: all members stop after it.

        Raise RuntimeError of the group's.
        """

    closing = False
    """Whether the next body is to be the last one before all members stop."""

    def ends(self, wanted: bool) -> bool:
        """All members agree whether to stop: whether this body is the last one, and not the next."""
        return wanted

    def reopen(self) -> None:
        """Members have stopped: another generation begins."""

    def take(self, indices: Iterable[int]) -> None:
        """An optimizer's step takes the sums of these parameters."""

    def committed(self) -> None:
        """The step cannot be dropped any more."""

    def _outgoing(self, bucket: int) -> torch.Tensor:
        """What is summed over the members."""
        return self._flats[bucket]

    def _send_complete(self) -> None:
        while len(self._works) < len(self._missing) and self._missing[len(self._works)] == 0:
            bucket = len(self._works)
            if self._unused:
                self._fill(bucket, self._unused.intersection(self.layout.members[bucket]))
            self._writers.join(bucket)
            self._works.append(self._start_sum(self._outgoing(bucket)))

    def _check_new(self, index: int, gradient: torch.Tensor, micro: int, last: bool) -> None:
        if last and not self.patient and self._round[index] == micro:
            raise UsageError(
                f"two gradients for {self._names[index]} in one micro-batch, and the first one is on its way "
                "to the other workers: add the losses up and call backward() once"
            )
        if gradient.layout != torch.strided:
            raise UsageError(
                f"the gradient of {self._names[index]} is sparse, which is not supported: make the "
                "embedding with sparse=False"
            )

    def _check(self, bucket: int) -> None:
        if self._flats[bucket]._version != self._versions[bucket]:
            raise UsageError(
                "a gradient was changed between backward() and optimizer.step(): it is already on its way "
                "to the other workers. Give distribute(..., clip_norm=) for clipping, and scale the loss "
                "instead of the gradients"
            )


def _unbound() -> Work:
    raise RuntimeError("begin() comes first")
