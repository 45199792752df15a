"""Gradients in buckets: weights, order of sending, and what must not happen to them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from springtide.comm.buckets import Buckets
from springtide.comm.cuda_streams import Writers
from springtide.comm.layout import Field, plan_layout
from springtide.comm.process_group import Group
from springtide.errors import UsageError
from springtide.train_step.bucket_order import TRIES, BucketOrder


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


def make(count: int = 3, each: int = 1) -> tuple[Buckets, Recorder]:
    """Buckets of parameters of [2, 3], so many in each, the last ones first."""
    fields = [Field(f"p{i}", (2, 3), torch.float32) for i in range(count)]
    buckets, recorder = Buckets(plan_layout(fields, 64 * each)), Recorder()
    buckets.begin(recorder)
    return buckets, recorder


class Last:
    """A sum whose end frees a group: it notes on which thread."""

    def __init__(self, freed_on: list[threading.Thread]) -> None:
        self._freed_on = freed_on

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def __del__(self) -> None:
        self._freed_on.append(threading.current_thread())


def test_sums_of_a_released_group_end_on_another_thread() -> None:
    freed_on: list[threading.Thread] = []
    buckets, _ = make(each=3)
    buckets.begin(lambda tensor: Last(freed_on))
    for index in range(3):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.wait()
    assert freed_on == []
    buckets.drop_works()
    for thread in threading.enumerate():
        if thread.name == "springtide-drop":
            thread.join(10)
    assert len(freed_on) == 1
    assert freed_on[0] is not threading.current_thread()
    buckets.begin(lambda tensor: Last(freed_on))  # nothing is left that this could free
    assert len(freed_on) == 1


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


def test_complete_bucket_leaves_at_once_where_no_order_is_kept() -> None:
    buckets, recorder = make()
    buckets.in_order = False
    numbers = []

    def start(tensor: torch.Tensor) -> Recorder:
        numbers.append(buckets.leaving)
        return recorder(tensor)

    for _ in range(2):
        buckets.begin(start)
        buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
        assert [tensor.max().item() for tensor in recorder.sent] == [1.0]
        buckets.put(2, torch.full((2, 3), 2.0), 1.0, 0, last=True)
        buckets.flush()
        assert [tensor.max().item() for tensor in recorder.sent] == [1.0, 2.0, 0.0]
        assert numbers == [2, 0, 1]
        buckets.wait()
        recorder.sent.clear()
        numbers.clear()


def test_order_is_kept_where_members_sum() -> None:
    buckets, _ = make()
    numbers = []

    def start(tensor: torch.Tensor) -> Recorder:
        numbers.append(buckets.leaving)
        return Recorder()

    buckets.begin(start)
    for index in (0, 1):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    assert numbers == []
    buckets.flush()
    assert numbers == [0, 1, 2]


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
    """A parameter that nobody used in the last step holds up no bucket.

    Zeros leave in its place, whatever its memory holds from the step before.
    """
    buckets, recorder = make(4, each=2)
    for index in (3, 2, 1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    recorder.sent.clear()
    buckets.begin(recorder)
    buckets.expect_unused([3])
    buckets.put(2, torch.full((2, 3), 2.0), 1.0, 0, last=True)
    assert [tensor.sum().item() for tensor in recorder.sent] == [12.0]
    for index in (1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.flush()
    assert [tensor.sum().item() for tensor in recorder.sent] == [12.0, 12.0]
    assert buckets.used == [True, True, True, False]


def test_bucket_that_nobody_used_is_not_sent() -> None:
    buckets, recorder = make()
    for index in (2, 1, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 0, last=True)
    for _ in range(3):
        recorder.sent.clear()
        buckets.begin(recorder)
        buckets.expect_unused([2])
        for index in (1, 0):
            buckets.put(index, torch.full((2, 3), index + 1.0), 1.0, 0, last=True)
        buckets.flush()
        buckets.wait()
        assert [tensor[:6].max().item() for tensor in recorder.sent] == [2.0, 1.0]
        assert buckets.views[2].unique().tolist() == [0.0]
        assert buckets.used == [True, True, False]
        buckets.scale(float("nan"))  # a norm that is none leaves no trace in the next step


def test_bucket_left_out_is_zeros_again_after_a_sum_wrote_it() -> None:
    """A sum writes into a bucket's memory by an address, of which torch learns nothing."""
    buckets, recorder = make(2)
    for expected in ([1], [], [1]):
        buckets.begin(recorder)
        buckets.expect_unused(expected)
        buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
        buckets.flush()
        buckets.wait()
        if not expected:
            buckets.views[1].numpy()[:] = 7.0
    assert buckets.views[1].unique().tolist() == [0.0]


def test_bucket_left_out_is_known_apart_from_sums() -> None:
    """A dropped step leaves a member zeros for what it left out, and what came late."""
    buckets, _ = make(2)
    buckets.copies = True
    buckets.expect_unused([1])
    buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    assert buckets.has_own
    buckets.put(1, torch.full((2, 3), 3.0), 0.5, 0, last=True)
    assert [own.sum().item() for own in buckets.own()] == [9.0, 6.0]


@pytest.mark.parametrize("keeps_base", [False, True])
def test_gradient_for_a_bucket_left_out_is_late(keeps_base: bool) -> None:
    """Members that had none for it send nothing, so one that comes before the bucket's turn is late, too."""
    buckets, recorder = make()
    buckets.keeps_base = keeps_base
    for expected in ([], [1]):
        recorder.sent.clear()
        buckets.begin(recorder)
        buckets.expect_unused(expected)
        buckets.put(1, torch.ones(2, 3), 0.5, 0, last=False)
        buckets.put(1, torch.full((2, 3), 4.0), 0.5, 1, last=True)
        for index in (2, 0):
            buckets.put(index, torch.ones(2, 3), 1.0, 1, last=True)
        buckets.flush()
        buckets.wait()
        assert len(recorder.sent) == 3 - len(expected)
        assert buckets.is_late(1) == bool(expected)
    assert buckets.views[1].unique().tolist() == [0.0]
    started = buckets.start_late([1], recorder)
    buckets.add_late([1], [flat for flat, _ in started])
    assert buckets.views[1].unique().tolist() == [2.5]
    buckets.check_untouched()


def test_gradient_kept_from_a_dropped_try_is_late_if_left_out() -> None:
    buckets, recorder = make(2)
    buckets.expect_unused([1])
    buckets.go_on_with([torch.full((16,), 3.0), torch.zeros(16)], [False, True])
    buckets.put(0, torch.ones(2, 3), 1.0, 0, last=True)
    buckets.flush()
    assert len(recorder.sent) == 1
    assert buckets.is_late(1)
    assert buckets.used == [True, True]
    started = buckets.start_late([1], recorder)
    assert [flat.tolist() for flat, _ in started] == [[3.0] * 6]


def test_bucket_that_was_wrong_to_leave_out_is_sent() -> None:
    buckets, recorder = make(4, each=2)
    buckets.expect_unused([0, 1, 2, 3], returned=[0])
    buckets.flush()
    assert len(recorder.sent) == 1, "of the bucket of parameters 1 and 0"


def test_gradient_before_its_bucket_leaves_is_not_late() -> None:
    buckets, recorder = make(4, each=2)
    buckets.expect_unused([1])
    buckets.put(1, torch.ones(2, 3), 1.0, 0, last=True)
    for index in (0, 2, 3):
        buckets.put(index, torch.full((2, 3), 2.0), 1.0, 0, last=True)
    assert [tensor.sum().item() for tensor in recorder.sent] == [24.0, 18.0]
    assert not buckets.is_late(1)


def test_late_gradients_are_summed_once_more() -> None:
    """Late gradients are summed once more: of two micro-batches of which only the first was in time, both
    count.
    """
    buckets, recorder = make(4, each=2)
    buckets.expect_unused([1, 3])
    buckets.put(1, torch.ones(2, 3), 0.5, 0, last=False)
    for index in (2, 0):
        buckets.put(index, torch.ones(2, 3), 1.0, 1, last=True)
    assert len(recorder.sent) == 2, "all have left"
    buckets.put(1, torch.full((2, 3), 4.0), 0.5, 1, last=True)
    buckets.put(3, torch.full((2, 3), float("nan")), 0.0, 1, last=True)  # of a stand-in
    assert [buckets.is_late(index) for index in range(4)] == [False, True, False, True]
    buckets.flush()
    buckets.wait()
    recorder.sent.clear()
    started = buckets.start_late([1, 3], recorder)
    assert [tensor.tolist() for tensor in recorder.sent] == [[2.0] * 6 + [0.0] * 6]
    buckets.add_late([1, 3], [flat for flat, _ in started])
    assert buckets.views[1].unique().tolist() == [2.5]
    assert buckets.views[3].unique().tolist() == [0.0]
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


class Watched:
    """A model whose gradients come by its buckets' own hooks, as the trainer has it; bodies of one step."""

    def __init__(self, sizes: Sequence[int], scale: float = 0.5, bucket_bytes: int = 150) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
        fields = [Field(f"p{i}", (size,), torch.float32) for i, size in enumerate(sizes)]
        self.buckets, self.recorder = Buckets(plan_layout(fields, bucket_bytes)), Recorder()
        self.scale, self.micro, self.alone, self.full = scale, 0, list[int](), list[int]()
        self.when_full: Callable[[int], object] = self.full.append
        self.handles = self.buckets.watch(self.parameters, self.put)
        self.buckets.begin(self.recorder)

    def put(self, index: int, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self.alone.append(index)
        last = self.micro == 1 or self.scale == 0.5
        gradient = self.buckets.put(index, parameter.grad, self.scale, self.micro, last)
        parameter.grad = gradient if last else None
        if last:
            self.buckets.open_gathering(self.scale, self.micro, lambda count: self.when_full(count))

    def backward(self, *used: int, factor: float = 1.0) -> None:
        torch.stack([(self.parameters[index] * (index + factor)).sum() for index in used]).sum().backward()


@given(st.lists(st.sampled_from([1, 3, 17, 5000]), min_size=1, max_size=8), st.data())
def test_gathered_gradients_are_those_put_in_one_by_one(sizes: list[int], data: st.DataObject) -> None:
    """Gathered gradients equal those put in one by one.

    That holds for large and small ones, for missing ones, and for ones put in by an earlier micro-batch.
    """
    used = [index for index in range(len(sizes)) if data.draw(st.booleans())] or [0]
    earlier = [index for index in used if data.draw(st.booleans())]
    watched = Watched(sizes, scale=0.25 if earlier else 0.5)
    if earlier:
        watched.backward(*earlier)
        watched.micro = 1
    watched.backward(*used, factor=2.0)
    views = watched.buckets.views
    assert all(watched.parameters[index].grad is views[index] for index in used)
    watched.buckets.flush()
    watched.buckets.wait()
    for index, view in enumerate(views):
        once = 0.25 * (index + 1) if index in earlier else 0.0
        again = watched.scale * (index + 2) if index in used else 0.0
        assert view.unique().tolist() == [once + again], index
    assert len(watched.recorder.sent) == len(watched.buckets.layout.members)


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=2, max_size=4))
def test_steps_may_gather_other_parameters_each(steps: list[set[int]]) -> None:
    """The weights of a step's gradients have nothing to do with which were gathered in the step before."""
    watched = Watched([1, 3, 17, 5000, 2, 4])
    for used in steps:
        watched.buckets.begin(watched.recorder)
        for parameter in watched.parameters:
            parameter.grad = None
        watched.backward(*sorted(used), factor=2.0)
        watched.buckets.flush()
        watched.buckets.wait()
        expected = [[0.5 * (index + 2)] if index in used else [0.0] for index in range(6)]
        assert [view.unique().tolist() for view in watched.buckets.views] == expected


class Multiplied(TorchDispatchMode):
    """Notes the sizes of the tensors that each call multiplies by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[list[int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        if func.name() == "aten::_foreach_mul_.Scalar":
            self.sizes.append([tensor.numel() for tensor in args[0]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("first", "expected"), [(2, [32, 32]), (4, [64])])
def test_weights_take_one_call_for_neighbours(first: int, expected: list[int]) -> None:
    """A first gradient, which is put in alone, splits its bucket's memory in two, and no further."""
    watched = Watched([16] * 5, bucket_bytes=1000)
    with Multiplied() as multiplied:
        watched.backward(*(index for index in range(5) if index != first), first, factor=2.0)
    assert multiplied.sizes == [expected]
    assert [view.tolist() for view in watched.buckets.views] == [[0.5 * (i + 2)] * 16 for i in range(5)]


def test_full_bucket_leaves_during_backward() -> None:
    watched = Watched([3] * 6)
    counted: list[int] = []
    watched.when_full = lambda count: counted.append(len(watched.recorder.sent))
    watched.backward(*range(6))
    assert len(watched.recorder.sent) == len(watched.buckets.layout.members)
    assert counted == sorted(counted)
    assert counted[0] == 0
    assert len(watched.alone) == 1, "one call for each gradient"


def test_what_waits_is_copied_at_the_end_of_backward() -> None:
    """The script sees the views, and a change of them is found."""
    watched = Watched([3, 3, 3])
    watched.backward(0, 1)  # the third one of the bucket never comes
    assert watched.recorder.sent == []
    gradient = watched.parameters[0].grad
    assert gradient is watched.buckets.views[0]
    gradient.mul_(2)
    with pytest.raises(UsageError, match="clip_norm"):
        watched.buckets.flush()


def test_closed_gathering_has_the_next_gradient_looked_at() -> None:
    watched = Watched([3] * 4)

    def close(gradient: torch.Tensor) -> torch.Tensor:
        watched.buckets.close_gathering()
        return gradient

    watched.parameters[2].register_hook(close)
    watched.backward(*range(4))
    assert 2 in watched.alone


def test_refusal_of_a_full_bucket_leaves_backward() -> None:
    watched = Watched([3] * 6)

    def refuse(count: int) -> None:
        raise UsageError("dropped")

    watched.when_full = refuse
    with pytest.raises(UsageError, match="dropped"):
        watched.backward(*range(6))
    assert watched.recorder.sent == []


def test_second_backward_of_a_micro_batch_is_looked_at() -> None:
    watched = Watched([3] * 4)
    watched.backward(*range(4))
    with pytest.raises(UsageError, match=r"call backward\(\) once"):
        watched.backward(3)


def test_gradients_of_two_streams_wait_for_each_other() -> None:
    """Gradients of two streams wait for each other.

    A gradient that waits is copied on its own stream, and the rest goes on behind it.
    """
    order: list[tuple[str, str]] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            order.append((self.name, other.name))

    main, side = Stream("main"), Stream("side")
    current = [main]

    @contextlib.contextmanager
    def switch(stream: Stream) -> Iterator[None]:
        before, current[0] = current[0], stream
        yield
        current[0] = before

    writers = Writers(lambda: current[0], switch)
    assert writers.is_with(0)
    current[0] = side
    assert not writers.is_with(0), "its memory is another stream's"
    writers.write(0, onto=False)
    with writers.with_first(0):
        assert current[0] is main
    assert order == [("main", "side"), ("side", "main")]
    writers.join(0)
    assert order[2:] == [("side", "main")]
    assert writers.is_with(0), "the next ones may wait on any stream"


def test_buckets_leave_in_the_order_that_was_agreed() -> None:
    buckets, recorder = make()
    buckets.use_order([0, 2, 1])
    buckets.begin(recorder)
    for index in (0, 1, 2):
        buckets.put(index, torch.full((2, 3), index + 1.0), 1.0, 0, last=True)
    # Parameter 2 is in bucket 0, which leaves first.
    assert [tensor.max().item() for tensor in recorder.sent] == [3.0, 1.0, 2.0]
    assert buckets.filled() == [2, 1, 0]
    buckets.wait()


def members(size: int, count: int) -> list[tuple[Buckets, BucketOrder, Group, Recorder]]:
    made = []
    for rank in range(size):
        buckets, recorder = make(count)
        made.append((buckets, BucketOrder(buckets, travels=True), Group(None, rank, size, 1.0), recorder))
    return made


def step(made: list[tuple[Buckets, BucketOrder, Group, Recorder]], arrival: Sequence[Sequence[int]]) -> None:
    for (buckets, order, group, recorder), indices in zip(made, arrival, strict=True):
        order.begin(group)
        buckets.begin(recorder)
        recorder.sent.clear()
        for index in indices:
            buckets.put(index, torch.full((2, 3), float(index)), 1.0, 0, last=True)
        buckets.flush()
    told = [order.vote(group) for _, order, group, _ in made]
    assert len({len(numbers) for numbers in told}) == 1, "a sum of equally many"
    for _, order, *_ in made:
        order.take([sum(numbers) for numbers in zip(*told, strict=True)])


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_members_send_in_the_order_of_the_first_one(first: list[int], other: list[int]) -> None:
    made = members(2, 4)
    step(made, [first, other])
    step(made, [first, other])
    for *_, recorder in made:
        assert [int(tensor.max()) for tensor in recorder.sent] == first
    assert made[0][1].vote(made[0][2]) == [], "agreed"
    regrouped = [(*own[:2], Group(None, rank, 2, 1.0), own[3]) for rank, own in enumerate(reversed(made))]
    step(regrouped, [other, first])
    for *_, recorder in regrouped:
        assert [int(tensor.max()) for tensor in recorder.sent] == [3, 2, 1, 0], "a new group begins anew"


def test_first_member_without_a_whole_order_leaves_it_as_it_is() -> None:
    made = members(2, 3)
    for _ in range(TRIES + 1):
        step(made, [[2], [1, 0]])
    for _, order, group, recorder in made:
        assert order.vote(group) == []
        assert len(recorder.sent) == 3
