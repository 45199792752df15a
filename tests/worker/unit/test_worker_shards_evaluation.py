"""`batches(..., train=False)` over data in shards, in a script without a job: batches, means, refusals."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stream_job import Endless, keys
from worker_alone import Script, library

import springtide
from springtide.data import Shards, pack_tokens
from springtide.elastic.runtime import Runtime
from springtide.loading import evaluation
from springtide.loading.evaluation import ShardData

LENGTHS = [5, 0, 8, 3]


def read(shard: int) -> Iterator[float]:
    for number in range(LENGTHS[shard % 4]):
        yield 100.0 * shard + number


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Yield the library in a process that is inside of its training loop, between two steps."""
    with library() as runtime:
        script = Script()
        for batch in script.batches():
            with springtide.step():
                script.loss(batch).backward()
                script.finish()
            break
        yield runtime


def found(dataset: Any, **options: Any) -> tuple[list[Any], dict[str, float]]:
    """Return the data of the batches of an evaluation, and its means."""
    loop = springtide.batches(dataset, batch_size=4, train=False, **options)
    data = []
    for batch in loop:
        springtide.report(mean=batch.data.mean(), one=1)
        data.append(batch.data.tolist())
    return data, loop.values


@pytest.mark.parametrize("shards", [range(4), Endless(4)], ids=["list", "no length"])
def test_batches_end_with_their_shards(runtime: Runtime, shards: Any) -> None:
    data, means = found(Shards(shards, read))
    assert data == [[0, 1, 2, 3], [4], [200, 201, 202, 203], [204, 205, 206, 207], [300, 301, 302]]
    samples = [value for batch in data for value in batch]
    assert means == {"mean": pytest.approx(sum(samples) / len(samples)), "one": 1.0}
    assert runtime.position.cursor.step == 1


def test_samples_have_the_keys_that_training_gives_them(runtime: Runtime) -> None:
    batches = list(springtide.batches(Shards(range(4), read), batch_size=6, train=False))
    assert keys(batches[0].ids) == [(0, n) for n in range(5)]
    assert keys(batches[2].ids) == [(2, 6), (2, 7)]
    assert [batch.samples for batch in batches] == [5, 6, 2, 3]


def test_shards_without_samples_have_no_means(runtime: Runtime) -> None:
    assert found(Shards(range(3), lambda shard: [])) == ([], {})


def test_tokens_and_collating_go_on_as_in_training(runtime: Runtime) -> None:
    documents = Shards(["a", "b"], lambda shard: [[1, 2, 3], [4, 5]])
    blocks = pack_tokens(documents, 4, tokens=list, end=0)
    sizes = [batch["input_ids"].shape for batch in springtide.batches(blocks, batch_size=8, train=False)]
    assert sizes == [(2, 4), (2, 4)]
    loop = springtide.batches(Shards(range(4), read), batch_size=4, collate_fn=tuple, train=False)
    assert next(loop).data == (0.0, 1.0, 2.0, 3.0)
    list(loop)


def test_random_numbers_belong_to_samples(runtime: Runtime) -> None:
    def noisy(shard: int) -> Iterator[float]:
        for _ in range(LENGTHS[shard]):
            yield random.random() + torch.rand(()).item()

    data = ShardData(Shards(range(4), noisy), 4, list)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    whole = {tuple(keys(batch.ids)): batch.data for batch, _ in data.batches(0, 4)}
    assert torch.equal(torch.get_rng_state(), state), "the script's own are left alone"
    alone = {tuple(keys(batch.ids)): batch.data for batch, _ in data.batches(2, 3)}
    assert alone == {name: values for name, values in whole.items() if name[0][0] == 2}


def test_an_error_names_shard_and_sample(runtime: Runtime) -> None:
    def broken(shard: str) -> Iterator[float]:
        yield 1.0
        raise ValueError("no number")

    with pytest.raises(ValueError, match="no number") as caught:
        list(springtide.batches(Shards(["a.csv"], broken), batch_size=4, train=False))
    assert caught.value.__notes__ == ["while reading sample 1 of shard 'a.csv'"]


def test_an_end_must_be_in_sight(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MAX_UNCOUNTED", 50)
    with pytest.raises(ValueError, match=r"no length and no end in sight.*give a list of the shards"):
        springtide.batches(Shards(Endless(), read), batch_size=4, train=False)
    with pytest.raises(ValueError, match="8388609 shards; there can be 8388608"):
        springtide.batches(Shards(range(2**23 + 1), read), batch_size=4, train=False)
    with pytest.raises(ValueError, match="it has no shards"):
        springtide.batches(Shards([], read), batch_size=4, train=False)
    with pytest.raises(TypeError, match="collate_fn must be a function"):
        springtide.batches(Shards(range(4), read), batch_size=4, collate_fn=3, train=False)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        springtide.batches(Shards(range(4), read), batch_size=True, train=False)


def test_what_workers_have_to_agree_on_is_in_the_kind() -> None:
    kinds = [
        ShardData(Shards(names, read), size).kind
        for names, size in (
            ([1, 2], 4),
            ([2, 1], 4),
            ([1, 2], 8),
            (["/a/x", "/a/y"], 4),
            (["/b/x", "/b/y"], 4),
        )
    ]
    assert len(set(kinds)) == 4, "folders do not count"
    assert kinds[3] == kinds[4]
