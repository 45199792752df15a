"""Gradients whose sum over the members failed: a worker keeps its own, and goes on with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm.buckets import Buckets
from springtide.comm.compression import CastBuckets
from springtide.comm.layout import Field, plan_layout
from springtide.comm.process_group import Work
from springtide.sharding.buckets import PassingBuckets
from springtide.train_step.salvaged import MOST, copies_pay, has_room

SHAPES = [(3, 4), (5,), (2, 2, 2), (65, 64), (7,)]
"""One of them is so large that `PassingBuckets` leaves it where it is."""
LAYOUT = plan_layout([Field(f"p{n}", shape, torch.float32) for n, shape in enumerate(SHAPES)], 60)


class Failing:
    """A sum that fails, and leaves something of others in the buffer."""

    def wait(self) -> object:
        raise RuntimeError("Connection reset by peer")

    def is_completed(self) -> bool:
        return True


def fail(tensor: torch.Tensor) -> Work:
    tensor.mul_(3).add_(100.0)
    return Failing()


def fail_elsewhere(tensor: torch.Tensor) -> Work:
    return Failing()


def on_servers() -> Buckets:
    buckets = Buckets(LAYOUT)
    buckets.keeps_what_leaves = True
    return buckets


KINDS: dict[str, tuple[Callable[[], Buckets], Callable[[torch.Tensor], Work], bool]] = {
    "plain": (lambda: Buckets(LAYOUT), fail, False),
    "cast": (lambda: CastBuckets(LAYOUT, None, torch.bfloat16), fail, True),
    "passing": (lambda: PassingBuckets(LAYOUT), fail_elsewhere, False),
    "servers": (on_servers, fail_elsewhere, True),
}
"""Makes buckets, a sum that fails, and whether what has left stays there, for each way of the gradients."""


def contents(buckets: Buckets, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bucket that leaves.

    Args:
        buckets: that it is one of.
        tensor: which the sum is started with.
    """
    if not isinstance(buckets, PassingBuckets):
        return tensor.clone()
    whole = torch.full((LAYOUT.sizes[buckets.leaving],), float("nan"))
    buckets.source(buckets.leaving).copy((0, whole.numel()), whole)
    return whole


def gradient(index: int, micro: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(SHAPES[index]).numel()).view(SHAPES[index]) * (10.0**micro)


Present = list[list[bool]]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Present, int]:
    """Which parameters have a gradient in which micro-batch, and after how many of the last one's the group
    breaks.
    """
    count = draw(st.integers(1, 4))
    rows = st.lists(st.booleans(), min_size=len(SHAPES), max_size=len(SHAPES))
    present = draw(st.lists(rows, min_size=count, max_size=count))
    return present, draw(st.integers(0, len(SHAPES)))


def put_all(buckets: Buckets, present: Present, start: int = 0, last_puts: int = len(SHAPES)) -> None:
    """Put in the gradients of a body's micro-batches, numbered from `start` on; of the last one, so many."""
    for number, row in enumerate(present):
        last = number == len(present) - 1
        puts = [index for index in reversed(range(len(SHAPES))) if row[index]]
        for index in puts[: last_puts if last else None]:
            buckets.put(index, gradient(index, start + number), 1.0, number, last)


def expected(present: Present, micros: range) -> list[torch.Tensor]:
    return [
        sum((gradient(index, micro) for micro in micros if present[micro][index]), torch.zeros(shape))
        for index, shape in enumerate(SHAPES)
    ]


def views(flats: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        flats[slot.bucket][slot.offset : slot.offset + field.numel].view(field.shape)
        for field, slot in zip(LAYOUT.fields, LAYOUT.slots, strict=True)
    ]


def check_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, found, wanted)), list(zip(found, wanted, strict=True))


@settings(max_examples=60)
@given(bodies(), st.booleans(), st.booleans(), st.sampled_from(sorted(KINDS)))
def test_own_sums_after_a_failed_one(body: tuple[Present, int], copies: bool, base: bool, kind: str) -> None:
    """All is there with copies; without them what has not left, or all but the last micro-batch."""
    present, _ = body
    make, start_sum, stays = KINDS[kind]
    buckets = make()
    buckets.copies, buckets.keeps_base = copies, base
    for _ in range(2):  # nothing of an earlier step is left over
        buckets.begin(start_sum)
        put_all(buckets, present)
        buckets.flush()
        with pytest.raises(RuntimeError, match="reset"):
            buckets.wait()
    assert buckets.has_own == (copies or stays)
    if buckets.has_own:
        check_equal(views(buckets.own()), expected(present, range(len(present))))
    if base and any(any(row) for row in present[:-1]):
        used = [any(row[index] for row in present[:-1]) for index in range(len(SHAPES))]
        assert buckets.in_base == used
        check_equal(views(buckets.base()), expected(present, range(len(present) - 1)))


@settings(max_examples=60)
@given(bodies(), bodies(), st.booleans(), st.booleans(), st.sampled_from(sorted(set(KINDS) - {"cast"})))
def test_another_body_goes_on_with_them(
    first: tuple[Present, int], second: tuple[Present, int], base: bool, zeros: bool, kind: str
) -> None:
    """A body that ends early, and another one that adds the rest: the sum is that of one body."""
    present, puts = first
    buckets = KINDS[kind][0]()
    buckets.keeps_base = base
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor) -> Work:
        sent.append(contents(buckets, tensor))
        return Failing()

    buckets.holds = lambda: True  # the step is dropped: nothing leaves any more
    buckets.begin(send)
    put_all(buckets, present, 0, puts)
    assert buckets.has_own
    used = buckets.used
    own = buckets.own()
    kept = [tensor.clone() for tensor in own]
    buckets.holds = lambda: False
    buckets.begin(send)
    buckets.go_on_with(own, used)
    assert buckets.carried == used
    rest = second[0]
    if zeros:  # a body without samples, whose gradients count for nothing
        for index, is_there in enumerate(rest[0]):
            if is_there:
                buckets.put(index, torch.full(SHAPES[index], float("nan")), 0.0, 0, True)
    else:
        put_all(buckets, rest, len(present))
    buckets.flush()
    row = [is_there and at < puts for at, is_there in _in_order(present[-1])]
    whole = [*present[:-1], row, *([] if zeros else rest)]
    check_equal(own, kept)  # the next try at the step may be dropped, too
    found = torch.cat([tensor.reshape(-1) for tensor in sent])
    assert found.numel() == sum(LAYOUT.sizes)
    flats = [torch.empty(0)] * len(LAYOUT.sizes)
    for bucket, tensor in enumerate(sent):
        flats[bucket] = tensor
    for view, index in zip(views(flats), itertools.count(), strict=False):
        wanted = sum(
            (gradient(index, micro) for micro, there in enumerate(whole) if there[index]),
            torch.zeros(SHAPES[index]),
        )
        torch.testing.assert_close(view, wanted)


def _in_order(row: list[bool]) -> list[tuple[int, bool]]:
    """Return for each parameter the place of its gradient in the micro-batch, from 0, and if it has one."""
    places, at = [0] * len(row), 0
    for index in reversed(range(len(row))):
        places[index] = at
        at += row[index]
    return list(zip(places, row, strict=True))


def test_copies_are_made_where_a_step_is_long() -> None:
    size = 26 << 20
    assert not copies_pay(size, 0.0, 1, 0.0, "cpu"), "nothing is known yet"
    assert not copies_pay(size, 0.2, 1, 0.0, "cpu")
    assert copies_pay(size, 5.0, 1, 0.0, "cpu")
    assert not copies_pay(size, 5.0, 8, 0.0, "cpu"), "seven of eight micro-batches are kept anyway"
    assert copies_pay(size, 60.0, 8, 0.0, "cpu")
    assert not copies_pay(size, 60.0, 1, 60 * MOST * 1.01, "cpu"), "measured"
    assert copies_pay(size, 0.5, 1, 0.0, "cuda")
    assert not copies_pay(size, 0.5, 1, 0.1, "cuda")


def test_copies_need_room() -> None:
    assert has_room(100, None)
    assert has_room(100, 300)
    assert not has_room(100, 299)
