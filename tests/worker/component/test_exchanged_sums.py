"""Small sums are made by one exchange: right, with the same bits on all members, and over when a group is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from worker_alone import library
from worker_groups import together

import springtide
from springtide.comm.exchanged_sums import MOST_BYTES, MOST_MORE_BYTES, ExchangedSum, is_exchanged
from springtide.comm.process_group import Group, Work, peers_in

NAN_BITS = (0x7FC00001, 0x7FC00002)
"""Two of float32's numbers that are none, as they come from different places."""


def summed(groups: Sequence[Group], tensors: Sequence[torch.Tensor], *, most: bool = False) -> None:
    """Replace the members' tensors by their sum, or their maximum."""
    starts = [group.start_max if most else group.start_sum for group in groups]
    works = [start(tensor) for start, tensor in zip(starts, tensors, strict=True)]
    assert all(isinstance(work, ExchangedSum) for work in works)
    together([lambda work=work: work.wait() for work in works])


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_what_is_exchanged_depends_on_bytes_and_size() -> None:
    assert is_exchanged(MOST_BYTES, 2)
    assert not is_exchanged(MOST_BYTES + 1, 2)
    assert not is_exchanged(0, 2)
    for size in (3, 4, 8, 64, 1000):
        most = max(n for n in range(1, 2 * MOST_MORE_BYTES, 64) if is_exchanged(n, size))
        around_a_ring, by_exchange = 2 * most * (size - 1) / size, most * (size - 1)
        assert by_exchange - around_a_ring <= MOST_MORE_BYTES + 1
        assert not is_exchanged(most + 64, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64),
        *(torch.int64, torch.int32, torch.int16, torch.uint8),
    ],
    ids=str,
)
def test_sums_are_those_of_adding_by_rank(
    groups: Callable[[int], list[Group]], size: int, dtype: torch.dtype
) -> None:
    members, draw = groups(size), torch.Generator().manual_seed(size)
    for shape in ((), (1,), (7, 3), (1000,)):
        tensors = [(torch.rand(shape, generator=draw) * 50).to(dtype) for _ in members]
        wanted = tensors[0].clone()
        for tensor in tensors[1:]:
            wanted = wanted + tensor
        summed(members, tensors)
        assert all(torch.equal(tensor, wanted) for tensor in tensors)


@pytest.mark.parametrize("size", [2, 3])
def test_all_members_have_the_same_bits(groups: Callable[[int], list[Group]], size: int) -> None:
    """Numbers of which the order of adding shows, and two kinds of NaN, of which the first one stays."""
    members, draw = groups(size), torch.Generator().manual_seed(7)
    tensors = [torch.randn(4096, generator=draw) * 10.0 ** torch.randint(-8, 8, (4096,)) for _ in members]
    for tensor, bits in zip(tensors, NAN_BITS, strict=False):
        tensor.view(torch.int32)[:2] = bits
    tensors[-1][2] = float("inf")
    tensors[0][2] = float("-inf")
    summed(members, tensors)
    assert len({raw(tensor) for tensor in tensors}) == 1
    assert tensors[0][:3].isnan().all()


@pytest.mark.parametrize("size", [2, 3])
def test_maxima_are_by_element(groups: Callable[[int], list[Group]], size: int) -> None:
    members = groups(size)
    tensors = [torch.tensor([rank, -rank, 5], dtype=torch.int64) for rank in range(size)]
    summed(members, tensors, most=True)
    assert [tensor.tolist() for tensor in tensors] == [[size - 1, 0, 5]] * size


def test_a_large_sum_goes_around_the_ring(groups: Callable[[int], list[Group]]) -> None:
    members = groups(2)
    tensors = [torch.ones(MOST_BYTES // 4 + 1) for _ in members]
    works = [group.start_sum(tensor) for group, tensor in zip(members, tensors, strict=True)]
    assert not any(isinstance(work, ExchangedSum) for work in works)
    together([lambda work=work: work.wait() for work in works])
    assert all(bool((tensor == 2.0).all()) for tensor in tensors)


def test_sums_in_place_take_no_memory_for_what_comes(groups: Callable[[int], list[Group]]) -> None:
    members = groups(2)
    tensors = [torch.ones(100) for _ in members]
    works = [group.start_sum(tensor, in_place=True) for group, tensor in zip(members, tensors, strict=True)]
    assert not any(isinstance(work, ExchangedSum) for work in works)
    together([lambda work=work: work.wait() for work in works])
    assert all(tensor.tolist() == [2.0] * 100 for tensor in tensors)


@pytest.mark.parametrize("mib", [1, 80])
def test_buckets_of_a_large_model_are_summed_in_place(mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may leave before the first one is waited for, and twice the gradients may not fit."""
    begun: list[bool] = []
    plain = Group.start_sum

    def start_sum(group: Group, tensor: torch.Tensor, *, in_place: bool = False) -> Work:
        begun.append(in_place)
        return plain(group, tensor, in_place=in_place)

    monkeypatch.setattr(Group, "start_sum", start_sum)
    weights = torch.nn.ParameterList(torch.zeros(512, 256) for _ in range(2 * mib))  # half a MiB each
    with library(bucket_mib=4):
        model, optimizer = springtide.distribute(weights, torch.optim.SGD(weights.parameters(), lr=0.1))
        for (x,) in springtide.batches((torch.ones(4),), batch_size=4):
            with springtide.step():
                (x.mean() * sum(weight.sum() for weight in model)).backward()
                optimizer.step()
    *buckets, vote = begun
    assert set(buckets) == {mib > 64}
    assert not vote


def test_the_tensor_is_this_members_until_the_wait(groups: Callable[[int], list[Group]]) -> None:
    members = groups(2)
    tensors = [torch.full((100,), float(group.rank + 1)) for group in members]
    works = [group.start_sum(tensor) for group, tensor in zip(members, tensors, strict=True)]
    while not all(work.is_completed() for work in works):
        threading.Event().wait(0.001)
    assert [tensor[0].item() for tensor in tensors] == [1.0, 2.0]
    for work in works:
        assert work.wait()
        assert work.wait()  # the second one adds nothing
    assert [tensor[0].item() for tensor in tensors] == [3.0, 3.0]


def test_autograd_does_not_see_a_sum_being_made(groups: Callable[[int], list[Group]]) -> None:
    """Buckets are known to be untouched by autograd's count of changes, which no sum may move."""
    members = groups(2)
    tensors = [torch.full((100,), 2.0) for _ in members]
    factor = torch.ones(100, requires_grad=True)
    product = (factor * tensors[0]).sum()
    summed(members, tensors)
    product.backward()  # raises where a tensor that it needs has another version
    assert tensors[0][0].item() == 4.0


def test_sums_small_and_large_keep_their_order(groups: Callable[[int], list[Group]]) -> None:
    members = groups(2)
    sizes = (10, MOST_BYTES // 2, 3, MOST_BYTES // 4, 1)
    tensors = [[torch.full((size,), float(number)) for number, size in enumerate(sizes)] for _ in members]
    works = [[group.start_sum(tensor) for tensor in own] for group, own in zip(members, tensors, strict=True)]
    together([lambda own=own: [work.wait() for work in own] for own in works])
    for own in tensors:
        assert [bool((tensor == 2.0 * number).all()) for number, tensor in enumerate(own)] == [True] * 5


def test_a_member_that_is_gone_is_named(groups: Callable[[int], list[Group]]) -> None:
    first, second, third = groups(3)
    works = [group.start_sum(torch.ones(5)) for group in (first, second)]
    third.shut()
    for work in works:
        with pytest.raises(RuntimeError) as failure:
            work.wait()
        assert peers_in(failure.value)
