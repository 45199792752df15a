"""`scale_grad_by_freq` of embedding tables: counts are those of the whole global batch, call by call.

The references are torch's `Embedding` without sparse gradients, which it takes for that; also of bags (whose
own module divides the gradient of one id by the count of another, in torch 2.13 on the CPU).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.utils.checkpoint import checkpoint
from worker_alone import library
from worker_lookups import BATCH, Lookups, check_on_servers
from worker_ranks import Rank, on_ranks, seeded

import springtide
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.errors import UsageError
from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, record_bytes, records, unpack, widened
from springtide_ps.params.frequencies import carried, divided, heads_of, ids_of, renumbered, summed

torch.set_num_threads(1)
LOOKUPS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2)), max_size=12)
"""(id, call) of each."""


def contribution(lookups: list[tuple[int, int]], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the heads and the sums of gradients of one worker's calls, call by call."""
    made = []
    for call in range(3):
        ids = torch.tensor([own for own, at in lookups if at == call], dtype=torch.int64)
        unique, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        each = gradients(len(ids), seed + call)
        sums = torch.zeros(len(unique), 2).index_add_(0, inverse, each)
        made.append((heads_of(unique, counts, call), sums))
    return made


def gradients(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))


@given(st.lists(LOOKUPS, min_size=1, max_size=3), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_split_over_workers_is_one_batch(workers: list[list[tuple[int, int]]], narrow: bool) -> None:
    piece = Slice(TableSpec(2, "sgd", init="zeros", by_frequency=True), 0, 0, [{"lr": 1.0}])
    expected, total = torch.zeros(7, 2), None
    counts: dict[tuple[int, int], int] = {}
    for lookup in (lookup for worker in workers for lookup in worker):
        counts[lookup] = counts.get(lookup, 0) + 1
    dtype = torch.bfloat16 if narrow else torch.float32
    for number, worker in enumerate(workers):
        parts = contribution(worker, 10 * number)
        for call in range(3):
            each = gradients(sum(at == call for _, at in worker), 10 * number + call)
            for own, row in zip([own for own, at in worker if at == call], each, strict=True):
                expected[own + 3] += row / counts[own, call]
        heads, rows = summed(*(torch.cat(kind) for kind in zip(*parts, strict=True)))
        sent = records(heads, rows.to(dtype))
        assert sent.nbytes == len(heads) * record_bytes(2, dtype, has_counts=True)
        memory = sent.view(-1).view(torch.uint8) if sent.numel() else torch.empty(0, dtype=torch.uint8)
        piece.check_records(memory.numel(), dtype)
        total = piece.add(total, piece.records_in(memory.clone(), dtype), None)
    assert total is not None
    piece.check_gradient(total.nbytes, None)
    tolerance = 0.1 if narrow else 1e-5
    square = float(expected.square().sum())
    assert piece.square_norm(total) == pytest.approx(square, rel=tolerance, abs=tolerance)
    piece.apply(total, StepSpec(1.0, False, ({"lr": 1.0},)))
    piece = Slice.load(*piece.dump())
    assert piece.has_counts
    found = piece.rows(torch.arange(-3, 4).numpy())
    torch.testing.assert_close(found, -expected, rtol=tolerance, atol=tolerance)


def test_heads_name_the_call_and_plain_ids_stay_as_they_are() -> None:
    ids, counts = torch.tensor([-5, 2**62]), torch.tensor([3, 2**32 - 1])
    heads = heads_of(ids, counts, 7)
    assert torch.equal(ids_of(heads), ids)
    assert torch.equal(renumbered(heads_of(ids, counts, 9), -2), heads)
    assert torch.equal(renumbered(heads, -9), heads_of(ids, counts, -2))
    names, sums = summed(torch.cat((heads, carried(heads))), torch.ones(4, 2))
    assert len(names) == len(sums) == 4
    rows = torch.tensor([[3.0], [2.0**32 - 1]])
    assert divided(heads, rows)[1].tolist() == [[1.0], [1.0]]
    for function in (carried, ids_of):
        assert function(ids) is ids
    assert divided(ids, rows) == (ids, rows)
    memory = records(heads, rows.to(torch.float16)).view(-1).view(torch.uint8)
    found = unpack(widened(memory, 1, torch.float16, has_counts=True), 1, has_counts=True)
    assert torch.equal(found[0], heads)


def test_a_count_of_none_breaks_nothing() -> None:
    """Counts of zero, sent by a client that is not ours, give no infinities."""
    heads = heads_of(torch.tensor([1]), torch.tensor([0]), 0)
    assert divided(heads, torch.ones(1, 2))[1].isfinite().all()


# ---- in one process, without distribute()


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_trains_as_torch_s(padding: int | None) -> None:
    ours = springtide.Embedding(20, 4, padding, None, 2.0, True, seed=3)
    theirs = torch.nn.Embedding(20, 4, padding, scale_grad_by_freq=True)
    with torch.no_grad():
        theirs.weight.copy_(ours.to_dense())
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.3) for model in (ours, theirs)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 6, (3, 2, 5), generator=generator)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            # Each call has counts of its own, also of one pass.
            (model(ids[0]).tanh().sum() + model(ids[1]).square().sum()).backward()
            model(ids[2]).sin().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(ours.to_dense(), theirs.weight.detach())
    assert "scale_grad_by_freq=True" in repr(ours)
    with pytest.raises(UsageError, match="mode max does not scale gradients by frequency"):
        springtide.EmbeddingBag(5, 3, mode="max", scale_grad_by_freq=True)


# ---- in a job

SAMPLES, EPOCHS, ROWS = 24, 2, 5
X = torch.randint(0, ROWS, (SAMPLES, 3), generator=torch.Generator().manual_seed(1))
Y = torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(SAMPLES)


class Net(Lookups):
    """A table that is called twice in a pass, and one of bags. plain: of torch's own modules."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        counted = {"scale_grad_by_freq": True, "max_norm": 1.5}
        rows = springtide.Embedding(ROWS, 3, seed=4, slices=3, **counted)  # type: ignore[arg-type]
        bags = springtide.EmbeddingBag(ROWS, 2, scale_grad_by_freq=True, mode="mean", seed=5, slices=2)
        self.rows: Any = rows
        self.bags: Any = bags
        if plain:
            self.rows = torch.nn.Embedding.from_pretrained(rows.to_dense(), freeze=False, **counted)  # type: ignore[arg-type]
            one_by_one = torch.nn.Embedding.from_pretrained(
                bags.to_dense(), freeze=False, scale_grad_by_freq=True
            )
            self.bags = Mean(one_by_one)
        with seeded(7):
            self.head = torch.nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = (self.rows(ids[:, 0]), self.rows(ids[:, 1]), self.bags(ids))
        out: torch.Tensor = self.head(torch.cat(both, 1))
        return out


class Mean(torch.nn.Module):
    def __init__(self, rows: torch.nn.Embedding) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rows(ids).mean(1)


def loss_of(net: Net, ids: torch.Tensor, again: bool) -> torch.Tensor:
    """again: activations are computed once more in backward, which looks the rows up again."""
    out = checkpoint(net, X[ids], use_reentrant=False, preserve_rng_state=False) if again else net(X[ids])
    return (out - Y[ids]).square().mean()


def reference(clip_norm: float | None) -> torch.Tensor:
    net = Net(plain=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0), Cursor()
    while not plan.ended(cursor):
        loss_of(net, plan.global_ids(cursor), False).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        cursor = plan.advance(cursor)
    return net.values()


def train(net: Net, optimizer: torch.optim.Optimizer, batch: Any, micro: int, again: bool) -> None:
    for part in batch.split(micro):
        loss_of(net, part.data, again).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "consistency", "size", "clip_norm", "again"),
    [
        ("ParameterServer", "Synchronous", 3, 0.1, False),
        ("Hybrid", "Synchronous", 2, 0.1, True),
        ("ParameterServer", "Asynchronous", 1, 0.1, False),
        ("ParameterServer", "BoundedStaleness", 1, None, True),
    ],
)
def test_the_numbers_of_one_process(
    strategy: str, consistency: str, size: int, clip_norm: float | None, again: bool
) -> None:
    def train_of(rank: Rank, net: Net, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        # Workers have other numbers of micro-batches.
        train(net, optimizer, batch, 1 + rank.rank, again)

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


def two_rounds(net: Net, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Gradients of two passes, each divided by counts of its own, are added up in one step."""
    for number in range(2):
        loss_of(net, ids.flip(0)[: 8 - 2 * number], False).backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["Hybrid", "ParameterServer", ""])
def test_counts_of_two_backward_passes_are_not_added_up(strategy: str) -> None:
    plain = Net(plain=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    plan, cursor = plan_loop(IDS, batch_size=BATCH, epochs=1, seed=0), Cursor()
    while not plan.ended(cursor):
        two_rounds(plain, optimizer, plan.global_ids(cursor))
        cursor = plan.advance(cursor)

    def run(rank: Rank) -> torch.Tensor:
        net = Net(plain=False)
        own = torch.optim.SGD(net.parameters(), lr=0.2)
        rank.distribute(net, [own])
        rank.enter_servers(names(running), Store())
        for batch in rank.batches(IDS, batch_size=BATCH, epochs=1, seed=0):
            with rank.step():
                two_rounds(net, own, batch.data)
        rank.runtime.settle(None)
        return net.values()

    if strategy:
        with servers(2) as running:
            [values] = on_ranks(1, run, token=TOKEN, strategy=strategy)
    else:
        with library():
            net = Net(plain=False)
            own = torch.optim.SGD(net.parameters(), lr=0.2)
            springtide.distribute(net, [own])
            for batch in springtide.batches(IDS, batch_size=BATCH, epochs=1, seed=0):
                with springtide.step():
                    two_rounds(net, own, batch.data)
            values = net.values()
    torch.testing.assert_close(values, plain.values(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_the_numbers_of_one_process_without_a_job(clip_norm: float | None) -> None:
    with library():
        net = Net(plain=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        springtide.distribute(net, optimizer, clip_norm=clip_norm)
        for batch in springtide.batches(IDS, batch_size=BATCH, epochs=EPOCHS, seed=0):
            with springtide.step():
                train(net, optimizer, batch, 3, False)
        values = net.values()
    torch.testing.assert_close(values, reference(clip_norm), rtol=0, atol=2e-5)
