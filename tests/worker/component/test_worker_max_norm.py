"""`max_norm` of embedding tables: the numbers of torch's modules, in one process and through servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_lookups import BATCH, Lookups, check_on_servers
from worker_ranks import Rank, seeded

import springtide
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.errors import UsageError
from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records
from springtide_ps.params.row_norms import bounded

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
ORDERS = [2.0, 1.0, float("inf")]


@given(st.integers(0, 6), st.integers(1, 5), st.sampled_from([0.0, 0.3, 1.0, 50.0]), st.sampled_from(ORDERS))
@settings(deadline=None, max_examples=60)
def test_rows_are_bounded_as_torch_does_it(count: int, dim: int, most: float, order: float) -> None:
    rows = torch.randn(count, dim, generator=torch.Generator().manual_seed(count + dim))
    before = rows.clone()
    found = bounded(rows, most, order)
    expected = torch.embedding_renorm_(rows.clone(), torch.arange(count), most, order)
    torch.testing.assert_close(found, expected)
    assert torch.equal(rows, before)
    torch.testing.assert_close(bounded(found, most, order), found)
    assert bounded(rows, None, order) is rows


def make(max_norm: float | None) -> Slice:
    return Slice(TableSpec(3, seed=7, max_norm=max_norm), 0, 0, [{"lr": 0.1}])


def step(piece: Slice, ids: list[int], skip: bool = False) -> None:
    gradients = torch.ones(len(ids), 3)
    piece.apply(records(torch.tensor(ids), gradients).view(-1), StepSpec(1.0, skip, ({"lr": 0.1},)))


def test_step_bounds_its_rows_and_dropped_or_skipped_one_none() -> None:
    piece, free = make(0.5), make(None)
    ids = torch.arange(6).numpy()
    first = piece.rows(ids)
    assert torch.equal(first, free.rows(ids))  # a lookup changes nothing on a server
    step(piece, [1, 4], skip=True)
    assert torch.equal(piece.rows(ids), first)
    copy = Slice.load(*piece.dump())
    for one in (piece, copy):
        step(one, [1, 4])
    after = piece.rows(ids)
    assert torch.equal(copy.rows(ids), after)
    assert torch.equal(after[[0, 2, 3, 5]], first[[0, 2, 3, 5]])
    within = torch.embedding_renorm_(first.clone(), torch.tensor([1, 4]), 0.5, 2.0)
    torch.testing.assert_close(after[[1, 4]], within[[1, 4]] - 0.1)


def pair(bag: str, **options: Any) -> tuple[Any, Any]:
    """Our module and torch's with the same values."""
    if bag:
        ours: Any = springtide.EmbeddingBag(20, 4, seed=3, mode=bag, **options)
        theirs: Any = torch.nn.EmbeddingBag(20, 4, mode=bag, sparse=bag != "max", **options)
    else:
        ours = springtide.Embedding(20, 4, seed=3, **options)
        theirs = torch.nn.Embedding(20, 4, sparse=True, **options)
    with torch.no_grad():
        theirs.weight.copy_(ours.to_dense())
    return ours, theirs


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("bag", "order"), [("", 2.0), ("", 1.0), ("sum", float("inf")), ("mean", 2.0)])
def test_modules_train_as_torch_s(name: str, bag: str, order: float) -> None:
    padding = {"padding_idx": 2} if not bag or name == "sgd" else {}
    ours, theirs = pair(bag, max_norm=0.7, norm_type=order, **padding)
    optimizer = OPTIMIZERS[name](ours.parameters())
    sparse = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    reference = sparse if name == "adam" else OPTIMIZERS[name](theirs.parameters())
    everything = torch.arange(20).view(4, 5)
    generator = torch.Generator().manual_seed(0)
    for number in range(5):
        ids = torch.randint(0, 12, (3, 2, 5), generator=generator)
        for model in (ours, theirs):
            (model(ids[0]).tanh().sum() + 3 * model(ids[1]).square().sum()).backward()
            model(ids[2]).sin().sum().backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        used = torch.unique(ids)
        torch.testing.assert_close(ours.to_dense()[used], theirs.weight.detach()[used])
        if number == 2:  # lookups that train nothing
            with torch.no_grad():
                torch.testing.assert_close(ours(everything), theirs(everything))
    with torch.no_grad():
        torch.testing.assert_close(ours(everything), theirs(everything))


# ---- through servers

SAMPLES, EPOCHS, ROWS = 24, 3, 9
X = torch.randint(0, ROWS, (SAMPLES, 3), generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Net(Lookups):
    """A table of rows and one of bags, and a layer; plain: of torch's own modules."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        rows = springtide.Embedding(ROWS, 3, seed=4, slices=3, max_norm=0.6)
        bags = springtide.EmbeddingBag(ROWS, 2, 0.4, 1.0, mode="sum", seed=5, slices=2)
        self.rows: Any = rows
        self.bags: Any = bags
        if plain:
            self.rows = torch.nn.Embedding.from_pretrained(rows.to_dense(), freeze=False, max_norm=0.6)
            self.bags = torch.nn.EmbeddingBag.from_pretrained(
                bags.to_dense(), freeze=False, max_norm=0.4, norm_type=1.0, mode="sum"
            )
        with seeded(7):
            self.head = torch.nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat((self.rows(ids[:, 0]), self.bags(ids)), 1))
        return out


def train(net: Net, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    (net(X[ids]) - Y[ids]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def reference(clip_norm: float | None) -> torch.Tensor:
    net = Net(plain=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def clip(*_: Any) -> None:
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)

    optimizer.register_step_pre_hook(clip)
    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor()
    while not plan.ended(cursor):
        train(net, optimizer, plan.global_ids(cursor))
        cursor = plan.advance(cursor)
    return net.values()


@pytest.mark.parametrize(
    ("strategy", "consistency", "size", "clip_norm"),
    [
        ("ParameterServer", "Synchronous", 3, 0.5),
        ("Hybrid", "Synchronous", 2, None),
        ("ParameterServer", "Asynchronous", 1, 0.5),
        ("ParameterServer", "BoundedStaleness", 1, None),
    ],
)
def test_the_numbers_of_one_process(
    strategy: str, consistency: str, size: int, clip_norm: float | None
) -> None:
    def train_of(rank: Rank, net: Net, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        train(net, optimizer, batch.data)

    check_on_servers(
        size,
        lambda: Net(plain=False),
        train_of,
        reference(clip_norm),
        X,
        epochs=EPOCHS,
        strategy=strategy,
        consistency=consistency,
        clip_norm=clip_norm,
    )
    unbounded = torch.nn.Embedding.from_pretrained(springtide.Embedding(ROWS, 3, seed=4).to_dense())
    assert bool((unbounded.weight.norm(dim=1) > 0.6).any())  # the bound is one that matters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": -1.0}, "max_norm is -1.0, expected a finite number that is not negative"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
        ({"max_norm": "much"}, "max_norm is 'much'"),
        ({"max_norm": 1.0, "norm_type": float("nan")}, "norm_type is nan, expected the order of a norm"),
    ],
)
def test_bounds_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        springtide.Embedding(5, 3, **options)
