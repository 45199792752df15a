"""Buckets whose memory is given back as soon as their gradients have left.

Where each worker keeps the sums of its own shards only, nobody needs the gradients of a whole bucket after
they were sent. Then memory is taken for the buckets that backward is filling, not for all. From then on a
script sees zeros as its gradients, which take no room.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from springtide.comm.buckets import Buckets, StartSum


class PassingBuckets(Buckets):
    """The buckets of a step, each with memory from its first gradient until it is sent."""

    may_expect_unused = False

    def allocate(self) -> None:
        """Have memory for no bucket."""
        layout = self.layout
        self._free: list[torch.Tensor] = []
        """On the CPU, memory that is used again: new memory costs more than copying into it. The one that was
        used last comes last."""
        self._memory: dict[int, torch.Tensor] = {}
        """On the CPU, by bucket: the memory that it has."""
        self._used_memory: set[int] = set()
        """Addresses of what buckets have had since the last backward pass began."""
        self._flats = [torch.empty(0, dtype=dtype, device=self._device) for dtype in layout.dtypes]
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
        if self._used_memory:
            self._free = [memory for memory in self._free if memory.data_ptr() in self._used_memory]
        self._used_memory = {memory.data_ptr() for memory in self._memory.values()}

    def _make_room(self, bucket: int) -> None:
        """Take memory for a bucket that has none."""
        size = self.layout.sizes[bucket]
        if self._flats[bucket].numel() == size:
            return
        flat = self._taken(bucket, size, self.layout.dtypes[bucket])
        self._flats[bucket] = flat
        self._versions[bucket] = flat._version
        for index in self.layout.members[bucket]:
            field, slot = self.layout.fields[index], self.layout.slots[index]
            self.views[index] = flat.narrow(0, slot.offset, field.numel).view(field.shape)
        self._spans[bucket] = [flat[start:end] for start, end in self._deferred_spans(bucket)]

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
        flat = self._flats[bucket]
        if not flat.numel():
            return
        for index in self.layout.members[bucket]:
            leaf = self._leaves[index] if self._leaves else None
            if leaf is not None and leaf.grad is self.views[index]:
                leaf.grad = self._nothing[index]
            self.views[index] = self._nothing[index]
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
        self._make_room(bucket)
        return super()._write(index, bucket, gradient, scale)

    def _gather(self, bucket: int) -> None:
        if self._waiting[bucket]:
            self._make_room(bucket)
        super()._gather(bucket)

    def _fill(self, bucket: int, indices: Iterable[int]) -> None:
        self._make_room(bucket)
        super()._fill(bucket, indices)

    def carry(self, index: int, gradient: torch.Tensor) -> None:
        """Begin with what an earlier backward pass has left for a parameter.

        Args:
            index: number of the parameter.
            gradient: weighted already, of the parameter's shape.
        """
        self._make_room(self.layout.slots[index].bucket)
        super().carry(index, gradient)

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
        super()._send(bucket)
        self._release(bucket)
