"""How a state is cut into pieces, who sends which, and what checksums see."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm import state_pieces as pieces
from springtide.comm.state_pieces import (
    PieceMemory,
    Rooms,
    assign,
    checksum,
    into_pieces,
    length,
    piece_size,
    schedule,
)
from springtide.comm.state_transfer import MAX_SENDERS, Roles, roles

tensors = st.lists(st.tuples(st.integers(0, 5000), st.booleans()), max_size=12)


@pytest.mark.slow
@given(tensors, st.integers(16, 40))
def test_each_byte_is_in_one_piece(given_tensors: list[tuple[int, bool]], words: int) -> None:
    most = 64 * words
    sizes, spread = [size for size, _ in given_tensors], [free for _, free in given_tensors]
    found, free = into_pieces(sizes, spread, most)
    assert all(0 < length(piece) <= most for piece in found)
    seen = Counter(
        (part.tensor, at) for piece in found for part in piece for at in range(part.start, part.stop)
    )
    assert seen == Counter((number, at) for number, size in enumerate(sizes) for at in range(size))
    for piece, anybody in zip(found, free, strict=True):
        assert {spread[part.tensor] for part in piece} == {anybody}


@given(tensors, st.integers(1, 5), st.integers(1, 4))
def test_each_receiver_gets_each_piece_once(
    given_tensors: list[tuple[int, bool]], holders: int, receivers: int
) -> None:
    found, free = into_pieces([size for size, _ in given_tensors], [own for _, own in given_tensors], 1024)
    who = roles(range(1, receivers + 1), holders + receivers)
    owners = assign([length(piece) for piece in found], free, len(who.senders))
    order = schedule(owners)
    assert sorted(order) == list(range(len(found)))
    here: dict[int, Counter[int]] = {rank: Counter() for rank in who.receivers}
    for number in order:
        assert free[number] or owners[number] == 0
        at: int | None = who.senders[owners[number]]
        while (behind := who.downstream(owners[number], at)) is not None:
            assert who.upstream(owners[number], behind) == at
            here[behind][number] += 1
            at = behind
    assert all(count == Counter(order) for count in here.values())


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 6))
def test_senders_have_about_the_same_share(lengths: list[int], senders: int) -> None:
    owners = assign(lengths, [True] * len(lengths), senders)
    loads = [
        sum(size for size, owner in zip(lengths, owners, strict=True) if owner == own)
        for own in range(senders)
    ]
    assert max(loads) - min(loads) <= max(lengths)


def test_what_only_the_first_may_send_counts_for_it() -> None:
    free = [True] * 6 + [False] * 3
    owners = assign([10] * 9, free, 2)
    assert owners[6:] == [0, 0, 0]
    assert Counter(owners) == {0: 5, 1: 4}


def test_all_senders_are_busy_from_begin_to_end() -> None:
    order = schedule([1, 1, 1, 1, 0, 0, 0, 0])
    assert [number // 4 for number in order] == [1, 0] * 4


def test_chains_of_holders_begin_with_different_receivers() -> None:
    who = roles([1, 4, 2], 6)
    assert who == Roles((0, 3, 5), (1, 2, 4))
    assert [who.chain(sender) for sender in range(3)] == [[0, 1, 2, 4], [3, 2, 4, 1], [5, 4, 1, 2]]
    assert who.downstream(0, 3) is None
    assert len(roles([0], 100).senders) == MAX_SENDERS


def test_sizes_of_pieces() -> None:
    assert piece_size(0) == piece_size(1 << 20) == 64 << 10
    assert piece_size(64 << 20) == 2 << 20
    assert piece_size(1 << 40) == 16 << 20
    assert piece_size(100_000_001) % 64 == 0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40_000), st.data())
def test_checksum_sees_any_changed_byte(size: int, data: st.DataObject) -> None:
    some = torch.arange(size, dtype=torch.int64).remainder(251).to(torch.uint8)
    other = some.clone()
    assert checksum(other) == checksum(some)
    other[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(other) != checksum(some)


@pytest.mark.parametrize("distance", [8, 4096, 8192, 8200])
def test_checksum_sees_words_in_each_others_place(distance: int) -> None:
    some = torch.arange(65536 // 8, dtype=torch.int64)
    other, words = some.clone(), distance // 8
    other[0], other[words] = some[words], some[0]
    assert checksum(some.view(torch.uint8)) != checksum(other.view(torch.uint8))


@pytest.mark.parametrize(
    ("size", "start", "known"),
    [(24709, 0, -5955962874258446567), (24709, 3, 1815367602298994143),
     (655365, 0, 3564235756173350051), (655365, 3, -6414838009031546042)],
)  # fmt: skip
def test_checksum_is_that_of_earlier_releases(size: int, start: int, known: int) -> None:
    """Members of two releases compare them; and it is the same wherever the bytes lie."""
    some = torch.arange(size).mul(2654435761).bitwise_and(255).to(torch.uint8)
    assert checksum(some[start:]) == known
    assert checksum(some[start:].clone()) == known


def test_small_tensors_travel_together() -> None:
    here = [torch.arange(4.0), torch.tensor(True), torch.zeros(0), torch.arange(3, dtype=torch.int16)]
    found, _ = into_pieces([item.nbytes for item in here], [True] * 4, 1024)
    assert len(found) == 1
    memory = PieceMemory(here, found)
    assert memory.direct(0) is None
    data = memory.gather(0, torch.zeros(100, dtype=torch.uint8))
    there = [torch.full_like(item, 1) for item in here]
    PieceMemory(there, found).scatter(0, data)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_large_tensors_are_sent_from_their_own_memory() -> None:
    tensor = torch.arange(1000.0)
    found, _ = into_pieces([tensor.nbytes], [True], 1024)
    memory = PieceMemory([tensor], found)
    views = [memory.direct(number) for number in range(len(found))]
    assert [view.data_ptr() - tensor.data_ptr() for view in views if view is not None] == [
        part.start for (part,) in found
    ]


def test_a_piece_of_a_tensor_that_is_missing_is_not_here() -> None:
    found, _ = into_pieces([100, 100], [True, True], 1024)
    assert not PieceMemory([torch.zeros(25), None], found).has(0)


def test_rooms_are_used_again() -> None:
    made: list[int] = []

    def make(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=dtype)

    rooms = Rooms(pinned=True, make=make)
    first = rooms.take(100)
    second = rooms.take(100)
    rooms.give(first)
    assert rooms.take(50) is first
    rooms.give(second)
    assert rooms.take(200) is not second
    assert made == [100, 100, 200]


def test_pieces_are_many_enough_for_a_chain() -> None:
    size = 40 << 20
    found, _ = into_pieces([size], [True], piece_size(size))
    assert len(found) == 32
    assert pieces.MOST_GATHERED_BYTES <= pieces.MOST_PIECE_BYTES
