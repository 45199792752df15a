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
        """On the CPU, memory that is used again: new memory costs more than copying into it."""
        self._in_use = self._most_in_use = 0
        self._flats = [torch.empty(0, dtype=dtype, device=self._device) for dtype in layout.dtypes]
        self._nothing = [
            torch.zeros((), dtype=field.dtype, device=self._device).expand(field.shape)
            for field in layout.fields
        ]
        self.views = list(self._nothing)
        self._spans = [[] for _ in layout.members]

    def _make_room(self, bucket: int) -> None:
        """Take memory for a bucket that has none."""
        size = self.layout.sizes[bucket]
        if self._flats[bucket].numel() == size:
            return
        flat = self._taken(size, self.layout.dtypes[bucket])
        self._flats[bucket] = flat
        self._versions[bucket] = flat._version
        for index in self.layout.members[bucket]:
            field, slot = self.layout.fields[index], self.layout.slots[index]
            self.views[index] = flat.narrow(0, slot.offset, field.numel).view(field.shape)
        self._spans[bucket] = [flat[start:end] for start, end in self._deferred_spans(bucket)]

    def begin(self, start_sum: StartSum) -> None:
        """Start a step, and give back the memory that the last one did not need.

        Args:
            start_sum: Sends a bucket.
        """
        # A process's first step fills all buckets before one leaves; later ones do not.
        spare = len(self._free) - (self._most_in_use - self._in_use)
        del self._free[: max(0, spare)]
        self._most_in_use = self._in_use
        super().begin(start_sum)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that are held for gradients now."""
        return sum(item.nbytes for item in (*self._free, *self._flats))

    def _taken(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self._in_use += 1
        self._most_in_use = max(self._most_in_use, self._in_use)
        nbytes = size * dtype.itemsize
        for place, memory in enumerate(self._free):
            if memory.numel() >= nbytes:
                del self._free[place]
                return memory[:nbytes].view(dtype)
        if self._is_on_cpu:
            return torch.zeros(nbytes, dtype=torch.uint8).view(dtype)
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
        self._in_use -= 1
        if self._is_on_cpu:
            self._free.append(flat.view(torch.uint8))
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
