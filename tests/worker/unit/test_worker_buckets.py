"""Gradients in buckets: weights, order of sending, and what must not happen to them."""

from __future__ import annotations

import pytest
import torch

from springtide.comm.buckets import Buckets
from springtide.comm.layout import Field, plan_layout
from springtide.errors import UsageError


class Recorder:
    """Remembers what was sent, in order; the sums are those of one member."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> Recorder:
        self.sent.append(tensor.clone())
        return self

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def make(count: int = 3) -> tuple[Buckets, Recorder]:
    fields = [Field(f"p{i}", (2, 3), torch.float32) for i in range(count)]
    buckets, recorder = Buckets(plan_layout(fields, 1)), Recorder()
    buckets.begin(recorder)
    return buckets, recorder


def test_micro_batches_add_up_by_weight() -> None:
    buckets, _ = make()
    one, two = torch.randn(2, 3), torch.randn(2, 3)
    buckets.put(0, one, 0.25, 0, last=False)
    view = buckets.put(0, two, 0.75, 1, last=True)
    torch.testing.assert_close(view, 0.25 * one + 0.75 * two)


def test_buckets_are_sent_in_order_and_as_soon_as_possible() -> None:
    buckets, recorder = make()
    buckets.put(1, torch.ones(2, 3), 1.0, 0, last=True)
    assert recorder.sent == []  # the bucket of parameter 2 comes first on all members
    buckets.put(2, torch.full((2, 3), 2.0), 1.0, 0, last=True)
    assert [tensor.max().item() for tensor in recorder.sent] == [2.0, 1.0]
    buckets.flush()
    assert [tensor.max().item() for tensor in recorder.sent] == [2.0, 1.0, 0.0]


def test_parameter_without_gradient_counts_as_zero_each_step() -> None:
    buckets, recorder = make()
    for index in (2, 1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.begin(recorder)
    recorder.sent.clear()
    buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.flush()
    assert [tensor.sum().item() for tensor in recorder.sent] == [0.0, 0.0, 6.0]
    assert buckets.used == [True, False, False]


def test_parameter_of_earlier_micro_batch_keeps_its_gradient() -> None:
    buckets, recorder = make(1)
    buckets.put(0, torch.ones(2, 3), 0.5, 0, last=False)
    buckets.flush()
    assert recorder.sent[0].sum().item() == 3.0
    assert buckets.has(0, 0)
    assert not buckets.has(0, 1)


def test_stand_in_puts_in_zeros_even_for_nan() -> None:
    buckets, _ = make(1)
    buckets.put(0, torch.full((2, 3), float("nan")), 0.0, 0, last=False)
    view = buckets.put(0, torch.full((2, 3), float("inf")), 0.0, 1, last=True)
    assert view.tolist() == torch.zeros(2, 3).tolist()


def test_change_after_sending_is_an_error_that_names_the_remedy() -> None:
    buckets, _ = make(1)
    view = buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    view.mul_(0.5)
    with pytest.raises(UsageError, match="clip_norm"):
        buckets.wait()


def test_change_between_micro_batches_is_an_error() -> None:
    buckets, _ = make(1)
    view = buckets.put(0, torch.ones(2, 3), 1.0, 0, last=False)
    view.zero_()
    with pytest.raises(UsageError, match="changed between"):
        buckets.put(0, torch.ones(2, 3), 1.0, 1, last=True)


def test_two_backwards_in_one_micro_batch() -> None:
    buckets, _ = make(1)
    buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    with pytest.raises(UsageError, match=r"p0 .* call backward\(\) once"):
        buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)


def test_patient_buckets_add_up_and_leave_at_the_end() -> None:
    buckets, recorder = make(2)
    buckets.patient = True
    for index in (1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.put(0, torch.ones(2, 3), 0.5, 0, last=True)
    assert recorder.sent == []
    buckets.flush()
    buckets.wait()
    assert [tensor.max().item() for tensor in recorder.sent] == [1.0, 1.5]


def test_sparse_gradient_is_refused() -> None:
    buckets, _ = make(1)
    with pytest.raises(UsageError, match="sparse=False"):
        buckets.put(0, torch.eye(2).to_sparse(), 1.0, 0, last=True)


def test_norm_and_scale() -> None:
    buckets, _ = make(2)
    buckets.put(0, torch.full((2, 3), 3.0), 1.0, 0, last=True)
    buckets.put(1, torch.full((2, 3), 4.0), 1.0, 0, last=True)
    assert buckets.square_norm([0, 1]).item() == pytest.approx(6 * 25)
    assert buckets.square_norm([]).item() == 0.0
    buckets.scale(0.5)
    assert buckets.views[1].max().item() == 2.0


def test_what_nobody_used_in_the_last_step_holds_up_no_bucket() -> None:
    """It leaves as zeros, whatever lies there from the step before."""
    buckets, recorder = make()
    for index in (2, 1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    recorder.sent.clear()
    buckets.begin(recorder)
    buckets.expect_unused([2])
    buckets.put(1, torch.full((2, 3), 2.0), 1.0, 0, last=True)
    assert [tensor.max().item() for tensor in recorder.sent] == [0.0, 2.0]
    buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.flush()
    assert [tensor.max().item() for tensor in recorder.sent] == [0.0, 2.0, 1.0]
    assert buckets.used == [True, True, False]


def test_gradient_before_its_bucket_leaves_is_not_late() -> None:
    buckets, recorder = make()
    buckets.expect_unused([1])
    buckets.put(1, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.put(2, torch.full((2, 3), 2.0), 1.0, 0, last=True)
    assert [tensor.max().item() for tensor in recorder.sent] == [2.0, 1.0]
    assert not buckets.is_late(1)


def test_late_gradients_are_summed_once_more() -> None:
    """Of two micro-batches the first was in time: both count."""
    buckets, recorder = make()
    buckets.expect_unused([1, 2])
    buckets.put(1, torch.ones(2, 3), 0.5, 0, last=False)
    buckets.put(0, torch.ones(2, 3), 1.0, 1, last=True)
    assert len(recorder.sent) == 3, "all have left"
    buckets.put(1, torch.full((2, 3), 4.0), 0.5, 1, last=True)
    buckets.put(2, torch.full((2, 3), float("nan")), 0.0, 1, last=True)  # of a stand-in
    assert [buckets.is_late(index) for index in range(3)] == [False, True, True]
    buckets.flush()
    buckets.wait()
    recorder.sent.clear()
    started = buckets.start_late([1, 2], recorder)
    assert [tensor.tolist() for tensor in recorder.sent] == [[2.0] * 6 + [0.0] * 6]
    buckets.add_late([1, 2], [flat for flat, _ in started])
    assert buckets.views[1].unique().tolist() == [2.5]
    assert buckets.views[2].unique().tolist() == [0.0]
    buckets.check_untouched()


def test_late_gradients_of_several_types_are_one_sum_each() -> None:
    kinds = [torch.float32, torch.float64, torch.float32]
    fields = [Field(f"p{i}", (2,), kind) for i, kind in enumerate(kinds)]
    buckets, recorder = Buckets(plan_layout(fields, 1)), Recorder()
    buckets.begin(recorder)
    buckets.expect_unused([0, 1, 2])
    buckets.flush()
    for index, kind in enumerate(kinds):
        buckets.put(index, torch.full((2,), index + 1.0, dtype=kind), 1.0, 0, last=True)
    started = buckets.start_late([0, 1, 2], recorder)
    assert [flat.tolist() for flat, _ in started] == [[1.0, 1.0, 3.0, 3.0], [2.0, 2.0]]
    buckets.add_late([0, 1, 2], [flat for flat, _ in started])
    assert [view.tolist() for view in buckets.views] == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
