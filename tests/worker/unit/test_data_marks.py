"""Marks of samples: equal for what is the same sample anywhere, and for nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.data.marks import (
    MAX_MARKED,
    Marks,
    Row,
    differing,
    is_other_data,
    mark,
    marked_ids,
    reference,
    same_mark,
)
from springtide.data.source import make_source
from springtide.loading.marking import check_count, read_marks, read_within

GENERATOR = torch.Generator().manual_seed(1)
IMAGE = torch.rand(3, 16, 16, generator=GENERATOR)


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    label: int


DIFFERENT: list[tuple[Any, Any]] = [
    (1, 2),
    (1, True),
    (1.0, 1.5),
    (1.0, -1.0),
    (0.0, 1e-9),
    ("a", "b"),
    ("ab", b"ab"),
    (None, 0),
    ([1, 2], [2, 1]),
    ([[1], 2], [1, [2]]),
    ({"a": 1}, {"a": 2}),
    ({"a": 1}, {"b": 1}),
    ({1, 2}, {1, 3}),
    (1 + 2j, 2 + 1j),
    (float("nan"), 0.0),
    (float("inf"), float("nan")),
    (torch.arange(4), torch.arange(4).flip(0)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(2), torch.zeros(2).double()),
    (IMAGE, IMAGE.flip(2)),
    (IMAGE, torch.rand(3, 16, 16, generator=GENERATOR)),
    (torch.randn(100_000, generator=GENERATOR), torch.randn(100_000, generator=GENERATOR)),
    (IMAGE.bfloat16(), IMAGE.flip(1).bfloat16()),
    (torch.view_as_complex(IMAGE.view(-1, 2)), torch.view_as_complex(IMAGE.flip(0).reshape(-1, 2))),
    (np.array(["a", "b"]), np.array(["b", "a"])),
    (np.array([1, "x"], dtype=object), np.array([2, "x"], dtype=object)),
    (np.datetime64("2024-01-01"), np.datetime64("2024-01-02")),
    (Sample(IMAGE, 1), Sample(IMAGE, 2)),
]

SAME: list[tuple[Any, Any]] = [
    ((1, "a"), [1, "a"]),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"x", "y", "z"}, {"z", "y", "x"}),
    ("/mnt/one/cat.png", "/srv/other/cat.png"),
    (IMAGE, IMAGE * (1 + 1e-6)),
    (IMAGE, IMAGE + 1e-5 * torch.randn(IMAGE.shape, generator=GENERATOR)),
    (IMAGE.mT.contiguous().mT, IMAGE),
    (np.float32(0.1), np.float32(0.1)),
    (object(), object()),
    (Path("a"), Path("b")),
    ({object(): 1}, {object(): 2}),
    (Sample(IMAGE, 1), Sample(IMAGE.clone(), 1)),
    (torch.tensor([]), torch.tensor([])),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_another_sample_has_another_mark(one: Any, other: Any) -> None:
    assert not same_mark(mark(one)[0], mark(other)[0])
    assert not same_mark(mark((IMAGE, one))[0], mark((IMAGE, other))[0])


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_sample_has_a_mark_that_is_near(one: Any, other: Any) -> None:
    assert same_mark(mark(one)[0], mark(other)[0])


def test_what_cannot_be_read_is_left_out_and_named() -> None:
    assert mark((1, object()))[1] == ["object"]
    assert mark(torch.eye(2).to_sparse())[1] == ["tensor of torch.sparse_coo"]
    circle: list[Any] = []
    circle.append(circle)
    assert mark(circle)[1] == ["list at depth 21"]


@given(size=st.integers(1, 100), count=st.integers(0, MAX_MARKED), fewer=st.integers(0, MAX_MARKED))
def test_fewer_ids_are_the_first_of_more(size: int, count: int, fewer: int) -> None:
    ids = marked_ids(size, count)
    assert len(set(ids)) == len(ids) == min(size, count)
    assert all(0 <= number < size for number in ids)
    assert marked_ids(size, min(count, fewer)) == ids[: min(count, fewer)]


def row(marks: dict[str, int], *, stage: int = 0, held: bool = False, batch: int = 8) -> Row:
    return Row(stage, held, {"batch_size": batch}, {k: [v, 0, 0, 0] for k, v in marks.items()})


def test_the_data_of_most_members_counts() -> None:
    right, wrong = {"3": 1, "4": 1}, {"3": 2, "4": 2}
    assert reference([row(wrong), row(right), row(right)]) == 1
    assert reference([row(right), row(wrong)]) == 0
    assert reference([row({}), row(wrong), row(wrong), row(right)]) == 0  # has nothing to compare


def test_those_that_held_the_state_count_before_the_new() -> None:
    right, wrong = {"3": 1}, {"3": 2}
    assert reference([row(wrong), row(wrong), row(right, held=True)]) == 2


def test_rows_of_other_loops_are_not_compared() -> None:
    assert row({"3": 1}).fits(row({"3": 2}, stage=1, batch=9))
    assert not row({"3": 1}).fits(row({"3": 1}, batch=9))
    assert not row({"3": 1}).fits(row({"3": 2}))


def test_one_sample_in_many_that_differs_is_no_other_order() -> None:
    mine = {str(number): [number, 0, 0, 0] for number in range(8)}
    theirs = mine | {"5": [99, 0, 0, 0], "9": [1, 0, 0, 0]}
    assert differing(mine, theirs) == [5]
    assert not is_other_data([5], mine, theirs)
    assert is_other_data([0, 1, 2, 3], mine, theirs)
    assert is_other_data([5], {"5": mine["5"]}, theirs)


class Files:
    """Samples read by a script's code. augment: changes what is read."""

    def __init__(self, augment: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        self.augment = augment
        self.read: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return self.augment(torch.full((4,), float(i))), i


def marks_of(dataset: Any, count: int = 8, **options: Any) -> Marks:
    return read_marks(make_source(dataset, **options), count, in_child=False)


def test_each_sample_is_read_twice_and_no_others() -> None:
    files = Files()
    marks = marks_of(files, 3)
    assert files.read == [number for number in marked_ids(50, 3) for _ in range(2)]
    assert list(marks) == [str(number) for number in marked_ids(50, 3)]
    assert marks_of(files, 0) == {}


def test_random_numbers_of_the_script_are_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]

    def noise(x: torch.Tensor) -> Any:
        return x + torch.rand(4) + random.random() + np.random.rand()

    first = marks_of(Files(noise))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]  # type: ignore[index,union-attr]
    torch.manual_seed(4)
    assert first
    assert marks_of(Files(noise)) == first  # on another member, whose generators stand elsewhere


def test_data_random_by_their_own_generator_are_not_compared() -> None:
    own = random.Random(0)
    assert marks_of(Files(lambda x: x.flip(0) if own.random() < 0.5 else x + 1)) == {}


def test_data_that_cannot_be_read_are_not_compared() -> None:
    def fail(x: torch.Tensor) -> Any:
        raise OSError("no such image")

    assert marks_of(Files(fail)) == {}


def test_slow_data_are_read_for_a_limited_time() -> None:
    files, now = Files(), itertools.count(0.0, 2.0)
    found = read_within(make_source(files), marked_ids(50, 8), 5.0, lambda: next(now))
    assert list(found) == [str(number) for number in marked_ids(50, 3)]
    assert len(files.read) == 6


def test_tensors_give_their_rows_without_a_copy_of_all() -> None:
    x = torch.randn(50, 4, generator=GENERATOR)
    rows = marks_of((x, torch.arange(50)))
    other = marks_of((x.flip(0), torch.arange(50).flip(0)))
    assert len(differing(rows, other)) == 8
    assert marks_of((x.clone(), torch.arange(50))) == rows


def test_samples_of_a_collate_function_are_marked_before_it() -> None:
    def collate(samples: list[Any]) -> Any:
        raise AssertionError("not needed for a mark")

    assert len(marks_of(Files(), collate_fn=collate)) == 8


@pytest.mark.parametrize("value", [-1, MAX_MARKED + 1, True, 1.0, "8", None])
def test_bad_count_of_samples_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"verify_samples must be an integer from 0 .* to 32"):
        check_count(value)
