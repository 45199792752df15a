from collections import namedtuple
from typing import Any

import pytest
import torch

from springtide.data import Batch, Cursor, Micro, plan_loop

X = torch.arange(20, dtype=torch.float32).view(10, 2)
Y = torch.arange(10)
Pair = namedtuple("Pair", ["x", "y"])


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, form: Any) -> None:
        self.form = form
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return self.form(X[i], int(Y[i]))


def assignment(dataset: Any, rank: int = 0, world: int = 1, **options: Any) -> Batch:
    return plan_loop(dataset, **({"batch_size": 10} | options)).batch(Cursor(), rank, world)


def test_a_tuple_indexes_unpacks_iterates_and_has_its_length() -> None:
    batch = assignment((X, Y))
    x, y = batch
    assert torch.equal(x, X[batch.ids])
    assert torch.equal(y, batch.ids)
    assert batch[1] is y
    assert len(batch) == 2
    assert [item is batch.data[i] for i, item in enumerate(batch)] == [True, True]
    assert (batch.samples, batch.standin, batch.ids.dtype) == (10, False, torch.int64)


def test_a_dict_is_read_as_a_mapping() -> None:
    for dataset in ({"x": X, "y": Y}, Rows(lambda x, y: {"x": x, "y": y})):
        batch = assignment(dataset)
        assert torch.equal(batch["x"], X[batch.ids])
        assert list(batch) == ["x", "y"]
        assert dict(batch.items())["y"].tolist() == batch.ids.tolist()
        assert "x" in batch
        assert "z" not in batch


def test_named_tuples_and_plain_tensors_keep_their_attributes() -> None:
    batch = assignment(Rows(Pair))
    assert torch.equal(batch.x, X[batch.ids])
    plain = assignment(X)
    assert torch.equal(plain.to(torch.float64), X[plain.ids].double())
    with pytest.raises(
        AttributeError, match="neither Batch nor its Tensor of samples has an attribute 'nonsense'"
    ):
        plain.nonsense  # noqa: B018
    private = "_private"
    with pytest.raises(AttributeError, match=private):
        getattr(plain, private)


def test_samples_are_read_once_and_not_before_they_are_used() -> None:
    dataset = Rows(lambda x, y: (x, y))
    batch = assignment(dataset, rank=1, world=3)
    assert dataset.read == []
    batch[0], batch[1]
    assert dataset.read == batch.ids.tolist()


def test_a_batch_shows_what_it_is() -> None:
    assert repr(assignment((X, Y), 0, 3)) == "<Batch of 4 samples; global batch 10>"
    assert repr(assignment((X, Y), 2, 3, batch_size=4)) == "<Batch of stand-in; global batch 4>"
    assert (
        repr(next(iter(assignment((X, Y)).split(4))))
        == "<Batch of 3 samples, micro-batch 1 of 4; global batch 10>"
    )


def test_an_unsplit_batch_is_one_micro_batch() -> None:
    batch = assignment((X, Y), 0, 3)
    micro = batch.micro
    assert (micro.index, micro.count, micro.is_last, micro.current_samples) == (0, 1, True, 4)
    assert (micro.current_weight, micro.scale, micro.remaining_samples) == (4.0, 0.4, 4)
    assert micro.contributed_ids.numel() == 0
    micro.contribute()
    micro.contribute()
    assert torch.equal(micro.contributed_ids, batch.ids)
    assert (micro.contributed_weight, micro.remaining_samples) == (4.0, 0)


def test_split_tells_where_the_body_is_and_what_went_in() -> None:
    batch = assignment((X, Y))
    seen, state = [], []
    for piece in batch.split(3):
        assert isinstance(piece, Batch)
        x, y = piece
        assert torch.equal(x, X[piece.ids])
        assert torch.equal(y, piece.ids)
        micro = batch.micro
        assert piece.micro is micro
        state.append((micro.index, micro.is_last, micro.current_samples, micro.remaining_samples))
        if micro.index != 1:
            micro.contribute()
            seen += piece.ids.tolist()
    assert state == [(0, False, 4, 10), (1, False, 3, 6), (2, True, 3, 6)]
    assert batch.micro.contributed_ids.tolist() == seen == batch.ids[[0, 1, 2, 3, 7, 8, 9]].tolist()
    assert (batch.micro.contributed_weight, batch.micro.remaining_samples) == (7.0, 3)


def test_split_obeys_the_memory_bound_and_the_smallest_part() -> None:
    def sizes(m: int, **options: Any) -> list[int]:
        return [piece.samples for piece in assignment((X, Y), **options).split(m)]

    assert sizes(1) == [10]
    assert sizes(1, micro_batch=4) == [4, 3, 3]
    assert sizes(5, micro_batch=4) == [2, 2, 2, 2, 2]
    assert sizes(9) == [2, 2, 2, 2, 2]
    assert sizes(9, min_part=1) == [2] + [1] * 8


def test_memory_bound_forbids_computing_the_whole_batch_at_once() -> None:
    batch = assignment((X, Y), micro_batch=20)
    with pytest.raises(RuntimeError, match=r"micro_batch=20.*for micro in batch.split\(\)"):
        _x, _y = batch
    assert [piece[0].shape for piece in batch.split()] == [(10, 2)]


def test_a_stand_in_computes_on_others_samples_and_counts_none() -> None:
    batch = assignment((X, Y), 2, 3, batch_size=5)
    assert (batch.standin, batch.samples, batch.ids.tolist()) == (True, 0, [])
    assert torch.equal(batch[0], X[assignment((X, Y), batch_size=5).ids[:2]])
    batch.weight(100)
    batch.micro.contribute()
    assert (batch.micro.scale, batch.micro.contributed_weight, batch.micro.contributed_ids.tolist()) == (
        0,
        0,
        [],
    )
    split = [
        (piece.standin, piece.samples, piece[0].shape)
        for piece in assignment((X, Y), 2, 3, batch_size=5).split(4)
    ]
    assert split == [(True, 0, (2, 2))]


def test_weight_replaces_denominator_of_current_micro_batch() -> None:
    batch = assignment((X, Y))
    tokens = [30.0, torch.tensor(10), 0]
    scales = []
    for piece, n in zip(batch.split(3), tokens, strict=True):
        piece.weight(n)
        scales.append(batch.micro.scale)
        batch.micro.contribute()
    assert scales == [3.0, 1.0, 0.0]
    assert batch.micro.contributed_weight == 40
    assert batch.micro.correction(40) == 0.25
    assert batch.micro.correction(10) == 1.0
    assert batch.micro.contributed_ids.numel() == 10


def test_the_weight_of_one_micro_batch_does_not_reach_the_next() -> None:
    batch = assignment((X, Y))
    first, second = batch.split(2), []
    next(first).weight(7)
    batch.micro.contribute()
    second = next(first)
    assert batch.micro.current_weight == second.samples == 5


@pytest.mark.parametrize("total", [0.0, -1.0, float("nan"), float("inf")])
def test_weights_that_add_up_to_nothing_are_refused(total: float) -> None:
    with pytest.raises(ValueError, match=r"batch.weight\(n\) with a positive n"):
        Micro(Y, 10).correction(total)


@pytest.mark.parametrize("n", [-1, float("nan"), float("inf")])
def test_an_impossible_weight_is_refused(n: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        assignment((X, Y)).weight(n)


def test_a_weight_at_the_wrong_time_is_refused() -> None:
    batch = assignment((X, Y))
    batch.micro.contribute()
    with pytest.raises(RuntimeError, match="after backward"):
        batch.weight(3)
    batch = assignment((X, Y))
    pieces = batch.split(2)
    first = next(pieces)
    next(pieces)
    with pytest.raises(RuntimeError, match="the micro-batch that the body is at"):
        first.weight(3)
    with pytest.raises(RuntimeError, match="the micro-batch that the body is at"):
        batch.weight(3)


def test_weight_on_a_whole_batch_split_later_is_refused() -> None:
    batch = assignment((X, Y))
    batch.weight(3)
    with pytest.raises(RuntimeError, match="call it on each micro-batch"):
        list(batch.split(2))


def test_backward_outside_the_piece_loop_is_always_refused() -> None:
    for m in (1, 2):
        batch = assignment((X, Y))
        list(batch.split(m))
        with pytest.raises(RuntimeError, match="call it inside the loop"):
            batch.micro.contribute()


def test_splitting_twice() -> None:
    batch = assignment((X, Y))
    list(batch.split(2))  # a pass without gradients
    for _ in batch.split(2):
        batch.micro.contribute()
    assert batch.micro.remaining_samples == 0
    with pytest.raises(RuntimeError, match="already in the gradients"):
        list(batch.split(2))
    with pytest.raises(RuntimeError, match="a micro-batch already"):
        next(assignment((X, Y)).split(2)).split(2)


@pytest.mark.parametrize("m", [0, -1, 1.5, True])
def test_split_into_an_impossible_number_is_refused_at_the_call(m: Any) -> None:
    with pytest.raises(ValueError, match="integer >= 1"):
        assignment((X, Y)).split(m)
