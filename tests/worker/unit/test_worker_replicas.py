"""Hashes of pieces of the parameters, and who is the odd one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.comm import commit_vote as side
from springtide.comm.process_group import Group
from springtide.train_step import replica_digest
from springtide.train_step.buffers import Buffers
from springtide.train_step.replica_digest import (
    INTERVAL,
    LIMIT,
    PIECES,
    ReplicaDigest,
    balance_in_row,
    device_sums,
    odd_ones,
    odd_pods,
)
from springtide.train_step.replicas import MOST_SENT, Found, Replicas

STEPS = [INTERVAL * number for number in range(1, PIECES + 1)]


def model(seed: int = 1) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    conv = torch.randn(8, 4, 3, 3, generator=generator).to(memory_format=torch.channels_last)
    return [
        ("weight", torch.randn(40, 30, generator=generator)),
        ("empty", torch.zeros(0, 4)),
        ("conv", conv),
        ("half", torch.randn(50, generator=generator).bfloat16()),
        ("complex", torch.randn(20, dtype=torch.complex64, generator=generator)),
        ("turned", torch.randn(6, 5, generator=generator).t()),
        ("strided", torch.randn(10, 4, generator=generator)[:, ::2]),
        ("scalar", torch.randn((), dtype=torch.float64, generator=generator)),
    ]


@pytest.mark.slow
@given(st.integers(0, 7), st.data())
def test_one_changed_bit_is_found_once_in_a_round(chosen: int, data: st.DataObject) -> None:
    named, other = model(), model()
    name, tensor = other[chosen]
    if not tensor.numel():
        return
    index = data.draw(st.integers(0, tensor.numel() - 1))
    place = torch.unravel_index(torch.tensor(index), tensor.shape)
    tensor[place] = -tensor[place] if tensor[place] != 0 else 1.0
    ours, theirs = ReplicaDigest(named), ReplicaDigest(other)
    found = [step for step in STEPS if ours.hash(step) != theirs.hash(step)]
    assert 1 <= len(found) <= 2  # both halves of a complex number
    assert all(name in ours.names(step) for step in found)


def test_equal_replicas_have_equal_hashes() -> None:
    for step in STEPS:
        assert 0 < ReplicaDigest(model()).hash(step) == ReplicaDigest(model()).hash(step) < LIMIT
    assert len({ReplicaDigest(model()).hash(step) for step in STEPS}) > PIECES // 2


def test_hashes_of_all_pieces_are_those_of_each() -> None:
    """Keep the numbers that members of another release compare with theirs."""
    named = [
        ("wide", torch.arange(1200.0).view(40, 30)),
        ("empty", torch.zeros(0, 4)),
        ("half", torch.arange(50).bfloat16()),
        ("turned", torch.arange(700.0).view(7, 100).t()),
        ("scalar", torch.tensor(3.0, dtype=torch.float64)),
    ]
    buffers = [("buffer", torch.arange(33.0))]
    hashes = ReplicaDigest(named).hashes(buffers)
    assert hashes == [
        ReplicaDigest(named).hash(step, buffers) for step in range(0, PIECES * INTERVAL, INTERVAL)
    ]
    assert sum(number * found for number, found in enumerate(hashes, 1)) == 1172798781
    assert len(set(ReplicaDigest([]).hashes())) == 1


def test_tables_and_other_steps_have_none() -> None:
    assert not ReplicaDigest([("table", torch.zeros(0))]).due(INTERVAL)
    assert [step for step in range(1, 40) if ReplicaDigest(model()).due(step)] == [16, 32]


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [([5, 5], []), ([5, 6], [1]), ([6, 5, 5], [0]), ([1, 2, 3], [1, 2]), ([4, 4, 3, 3], [2, 3]), ([7], [])],
)
def test_the_odd_ones_are_those_that_most_are_not(hashes: list[int], odd: list[int]) -> None:
    assert odd_ones(hashes) == odd


@given(st.lists(st.integers(1, LIMIT - 1), min_size=1, max_size=40))
def test_the_vote_sees_any_difference(hashes: list[int]) -> None:
    parts = [side.Contribution(3, 1.0, 1, 0, 0, False, 0.1, [True], [], digest=number) for number in hashes]
    total = torch.stack([side.encode(part) for part in parts]).sum(0)
    result = side.decode(total, parts[0], len(parts))
    assert result.same_step
    assert result.replicas_agree == (len(set(hashes)) == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("chunk", [1, 7, 100, 1000])
def test_sums_on_a_device_do_not_depend_on_chunks(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    """Large tensors are looked at in parts, wherever they begin; nothing changes in them."""
    generator = torch.Generator().manual_seed(1)
    parts = [(torch.randn(size, generator=generator) * 9).to(dtype) for size in (100, 1, 0, 333)]
    before = [part.clone() for part in parts]
    whole = [device_sums(part).tolist() for part in parts]
    monkeypatch.setattr(replica_digest, "CHUNK", chunk)
    assert [device_sums(part).tolist() for part in parts] == whole
    assert [device_sums(torch.cat((part[:1], part))[min(1, len(part)) :]).tolist() for part in parts] == whole
    assert all(map(torch.equal, parts, before))
    for place in (0, 5, 332):
        other = parts[3].clone()
        other[place] += 1
        assert all(one != another for one, another in zip(device_sums(other).tolist(), whole[3], strict=True))
    swapped = parts[3].flip(0)
    assert device_sums(swapped).tolist()[1] != whole[3][1]


def test_buffers_are_hashed_with_the_parameters() -> None:
    digest = ReplicaDigest(model())
    one, other = ("seen", torch.tensor([3, 4])), ("seen", torch.tensor([3, 5]))
    differ = [
        piece
        for piece, hashes in enumerate(zip(digest.hashes([one]), digest.hashes([other]), strict=True))
        if len(set(hashes)) > 1
    ]
    assert differ
    assert all("seen" in digest.names_in(piece, [one]) for piece in differ)
    number = differ[0] * INTERVAL
    assert digest.hash(number, [one]) == digest.hashes([one])[differ[0]] != digest.hash(number, [other])


class FakeGroup(Group):
    """Stands for a group of so many members."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, rank, size, 1.0)


def compared(models: list[list[tuple[str, torch.Tensor]]], times: int = 1) -> list[list[Found]]:
    """Return what each of the members finds, each time."""
    sides = [Replicas(Buffers(torch.nn.Linear(1, 1)), ReplicaDigest(named), None) for named in models]
    found = []
    for _ in range(times):
        rooms: list[dict[int, torch.Tensor]] = []
        barrier = threading.Barrier(len(models))

        def run(rank: int, rooms: list[Any] = rooms, barrier: threading.Barrier = barrier) -> Found:
            number = 0

            def total(sums: torch.Tensor) -> None:
                nonlocal number
                if rank == 0:
                    rooms.append({})
                barrier.wait(10)
                rooms[number][rank] = sums.clone()
                barrier.wait(10)
                sums.copy_(torch.stack(list(rooms[number].values())).sum(0))
                number += 1

            return sides[rank].compare(FakeGroup(rank, len(models)), total)

        with ThreadPoolExecutor(len(models)) as pool:
            found.append(list(pool.map(run, range(len(models)))))
    return found


def test_all_learn_who_differs_and_where_and_mend_three_times() -> None:
    other = model()
    other[0][1][0, 0] += 1
    (same,) = compared([model(), model(), model()])
    assert same == [Found()] * 3
    results = compared([model(), other, model()], times=4)
    for number, members in enumerate(results):
        assert all(found == members[0] for found in members)
        assert members[0].odd == [1]
        assert "weight" in members[0].names
        assert "half" not in members[0].names
        assert members[0].mends == (number < MOST_SENT)


@pytest.mark.parametrize(
    ("hashes", "odd"),
    [
        ([[7, 7, 7], [4, 4, 4]], []),
        ([[7, 7, 9], [4, 4, 4]], [2]),
        ([[9, 7, 7], [4, 4, 4]], [0]),
        ([[7, 9, 7], [4, 4, 5]], [1, 2]),
        ([[7, 8], [4, 5]], [1]),  # of two the first one counts
        ([[9, 7, 7], [4, 5, 4], [1, 1, 2]], [1, 2]),  # somebody has to have the state
    ],
)
def test_pods_with_another_part_are_odd_as_a_whole(hashes: list[list[int]], odd: list[int]) -> None:
    assert odd_pods(hashes) == odd
    total = sum(balance_in_row(own, pod, len(row)) for row in hashes for pod, own in enumerate(row))
    assert (total == 0) == (not odd)
