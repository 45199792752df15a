"""Buckets that give their memory back as soon as their gradients have left."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from springtide.comm.buckets import Buckets
from springtide.comm.layout import Field, plan_layout
from springtide.errors import UsageError
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


@pytest.mark.slow
def test_memory_that_first_step_alone_needs_is_let_go() -> None:
    before = tensor_bytes()
    buckets = passing()
    sums = [float(ELEMENTS * number) for number in reversed(range(BUCKETS))]
    assert step(buckets, patient=True) == sums
    assert tensor_bytes() - before >= BUCKETS * BUCKET_BYTES
    assert step(buckets) == sums
    assert step(buckets) == sums
    assert tensor_bytes() - before < 2 * BUCKET_BYTES


@pytest.mark.slow
def test_kept_micro_batches_take_the_memory_of_one_sum() -> None:
    """All gradients are there at once before the last micro-batch, and a few of its buckets at a time."""
    before = tensor_bytes()
    buckets = passing()
    buckets.keeps_base = True
    most = 0

    def start_sum(flat: torch.Tensor) -> Sent:
        nonlocal most
        most = max(most, tensor_bytes() - before)
        return Sent()

    for _ in range(2):
        buckets.begin(start_sum)
        for micro in range(3):
            for number in reversed(range(BUCKETS)):
                buckets.put(number, torch.ones(ELEMENTS), 1.0, micro, last=micro == 2)
        buckets.flush()
        assert [float(kept.sum()) for kept in buckets.base()] == [2.0 * ELEMENTS] * BUCKETS
    assert BUCKETS * BUCKET_BYTES <= most < (BUCKETS + 3) * BUCKET_BYTES
    buckets.begin(start_sum)
    assert tensor_bytes() - before < 2 * BUCKET_BYTES


@pytest.mark.slow
def test_step_without_gradients_lets_nothing_go() -> None:
    """New memory costs more than copying into what is there."""
    before = tensor_bytes()
    buckets = passing()
    step(buckets)
    for _ in range(3):
        buckets.begin(lambda flat: Sent())
    assert tensor_bytes() - before >= BUCKET_BYTES


@pytest.mark.slow
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


SHAPES = st.sampled_from([(), (0, 3), (5,), (70, 70), (4100,), (9000,), (3, 5, 2)])


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    data=st.data(), shapes=st.lists(SHAPES, min_size=1, max_size=8), bucket_bytes=st.integers(1, 99_000)
)
def test_any_part_of_a_bucket_is_its_weighted_gradients(
    data: st.DataObject, shapes: list[tuple[int, ...]], bucket_bytes: int
) -> None:
    """Large ones lie by themselves; what leaves is as if all were in one tensor."""
    layout = plan_layout(
        [Field(f"p{n}", shape, torch.float32) for n, shape in enumerate(shapes)], bucket_bytes
    )
    plain, passing = Buckets(layout), PassingBuckets(layout)
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    micros = data.draw(st.integers(1, 3))
    scales = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=micros, max_size=micros))
    missing = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    sent: dict[int, torch.Tensor] = {}

    def start_sum(flat: torch.Tensor) -> Sent:
        bucket = passing.leaving
        whole = torch.full((layout.sizes[bucket],), float("nan"))
        edges = sorted(data.draw(st.sets(st.integers(0, layout.sizes[bucket]), max_size=5)))
        for edge in pairwise([0, *edges, layout.sizes[bucket]]):
            passing.source(bucket).copy(edge, whole[slice(*edge)])
        sent[bucket] = whole
        return Sent()

    plain.begin(lambda flat: Sent())
    passing.begin(start_sum)
    for micro, scale in enumerate(scales):
        for index in reversed(range(len(shapes))):
            if index in missing:
                continue
            gradient = torch.randn(shapes[index], generator=draw)
            for buckets in (plain, passing):
                buckets.put(index, gradient.clone(), scale, micro, last=micro == micros - 1)
    plain.flush()
    passing.flush()
    assert len(sent) == len(layout.sizes)
    for index, (slot, field) in enumerate(zip(layout.slots, layout.fields, strict=True)):
        found = sent[slot.bucket][slot.offset : slot.offset + field.numel].view(field.shape)
        assert torch.equal(found, plain.views[index]), index


@pytest.mark.slow
def test_large_gradient_is_neither_copied_nor_changed() -> None:
    before = tensor_bytes()
    gradient = torch.full((2 * ELEMENTS,), 3.0)
    buckets = PassingBuckets(plan_layout([Field("p", (2 * ELEMENTS,), torch.float32)], 1))
    buckets.begin(lambda flat: Sent())
    buckets.patient = True
    assert buckets.put(0, gradient, 0.5, 0, last=True) is gradient
    assert tensor_bytes() - before < 1.5 * gradient.nbytes
    part = torch.empty(4)
    buckets.source(0).copy((8, 12), part)
    assert part.tolist() == [1.5] * 4
    buckets.flush()
    assert gradient.tolist() == [3.0] * 2 * ELEMENTS
    assert not buckets.views[0].any()
    alive = weakref.ref(gradient)
    del gradient
    assert alive() is None


def test_gradients_that_share_memory_add_up_each_by_itself() -> None:
    """Autograd gives views of one tensor to parameters whose gradients are equal."""
    fields = [Field(f"p{number}", (2 * ELEMENTS,), torch.float32) for number in range(2)]
    buckets = PassingBuckets(plan_layout(fields, 1 << 20))
    shared = torch.ones(2 * ELEMENTS)
    found = torch.empty(2)
    buckets.begin(lambda flat: buckets.source(0).copy((2 * ELEMENTS - 1, 2 * ELEMENTS + 1), found) or Sent())
    for micro in range(2):
        for number in (1, 0):
            buckets.put(number, shared.view(-1), 0.5, micro, last=micro == 1)
    buckets.flush()
    assert found.tolist() == [1.0, 1.0]
    assert set(shared.tolist()) == {1.0}


def test_large_gradient_that_was_changed_is_an_error() -> None:
    buckets = PassingBuckets(plan_layout([Field("p", (2 * ELEMENTS,), torch.float32)], 1))
    buckets.begin(lambda flat: Sent())
    buckets.patient = True
    buckets.put(0, torch.ones(2 * ELEMENTS), 1.0, 0, last=True).mul_(2)
    with pytest.raises(UsageError, match="a gradient was changed between"):
        buckets.flush()


@pytest.mark.slow
def test_large_gradients_of_a_dropped_step_are_let_go() -> None:
    before = tensor_bytes()
    buckets = PassingBuckets(plan_layout([Field("p", (2 * ELEMENTS,), torch.float32)], 1))
    buckets.begin(lambda flat: Sent())
    buckets.patient = True
    buckets.put(0, torch.ones(2 * ELEMENTS), 1.0, 0, last=True)
    assert tensor_bytes() - before >= 8 * ELEMENTS
    buckets.begin(lambda flat: Sent())
    assert tensor_bytes() - before < 4 * ELEMENTS


def test_backward_fills_buckets_of_all_sizes() -> None:
    """Autograd's own hooks gather small gradients, and leave large ones where they are."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 300), torch.nn.Linear(300, 7), torch.nn.Linear(7, 900))
    parameters = list(model.parameters())
    layout = plan_layout([Field(str(n), tuple(p.shape), p.dtype) for n, p in enumerate(parameters)], 30_000)
    buckets = PassingBuckets(layout)
    sent: dict[int, torch.Tensor] = {}

    def start_sum(flat: torch.Tensor) -> Sent:
        whole = sent[buckets.leaving] = torch.empty(layout.sizes[buckets.leaving])
        buckets.source(buckets.leaving).copy((0, whole.numel()), whole)
        return Sent()

    def alone(index: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = buckets.put(index, gradient, 0.5, 0, last=True)
        buckets.open_gathering(0.5, 0, lambda count: None)

    handles = buckets.watch(parameters, alone)
    buckets.begin(start_sum)
    loss = model(torch.randn(4, 30)).square().mean()
    truth = torch.autograd.grad(loss, parameters, retain_graph=True)
    loss.backward()
    buckets.flush()
    for handle in handles:
        handle.remove()
    for slot, parameter, true in zip(layout.slots, parameters, truth, strict=True):
        found = sent[slot.bucket][slot.offset : slot.offset + true.numel()].view(true.shape)
        assert torch.equal(found, true * 0.5)
        assert parameter.grad is not None
        assert not parameter.grad.any()
