"""Buckets that give their memory back when they have left."""

from __future__ import annotations

import torch

from springtide.comm.layout import Field, plan_layout
from springtide.comm.process_group import Work
from springtide.sharding.buckets import PassingBuckets

COUNT, SIZE = 8, 1024


class Sent:
    """A bucket on its way."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def make() -> PassingBuckets:
    layout = plan_layout([Field(f"p{n}", (SIZE,), torch.float32) for n in range(COUNT)], 4 * SIZE)
    assert len(layout.sizes) == COUNT
    return PassingBuckets(layout, torch.device("cpu"))


def one_step(buckets: PassingBuckets, patient: bool) -> tuple[list[list[float]], int]:
    """Make a step; return the values that left, by bucket, and the most bytes that gradients took."""
    left: list[list[float]] = []
    most = 0

    def start_sum(flat: torch.Tensor) -> Work:
        left.append(flat.tolist())
        return Sent()

    buckets.patient = patient
    buckets.begin(start_sum)
    for index in reversed(range(COUNT)):
        buckets.put(index, torch.full((SIZE,), 1.0 + index), 1.0, 0, True)
        most = max(most, buckets.memory_bytes)
    buckets.flush()
    buckets.wait()
    return left, max(most, buckets.memory_bytes)


def test_each_bucket_leaves_whole() -> None:
    buckets = make()
    for patient in (True, False, False):
        left, _ = one_step(buckets, patient)
        assert left == [[1.0 + index] * SIZE for index in reversed(range(COUNT))]


def test_memory_of_the_first_step_is_given_back() -> None:
    """All buckets are filled before one leaves in a process's first step, and one after the other then."""
    buckets = make()
    whole, one = 4 * SIZE * COUNT, 4 * SIZE
    assert one_step(buckets, patient=True)[1] == whole
    one_step(buckets, patient=False)
    assert one_step(buckets, patient=False)[1] == one


def test_views_of_a_bucket_that_left_take_no_memory() -> None:
    buckets = make()
    one_step(buckets, patient=False)
    assert all(view.stride() == (0,) and not view.any() for view in buckets.views)
