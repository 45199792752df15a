"""Exact sums without sockets: several workers in one process, whose integers are added up by hand."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from springtide.comm.layout import Field, Layout, plan_layout
from springtide.comm.process_group import Group, Work
from springtide.exact.buckets import ExactBuckets
from springtide.exact.rounding import BLOCK

SHAPES = [(3, 100), (700,), (1,), (2, BLOCK)]


def layout(dtype: torch.dtype = torch.float32) -> Layout:
    fields = [Field(f"p{index}", shape, dtype) for index, shape in enumerate(SHAPES)]
    return plan_layout(fields, 2000, BLOCK)


Sent = list[tuple[torch.Tensor, torch.Tensor]]


class World:
    """Several workers in one process: each runs its parts, then their integer sums are added up."""

    def __init__(
        self,
        assignment: list[list[int]],
        parts: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """assignment: by worker, the parts that it runs, in that order."""
        self.assignment = assignment
        self.number = 0
        self.workers = [ExactBuckets(layout(dtype), parts, device) for _ in assignment]

    def step(self, gradients: list[list[torch.Tensor | None]], scales: list[float]) -> list[torch.Tensor]:
        """One step, done again until it fits. gradients: by part and parameter. Returns those of worker 0."""
        exponents: torch.Tensor | None = None
        for _ in range(3):
            sums: list[Sent] = [[] for _ in self.workers]
            for worker, own, sent in zip(self.workers, self.assignment, sums, strict=True):
                self._run(worker, own, gradients, scales, sent, exponents)
            totals = [sum(value for _, value in same) for same in zip(*sums, strict=True)]
            for sent in sums:
                for (tensor, _), total in zip(sent, totals, strict=True):
                    tensor.copy_(total)
            for worker in self.workers:
                worker.wait()
            if not any(worker.exceeded for worker in self.workers):
                self.number += 1
                for worker in self.workers:
                    worker.commit(self.number)
                return [view.clone() for view in self.workers[0].views]
            needed = torch.stack([worker.needed for worker in self.workers]).amax(0)
            exponents = self.workers[0].raised(needed)
        raise AssertionError("a step that is done again must fit")

    def _run(
        self,
        worker: ExactBuckets,
        own: list[int],
        gradients: list[list[torch.Tensor | None]],
        scales: list[float],
        sent: Sent,
        exponents: torch.Tensor | None,
    ) -> None:
        def start_sum(tensor: torch.Tensor) -> Work:
            assert tensor.dtype is torch.int32  # which gloo and NCCL sum alike
            # What leaves is what lies there now, whatever is written afterwards.
            sent.append((tensor, tensor.clone()))
            return Group(None, 0, 1, 1.0).start_sum(tensor)

        worker.begin(start_sum, len(own) <= 1, exponents)
        for number, part in enumerate(own):
            if number:
                worker.begin_part(number == len(own) - 1)
            for index in reversed(range(len(SHAPES))):
                gradient = gradients[part][index]
                if gradient is not None:
                    worker.put(index, gradient, scales[part], 0, True)
            if number < len(own) - 1:
                worker.end_part()
        worker.flush()


def gradients(parts: int, seed: int, spread: int = 3, missing: float = 0.2) -> list[list[Any]]:
    generator = torch.Generator().manual_seed(seed)
    result: list[list[Any]] = []
    for _ in range(parts):
        own: list[Any] = []
        for shape in SHAPES:
            exponent = torch.randint(-spread, spread + 1, (1,), generator=generator).item()
            absent = torch.rand(1, generator=generator).item() < missing
            own.append(None if absent else torch.randn(shape, generator=generator) * 10.0**exponent)
        result.append(own)
    return result


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@st.composite
def grouping(draw: Any) -> tuple[int, list[list[int]]]:
    """Parts, and who runs which, in any order; some workers may have none."""
    parts = draw(st.integers(1, 9))
    owners = draw(st.lists(st.integers(0, 4), min_size=parts, max_size=parts))
    order = draw(st.permutations(range(parts)))
    return parts, [[part for part in order if owners[part] == worker] for worker in range(5)]
