"""Data in shards in a script without a job: what trains, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from stream_job import Endless
from worker_alone import Script, library

import springtide
from springtide.comm.process_group import Group
from springtide.coordination import outcome
from springtide.data import Cursor, Shards, plan_loop
from springtide.elastic.lookahead import GroupFailed, Lookahead
from springtide.errors import SpringtideError, UsageError
from springtide.loading.streams import make_stream_loader

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(4, 30, 4, generator=GENERATOR)
Y = torch.randn(4, 30, 2, generator=GENERATOR)


def read(shard: int) -> Iterator[Any]:
    return zip(X[shard % 4][: 10 + shard % 21], Y[shard % 4], strict=False)


def train(dataset: Any, **options: Any) -> list[Any]:
    """Train it, and return the batches."""
    script, found = Script(), []
    for batch in springtide.batches(dataset, batch_size=8, **options):
        with springtide.step():
            script.loss(batch).backward()
            script.finish()
        found.append(batch)
    return found


def test_a_script_without_a_job_trains_each_sample_once() -> None:
    with library() as runtime:
        batches = train(Shards(range(6), read), epochs=2, shuffle_buffer=16)
        audit = runtime.position.ledger.audit()
    assert audit["totalSeen"] == 2 * sum(10 + shard for shard in range(6))
    assert (audit["epoch"], audit["repeated"], audit["lost"], audit["expected"]) == (2, 0, 0, 0)
    assert {len(batch[0]) for batch in batches[:9]} == {8}


def test_a_source_without_an_end_ends_when_the_script_says() -> None:
    with library() as runtime:
        batches = train(
            Shards(Endless(), read),
            until=lambda: runtime.position.cursor.step == 25,
            collate_fn=torch.utils.data.default_collate,
        )
        assert runtime.position.ledger.audit()["totalSeen"] == 200
        end = runtime.exit.finished()
    assert len(batches) == 25
    assert isinstance(end, outcome.Finished)
    assert (end.taken["step"], end.taken["samples"]) == (25, 200)


def test_micro_batches_take_samples_of_shards() -> None:
    with library() as runtime:
        script = Script()
        for batch in springtide.batches(Shards(range(6), read), batch_size=16, micro_batch=4, min_part=2):
            with springtide.step():
                for micro in batch.split():
                    assert len(micro[0]) <= 4
                    script.loss(micro).backward()
                script.finish()
        assert runtime.position.ledger.audit()["totalSeen"] == sum(10 + shard for shard in range(6))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rehearsals": 1}, "rehearsals="),
    ],
)
def test_what_shards_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    with library(), pytest.raises(UsageError, match=reason):
        train(Shards(range(6), read), **options)


class Broken(Group):
    """A group of two whose other member is lost."""

    def __init__(self) -> None:
        super().__init__(None, 0, 2, 0.0)

    def _start_reduce(self, tensor: torch.Tensor, operation: Any, in_place: bool = False) -> Any:
        raise RuntimeError("Connection closed by peer [10.0.0.7]:4711")


def test_a_member_lost_while_others_look_ahead_changes_nothing() -> None:
    plan = plan_loop(Shards(range(6), read), batch_size=8)
    loader, lookahead = make_stream_loader(plan), Lookahead()
    expected = Lookahead().cursor(plan, make_stream_loader(plan), Cursor(), Group(None, 0, 1, 0.0))
    with pytest.raises(GroupFailed) as caught:
        lookahead.cursor(plan, loader, Cursor(), Broken())
    assert caught.value.failure.suspects == ["10.0.0.7"]
    assert lookahead.cursor(plan, loader, Cursor(), Group(None, 0, 1, 0.0)) == expected
    assert expected.streams is not None


def test_shards_without_samples_are_an_error() -> None:
    with library(), pytest.raises(SpringtideError, match="none of its shards has a sample"):
        train(Shards(range(6), lambda shard: []))


def test_wrong_arguments_are_refused() -> None:
    with library():
        Script()
        for options, kind in (
            ({"loader_workers": -1}, ValueError),
            ({"collate_fn": 3}, TypeError),
            ({"streams": 7}, ValueError),
        ):
            with pytest.raises(kind):
                springtide.batches(Shards(range(6), read), batch_size=8, **options)


def test_the_failed_step_names_the_shards() -> None:
    dataset = Shards(["a.tar", "b.tar"], lambda name: read(int(name == "b.tar")))
    with library() as runtime:
        with pytest.raises(ZeroDivisionError):
            train(dataset, collate_fn=lambda samples: 1 // 0)
        step, samples = runtime.steps.failed_step
    assert (step, samples) == (1, "8 samples from number 0 of pass 1 on, of the shards a.tar, b.tar")
