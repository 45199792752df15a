"""Orders of a pass: shuffled, in sequence, weighted, without a short last batch; and the ledger's account."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger, contribution
from springtide.data.loop import LoopPlan, plan_loop
from springtide.data.source import make_source

X = torch.arange(103, dtype=torch.float32)


def run(plan: LoopPlan, world_size: int = 3) -> tuple[list[list[int]], Ledger]:
    """Global batches as the ranks see them, and the ledger at the end."""
    cursor, ledger, seen = Cursor(), Ledger(), []
    while not plan.ended(cursor):
        parts = [plan.batch(cursor, rank, world_size) for rank in range(world_size)]
        for part in parts:
            part.micro.contribute()
        sums = [contribution(part.micro.contributed_ids, 0, cursor.epoch) for part in parts]
        seen.append([int(number) for part in parts if part.samples for number in part.data.tolist()])
        cursor, ledger = plan.commit(ledger, cursor, *(float(sum(item)) for item in zip(*sums, strict=True)))
    return seen, ledger


def test_in_the_dataset_s_order() -> None:
    seen, ledger = run(plan_loop(X, batch_size=20, epochs=2, shuffle=False))
    assert [number for batch in seen[:6] for number in batch] == list(range(103))
    assert seen[6:] == seen[:6]
    assert (ledger.total_seen, ledger.repeated, ledger.lost) == (206, 0, 0)


def test_without_the_short_last_batch() -> None:
    plan = plan_loop(X, batch_size=20, epochs=3, drop_last=True)
    seen, ledger = run(plan)
    assert plan.total_steps == 15
    assert {len(batch) for batch in seen} == {20}
    left = [set(range(103)) - {n for batch in seen[e * 5 : e * 5 + 5] for n in batch} for e in range(3)]
    assert {len(numbers) for numbers in left} == {3}
    assert left[0] != left[1]
    assert (ledger.total_seen, ledger.repeated, ledger.lost) == (300, 0, 0)


def test_weighted_draws_by_chance_and_counts_each_draw_once() -> None:
    weights = torch.ones(103)
    weights[:50] = 0
    weights[100] = 50
    plan = plan_loop(X, batch_size=20, epochs=40, weights=weights)
    seen, ledger = run(plan)
    drawn = torch.tensor([number for batch in seen for number in batch])
    assert int(drawn.min()) >= 50
    assert 0.45 < float((drawn == 100).float().mean()) < 0.53  # 50 of 102
    assert seen[:6] != seen[6:12]
    assert run(plan)[0][:3] == seen[:3]
    assert (ledger.total_seen, ledger.repeated, ledger.lost) == (40 * 103, 0, 0)


def test_a_draw_that_is_lost_is_found() -> None:
    plan = plan_loop(X, batch_size=103, weights=torch.ones(103))
    batch = plan.batch(Cursor(), 0, 1)
    batch.micro.contribute()
    numbers = batch.micro.contributed_ids
    assert not torch.equal(numbers, batch.ids)
    twice = torch.cat([numbers[:1], numbers[:-1]])
    _, ledger = plan.commit(Ledger(), Cursor(), *(float(n) for n in contribution(twice, 0, 0)))
    assert (ledger.repeated, ledger.lost) == (1, 1)


class Ranges(IterableDataset[Any]):
    """Samples that can be read in ranges only; remembers which."""

    def __init__(self, samples: int = 103, short: bool = False) -> None:
        self.samples, self.short = samples, short
        self.read: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[float]:
        raise NotImplementedError

    def read_range(self, start: int, stop: int) -> Iterator[float]:
        self.read.append((start, stop))
        yield from (float(number) for number in range(start, stop - self.short))


def test_an_iterable_dataset_is_read_in_ranges() -> None:
    dataset = Ranges()
    seen, _ = run(plan_loop(dataset, batch_size=20, shuffle=False), world_size=2)
    assert [number for batch in seen for number in batch] == list(range(103))
    assert dataset.read[:2] == [(0, 10), (10, 20)]
    assert dataset.read[-1] == (100, 103)  # too short for two


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Ranges(), {}, "say shuffle=False"),
        (X, {"shuffle": 1}, "shuffle must be True or False"),
        (X[:5], {"drop_last": True}, "leaves nothing of 5 samples"),
        (X, {"weights": [1.0]}, "weights must be 103 numbers"),
        (X, {"weights": torch.zeros(103)}, "not all 0"),
        (X, {"weights": torch.full((103,), float("nan"))}, "must be finite"),
        (X, {"weights": torch.ones(103), "shuffle": False}, "draws at random"),
    ],
)
def test_bad_arguments(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_loop(dataset, batch_size=20, **options)


def test_ranges_that_cannot_be_read() -> None:
    with pytest.raises(ValueError, match=r"read_range\(0, 3\) yielded 2 samples"):
        make_source(Ranges(short=True)).fetch(torch.arange(3))
    with pytest.raises(ValueError, match="it is empty"):
        make_source(Ranges(0))


def test_workers_that_disagree_are_told() -> None:
    mine = plan_loop(X, batch_size=20, drop_last=True)
    with pytest.raises(ValueError, match="drop_last is 1 here and None there"):
        mine.check_same(plan_loop(X, batch_size=20).fingerprint())
    with pytest.raises(ValueError, match="drop_last is None here and 1 there"):
        plan_loop(X, batch_size=20).check_same(mine.fingerprint())
