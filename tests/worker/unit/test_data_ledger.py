import dataclasses
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data import Cursor, Ledger, contribution, join_halves, split_halves
from springtide.data.ledger import DatasetSum, expected_hash
from springtide.data.mixing import MASK_64, mix, mix_tensor

N = 12
words = st.integers(0, MASK_64)


def step(ledger: Ledger, before: Cursor, ids: list[int], *, batch: int = 4, skipped: bool = False) -> Ledger:
    after = before.advance(batch, N)
    summed = contribution(torch.tensor(ids, dtype=torch.int64), before.stage, before.epoch)
    return ledger.commit(before, after, N, *map(float, summed), skipped=skipped)


def epoch(ledger: Ledger, start: Cursor, batches: list[list[int]]) -> tuple[Ledger, Cursor]:
    cursor = start
    for ids in batches:
        ledger, cursor = step(ledger, cursor, ids), cursor.advance(4, N)
    return ledger, cursor


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1))
def test_the_vectorised_mix_is_the_scalar_one(value: int) -> None:
    assert int(mix_tensor(torch.tensor([value]))) & MASK_64 == mix(value)


def test_the_mix_is_splitmix64() -> None:
    # The published generator for seed 0: mix(0) is its first output, and each next state is one increment on.
    assert mix(0) == 0xE220A8397B1DCDAF
    assert mix(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@settings(deadline=None)
@given(st.lists(words, min_size=1, max_size=200), st.integers(1, 5000))
def test_halves_survive_a_float64_sum_over_many_workers(values: list[int], times: int) -> None:
    low = high = torch.zeros((), dtype=torch.float64)
    for value in values:
        lo, hi = split_halves(value)
        low, high = low + float(lo) * times, high + float(hi) * times
    assert join_halves(float(low), float(high)) == sum(values) * times & MASK_64


def test_a_million_workers_with_the_greatest_halves_stay_exact() -> None:
    workers = 1 << 20
    total = float((1 << 32) - 1) * workers
    assert join_halves(total, total) == MASK_64 * workers & MASK_64


@pytest.mark.parametrize("bad", [-1.0, 0.5, float("nan"), float("inf"), 2.0**54])
def test_a_sum_that_is_no_exact_integer_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="half of a hash sum"):
        join_halves(bad, 0.0)
    with pytest.raises(ValueError, match="half of a hash sum"):
        join_halves(0.0, bad)


@settings(deadline=None)
@given(st.permutations(list(range(N))), st.integers(0, 5), st.integers(0, 1000))
def test_any_order_and_cut_of_the_epoch_gives_the_expected_hash(
    order: list[int], stage: int, number: int
) -> None:
    total = 0
    for cut in (order[:5], order[5:5], order[5:]):
        part = contribution(torch.tensor(cut, dtype=torch.int64), stage, number)
        total += join_halves(part.hash_lo, part.hash_hi)
    assert total & MASK_64 == expected_hash(N, stage, number)


def test_expected_hash_is_the_same_when_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = contribution(torch.arange(1003), 0, 3)
    monkeypatch.setattr("springtide.data.ledger.IDS_AT_ONCE", 100)
    assert expected_hash(1003, 0, 3) == join_halves(whole.hash_lo, whole.hash_hi)


@settings(deadline=None)
@given(n=st.integers(1, 500), start=st.integers(0, 499), batch=st.integers(1, 60))
def test_sum_of_a_dataset_is_whole_at_the_end_of_an_epoch(n: int, start: int, batch: int) -> None:
    """The sum of a data set is whole at the end of an epoch, wherever a restored job begins.

    Each step computes its share, and only the last one may compute all of it.
    """
    total, position = DatasetSum(n), min(start, n - 1)
    while position < n:
        before = total.done
        total.advance(min(batch, n - position), n - position)
        assert total.done - before <= -(-(n - before) * batch // (n - position))
        position += batch
    assert total.done == n
    assert total.total() == int(mix_tensor(torch.arange(n)).sum()) & MASK_64


def test_a_clean_epoch_closes_with_nothing_repeated_or_lost() -> None:
    ledger, cursor = epoch(Ledger(), Cursor(), [[0, 1, 2, 3], [4, 5, 6, 7], [11, 10, 9, 8]])
    assert ledger == Ledger(stage=0, epoch=1, expected=N, total_seen=N)
    ledger = step(ledger, cursor, [5, 6, 7, 8])
    assert (ledger.epoch, ledger.count, ledger.total_seen) == (1, 4, N + 4)
    assert ledger.audit() == {
        "stage": 0,
        "epoch": 1,
        "seen": 4,
        "expected": N,
        "repeated": 0,
        "lost": 0,
        "skipped": 0,
        "totalSeen": N + 4,
    }


@pytest.mark.parametrize(
    ("last", "repeated", "lost"),
    [
        ([8, 9, 10], 0, 1),
        ([], 0, 4),
        ([8, 9, 10, 11, 0, 0], 2, 0),
        ([8, 9, 10, 0], 1, 1),  # as many as there should be, but not the same
    ],
)
def test_a_wrong_epoch_is_found_at_its_end(last: list[int], repeated: int, lost: int) -> None:
    ledger, _ = epoch(Ledger(), Cursor(), [[0, 1, 2, 3], [4, 5, 6, 7], last])
    assert (ledger.repeated, ledger.lost, ledger.count) == (repeated, lost, 0)


@settings(deadline=None)
@given(st.integers(0, N - 1), st.integers(0, N - 1))
def test_any_single_swap_is_found(gone: int, twice: int) -> None:
    ids = list(range(N))
    ids[gone] = twice
    ledger, _ = epoch(Ledger(), Cursor(), [ids[:4], ids[4:8], ids[8:]])
    assert (ledger.repeated, ledger.lost) == ((0, 0) if gone == twice else (1, 1))


def test_ids_that_were_counted_under_another_epoch_do_not_pass() -> None:
    before = Cursor()
    wrong = contribution(torch.arange(N), 0, 1)
    ledger = Ledger().commit(before, before.advance(N, N), N, *map(float, wrong))
    assert (ledger.repeated, ledger.lost) == (1, 1)


def test_faults_add_up_over_epochs() -> None:
    ledger, cursor = epoch(Ledger(), Cursor(), [[0, 1, 2, 3], [4, 5, 6, 7], [8]])
    ledger, _ = epoch(ledger, cursor, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 1]])
    assert (ledger.epoch, ledger.lost, ledger.repeated) == (2, 3, 1)


def test_a_skipped_step_is_counted_and_its_samples_are_seen() -> None:
    ledger = step(Ledger(), Cursor(), [0, 1, 2, 3], skipped=True)
    assert (ledger.skipped, ledger.count) == (1, 4)


def test_a_loop_that_the_script_left_is_not_lost() -> None:
    ledger = step(Ledger(), Cursor(), [0, 1, 2, 3])
    second = Cursor(step=1).next_stage()
    ledger, cursor = epoch(ledger, second, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    assert (ledger.stage, ledger.epoch, ledger.lost, ledger.repeated, ledger.total_seen) == (
        1,
        1,
        0,
        0,
        N + 4,
    )
    assert cursor == Cursor(1, 1, 0, 4)


@pytest.mark.parametrize("before", [Cursor(epoch=1), Cursor(stage=0, epoch=3)])
def test_a_step_of_another_epoch_is_refused(before: Cursor) -> None:
    with pytest.raises(ValueError, match="the ledger stands in stage 0, epoch 0"):
        step(Ledger(), before, [0, 1, 2, 3])


@pytest.mark.parametrize("count", [-1.0, 1.5])
def test_a_count_that_is_no_integer_is_refused(count: float) -> None:
    with pytest.raises(ValueError, match="number of samples of a step"):
        Ledger().commit(Cursor(), Cursor().advance(4, N), N, count, 0.0, 0.0)


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int64 of shape"):
        contribution(torch.zeros(3), 0, 0)
    with pytest.raises(ValueError, match="int64 of shape"):
        contribution(torch.zeros(1, 3, dtype=torch.int64), 0, 0)


def test_json_gives_the_ledger_back() -> None:
    ledger = dataclasses.replace(step(Ledger(), Cursor(), [0, 1, 2, 3]), hash=MASK_64)
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


@pytest.mark.parametrize(
    "change", [{"hash": -1}, {"hash": 1 << 64}, {"lost": 1.0}, {"count": True}, {"other": 1}]
)
def test_malformed_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="ledger:"):
        Ledger.from_json(Ledger().to_json() | change)
