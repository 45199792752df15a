from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from springtide.data import make_source

X = torch.randn(6, 3)
Y = torch.arange(6)
IDS = torch.tensor([4, 0, 5])


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int, str]:
        return X[i], i * i, f"sample {i}"


class Doubled(TensorDataset):
    def __getitem__(self, i: Any) -> Any:
        return tuple(2 * t for t in super().__getitem__(i))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Broken(Squares):
    def __getitem__(self, i: int) -> Any:
        raise FileNotFoundError(f"image-{i}.png")


class ManyAtOnce(Squares):
    def __init__(self, missing: int = 0) -> None:
        self.missing = missing

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("the samples have to be asked for at once")

    def __getitems__(self, ids: list[int]) -> list[int]:
        return ids[self.missing :]


def test_tensors_are_read_by_row() -> None:
    assert torch.equal(make_source(X).fetch(IDS), X[IDS])
    for dataset in ((X, Y), TensorDataset(X, Y)):
        source = make_source(dataset)
        x, y = source.fetch(IDS)
        assert source.size == 6
        assert torch.equal(x, X[IDS])
        assert torch.equal(y, IDS)
    named = make_source({"x": X, "y": Y}).fetch(IDS)
    assert list(named) == ["x", "y"]
    assert torch.equal(named["x"], X[IDS])


class Lengths(Dataset[Any]):
    """Sequences of different lengths, which torch's own function cannot collate."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((i + 1,), i)


class LengthsInRanges(IterableDataset[Any]):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError

    def read_range(self, start: int, stop: int) -> Iterator[torch.Tensor]:
        return (Lengths()[i] for i in range(start, stop))


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


@pytest.mark.parametrize("dataset", [Lengths(), LengthsInRanges()])
def test_a_collate_fn_gets_the_samples_themselves(dataset: Any) -> None:
    source = make_source(dataset, padded)
    assert source.fetch(torch.tensor([2, 0])).tolist() == [[2, 2, 2], [0, -1, -1]]
    with pytest.raises(RuntimeError, match="equal size"):
        make_source(dataset).fetch(torch.tensor([2, 0]))


def test_a_collate_fn_over_tensors_gets_their_rows() -> None:
    for dataset, expected in (
        (X, [X[4], X[0], X[5]]),
        ((X, Y), [(X[4], Y[4]), (X[0], Y[0]), (X[5], Y[5])]),
        (TensorDataset(X, Y), [(X[4], Y[4]), (X[0], Y[0]), (X[5], Y[5])]),
        ({"x": X, "y": Y}, [{"x": X[i], "y": Y[i]} for i in (4, 0, 5)]),
    ):
        found = make_source(dataset, list).fetch(IDS)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(TypeError, match="collate_fn must be a function of a list of samples, got str"):
        make_source(X, "default")


def test_a_dataset_is_collated_as_a_loader_would() -> None:
    source = make_source(Squares())
    wanted = next(iter(DataLoader(Subset(Squares(), IDS.tolist()), batch_size=3)))
    x, squares, names = source.fetch(IDS)
    assert torch.equal(x, wanted[0])
    assert torch.equal(squares, wanted[1])
    assert squares.tolist() == [16, 0, 25]
    assert list(names) == ["sample 4", "sample 0", "sample 5"]


def test_a_tensor_dataset_with_its_own_getitem_keeps_it() -> None:
    x, y = make_source(Doubled(X, Y)).fetch(IDS)
    assert torch.equal(x, 2 * X[IDS])
    assert torch.equal(y, 2 * IDS)


def test_a_dataset_that_reads_many_at_once_is_asked_once() -> None:
    assert make_source(ManyAtOnce()).fetch(IDS).tolist() == IDS.tolist()
    with pytest.raises(ValueError, match="asked for 3 samples and returned 2"):
        make_source(ManyAtOnce(missing=1)).fetch(IDS)


def test_an_error_names_the_sample() -> None:
    with pytest.raises(FileNotFoundError, match=r"image-4\.png") as caught:
        make_source(Broken()).fetch(IDS)
    assert caught.value.__notes__ == ["while reading sample 4 of the dataset"]


@pytest.mark.parametrize(
    ("dataset", "error", "what"),
    [
        (DataLoader(TensorDataset(X)), TypeError, "give its dataset"),
        (Stream(), TypeError, "give a dataset with __len__ and __getitem__"),
        (iter([1, 2]), TypeError, "list_iterator has no __len__ and __getitem__"),
        (7, TypeError, "int has no __len__"),
        ([], ValueError, "it is empty"),
        (X[:0], ValueError, "it is empty"),
        (TensorDataset(X[:0]), ValueError, "it is empty"),
        ((), TypeError, "a tuple must hold tensors"),
        ((X, Y.numpy()), TypeError, "a tuple must hold tensors"),
        ({"x": X, "y": [1]}, TypeError, "a dict must hold tensors"),
        ({}, TypeError, "a dict must hold tensors"),
        ((X, Y[:5]), ValueError, "differ in their number of samples"),
        (torch.tensor(1.0), ValueError, "no first dimension"),
    ],
)
def test_what_cannot_be_dealt_is_refused_with_a_remedy(
    dataset: Any, error: type[Exception], what: str
) -> None:
    with pytest.raises(error, match=what):
        make_source(dataset)
