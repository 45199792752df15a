import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data import Part, partition, pieces

counts = st.integers(1, 400)


def assert_tiles(parts: list[Part], n: int) -> None:
    position = 0
    for part in parts:
        assert part.start == position
        position += part.size
    assert position == n


@settings(deadline=None)
@given(n=counts, world=st.integers(1, 40), min_part=st.integers(1, 9))
def test_the_parts_tile_the_batch_evenly_and_respect_the_minimum(n: int, world: int, min_part: int) -> None:
    parts = partition(n, world, min_part)
    assert len(parts) == world
    assert_tiles(parts, n)
    sizes = [part.size for part in parts]
    working = [size for size in sizes if size]
    assert sizes == working + [0] * (world - len(working))
    assert max(working) - min(working) <= 1
    if n >= min_part:
        assert min(working) >= min_part
        # Nobody stands by who could have had a part of the minimum.
        assert len(working) == world or n < (len(working) + 1) * min_part
    else:
        assert working == [n]


@pytest.mark.parametrize(
    ("n", "world", "min_part", "sizes"),
    [
        (256, 5, 2, [52, 51, 51, 51, 51]),
        (3, 5, 2, [3, 0, 0, 0, 0]),
        (5, 5, 2, [3, 2, 0, 0, 0]),
        (1, 3, 2, [1, 0, 0]),
        (3, 3, 1, [1, 1, 1]),
    ],
)
def test_known_partitions(n: int, world: int, min_part: int, sizes: list[int]) -> None:
    assert [part.size for part in partition(n, world, min_part)] == sizes


@settings(deadline=None)
@given(n=counts, wanted=st.integers(1, 30), min_part=st.integers(1, 9), extra=st.integers(0, 20))
def test_pieces_keep_both_bounds(n: int, wanted: int, min_part: int, extra: int) -> None:
    bound = 2 * min_part - 1 + extra
    parts = pieces(n, wanted, bound, min_part)
    assert_tiles(parts, n)
    assert max(part.size for part in parts) <= bound
    if n >= min_part:
        assert min(part.size for part in parts) >= min_part
    without = pieces(n, wanted, None, min_part)
    assert_tiles(without, n)
    assert len(without) == min(wanted, max(1, n // min_part)) <= len(parts)


def test_the_memory_bound_wins_over_the_minimum() -> None:
    assert [part.size for part in pieces(5, 1, 4, 4)] == [3, 2]


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_values_below_one_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="values >= 1"):
        partition(*arguments)
    with pytest.raises(ValueError, match="values >= 1"):
        pieces(arguments[0], arguments[1], None, arguments[2])
