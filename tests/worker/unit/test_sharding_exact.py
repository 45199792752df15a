"""Exact sums in shards: any number of members gives the bits of one process that has all sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_groups import FakeGroup, on_members
from sharding_world import Variant, adam

from springtide.comm.process_group import Group, Work
from springtide.exact.buckets import ExactBuckets
from springtide.exact.parts import assignment
from springtide.sharding.backend import ShardedOptimizer
from springtide.sharding.norms import norm_of_all
from springtide.train_step.gradients import clip_coefficient
from springtide_protocol.names import GenerationName, StateName

PARTS, STEPS = 7, 4
SCALE, INVERSE = 1 / 23, 1 / 3
"""Two factors, like the mean's and a GradScaler's, each of which rounds."""
GENERATION = GenerationName.of(incarnation=1, restart=0, number=1)


def sgd(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def gradient(step: int, part: int, index: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return a part's gradient of a parameter: of very different sizes, and sometimes none."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * part + index)
    if torch.rand(1, generator=draw) < 0.2:
        return None
    size = 10.0 ** float(torch.randint(-3, 4, (1,), generator=draw))
    return (torch.randn(like.shape, generator=draw) * size).to(like.dtype)


class Worker:
    """One process that runs some of the logical parts of each step."""

    def __init__(self, parts: Sequence[int], variant: Variant) -> None:
        self.parts = parts
        self.named = variant.parameters()
        self.layout = variant.layout(self.named)
        self.optimizer = variant.make(list(self.named.values()))
        self.buckets = ExactBuckets(self.layout, PARTS)

    def put_all(self, step: int, start_sum: Any, exponents: torch.Tensor | None, spoilt: int) -> None:
        """Put the gradients of all own parts in.

        Args:
            step: Its number.
            start_sum: Starts the sum of a bucket's integers.
            exponents: Of a step that is done again.
            spoilt: In this step one gradient is not finite.
        """
        self.buckets.begin(start_sum, len(self.parts) <= 1, exponents)
        for number, part in enumerate(self.parts):
            if number:
                self.buckets.begin_part(number == len(self.parts) - 1)
            for index, parameter in reversed(list(enumerate(self.named.values()))):
                found = gradient(step, part, index, parameter)
                if found is None:
                    continue
                if (step, part, index) == (spoilt, 3, 1):
                    found.view(-1)[700] = float("inf")
                self.buckets.put(index, found, 0.5, 0, True)
            if number < len(self.parts) - 1:
                self.buckets.end_part()
        self.buckets.flush()
        self.buckets.wait()

    def result(self) -> list[bytes]:
        """Return the bits of the parameters and of the exponents."""
        tensors = [*self.named.values(), self.buckets.exponents.values]
        return [
            item.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() for item in tensors
        ]


def unused_in(step: int, layout: Any) -> list[int]:
    """Return the parameters without a gradient in any part."""
    return [
        index
        for index, field in enumerate(layout.fields)
        if all(gradient(step, part, index, torch.empty(field.shape)) is None for part in range(PARTS))
    ]


def factors_for(norm: float | None) -> list[float]:
    """Return what sums are multiplied by.

    Args:
        norm: Of all of them, which is to be brought to one; None: it may be any.
    """
    return [SCALE, INVERSE] + ([] if norm is None else [clip_coefficient(1.0, norm * SCALE * INVERSE)])


def without_shards(variant: Variant, clip: bool, spoilt: int) -> list[bytes]:
    """Return the bits of one process that has all sums, and a plain optimizer."""
    worker = Worker(range(PARTS), variant)

    def start_sum(tensor: torch.Tensor) -> Work:
        return Group(None, 0, 1, 1.0).start_sum(tensor)

    masters = [item.detach().float() if variant.masters else item for item in worker.named.values()]
    optimizer = variant.make(masters)  # type: ignore[arg-type]
    for step in range(1, STEPS + 1):
        exponents = None
        worker.put_all(step, start_sum, exponents, spoilt)
        while worker.buckets.exceeded:
            exponents = worker.buckets.raised(worker.buckets.needed)
            worker.put_all(step, start_sum, exponents, spoilt)
        worker.buckets.commit(step)
        unused = unused_in(step, worker.layout)
        for factor in factors_for(norm_of_all(worker.layout)(worker.buckets.flats) if clip else None):
            worker.buckets.scale(factor)
        for index, master in enumerate(masters):
            view = worker.buckets.views[index]
            master.grad = None if index in unused else torch.empty_like(master).copy_(view)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(worker.named.values(), masters, strict=True):
                parameter.copy_(master)
    return worker.result()


def in_shards(variant: Variant, size: int, clip: bool, spoilt: int) -> list[list[bytes]]:
    """Return the bits at each of so many members."""

    def member(group: FakeGroup) -> list[bytes]:
        worker = Worker(assignment(PARTS, size)[group.rank], variant)
        worker.buckets.whole = False
        home = ShardedOptimizer(
            worker.named,
            worker.layout,
            [worker.optimizer],
            with_norm=clip,
            node=f"n{group.rank}",
            masters=variant.masters,
        )
        home.use_exact(worker.buckets)
        home.begin_generation(
            group,  # type: ignore[arg-type]
            GENERATION,
            StateName(GENERATION, 0),
            step=0,
            is_source=group.rank == 0,
            keep_values=False,
            on_bytes=lambda count: None,
        )
        for step in range(1, STEPS + 1):
            _step(worker, home, group, step, clip, spoilt)
        home.settle(None)
        return worker.result()

    return on_members(size, member, seed=size)[0]


def _step(
    worker: Worker, home: ShardedOptimizer, group: FakeGroup, step: int, clip: bool, spoilt: int
) -> None:
    buckets = worker.buckets
    exponents: torch.Tensor | None = None
    while True:
        home.settle(None)
        home.begin_step()
        worker.put_all(step, lambda sums: home.push(sums, buckets.leaving), exponents, spoilt)
        norm = home.prepare()
        buckets.wait()
        vote = torch.tensor([float(buckets.exceeded)])
        group.start_sum(vote).wait()
        if not vote:
            break
        needed = buckets.needed
        group.start_max(needed).wait()
        exponents = buckets.raised(needed)
    buckets.commit(step)
    home.commit(factors_for(norm), unused_in(step, worker.layout))
    worker.optimizer.step()
    home.stepped()


VARIANTS = {
    "adam": Variant(adam, exact=True),
    "sgd": Variant(sgd, exact=True),
    "masters": Variant(adam, masters=True, exact=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "clip"), [(1, True), (2, False), (2, True), (3, False), (5, True)])
@pytest.mark.parametrize("name", VARIANTS)
def test_bits_are_those_of_one_process_without_shards(name: str, size: int, clip: bool) -> None:
    expected = without_shards(VARIANTS[name], clip, spoilt=0)
    assert in_shards(VARIANTS[name], size, clip, spoilt=0) == [expected] * size


def test_clipping_changes_bits() -> None:
    one, other = (without_shards(VARIANTS["adam"], clip, spoilt=0) for clip in (True, False))
    assert one != other


def test_clipped_bits_are_equal_at_any_size() -> None:
    """SGD in bfloat16, of which torch computes a tensor's last elements otherwise than the rest."""
    variant = Variant(sgd, exact=True, bfloat16=True)
    expected = in_shards(variant, 1, clip=True, spoilt=0)[0]
    assert expected != in_shards(variant, 1, clip=False, spoilt=0)[0]
    for size in (2, 3, 4):
        assert in_shards(variant, size, clip=True, spoilt=0) == [expected] * size


def test_value_that_is_not_finite_reaches_all_in_the_same_bits() -> None:
    expected = without_shards(VARIANTS["sgd"], False, spoilt=2)
    for size in (1, 3):
        assert in_shards(VARIANTS["sgd"], size, clip=False, spoilt=2) == [expected] * size
