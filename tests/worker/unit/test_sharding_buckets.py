"""Buckets that give their memory back as soon as their gradients have left."""

from __future__ import annotations

import gc

import torch

from springtide.comm.layout import Field, plan_layout
from springtide.sharding.buckets import PassingBuckets

ELEMENTS, BUCKETS = 4096, 8
BUCKET_BYTES = 4 * ELEMENTS


class Sent:
    """A sum that is there at once."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def passing() -> PassingBuckets:
    fields = [Field(f"p{number}", (ELEMENTS,), torch.float32) for number in range(BUCKETS)]
    return PassingBuckets(plan_layout(fields, 1))


def tensor_bytes() -> int:
    """Return the bytes of all memory for tensors in this process."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        # Others' tensors may have no storage.
        if type(item) is torch.Tensor and item.device.type == "cpu" and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def step(buckets: PassingBuckets, patient: bool = False) -> list[float]:
    """Make a step whose gradients come one by one; return the sums that left, as one number each."""
    sent: list[float] = []

    def start_sum(flat: torch.Tensor) -> Sent:
        sent.append(float(flat.sum()))
        return Sent()

    buckets.begin(start_sum)
    buckets.patient = patient
    for number in reversed(range(BUCKETS)):
        buckets.put(number, torch.full((ELEMENTS,), float(number)), 1.0, 0, last=True)
    buckets.flush()
    return sent


def test_memory_that_first_step_alone_needs_is_let_go() -> None:
    before = tensor_bytes()
    buckets = passing()
    sums = [float(ELEMENTS * number) for number in reversed(range(BUCKETS))]
    assert step(buckets, patient=True) == sums
    assert tensor_bytes() - before >= BUCKETS * BUCKET_BYTES
    assert step(buckets) == sums
    assert step(buckets) == sums
    assert tensor_bytes() - before < 2 * BUCKET_BYTES


def test_step_without_gradients_lets_nothing_go() -> None:
    """New memory costs more than copying into what is there."""
    before = tensor_bytes()
    buckets = passing()
    step(buckets)
    for _ in range(3):
        buckets.begin(lambda flat: Sent())
    assert tensor_bytes() - before >= BUCKET_BYTES


def test_small_bucket_leaves_large_memory_to_large_bucket() -> None:
    sizes = [64, ELEMENTS]
    fields = [Field(f"p{number}", (size,), torch.float32) for number, size in enumerate(sizes)]
    buckets = PassingBuckets(plan_layout(fields, 1))
    before = tensor_bytes()
    for patient in (True, False, False, False):
        buckets.begin(lambda flat: Sent())
        buckets.patient, buckets.in_order = patient, False
        for number in (0, 1):
            buckets.put(number, torch.ones(sizes[number]), 1.0, 0, last=True)
        buckets.flush()
    assert tensor_bytes() - before < 1.5 * BUCKET_BYTES
