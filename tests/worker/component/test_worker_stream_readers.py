"""Processes that read streams of shards: what they read, what they raise, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stream_job import StreamJob

from springtide.data import Cursor, Shards, plan_loop
from springtide.errors import SpringtideError
from springtide.loading.streams import StreamLoader, make_stream_loader

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def new_loader() -> Iterator[Callable[..., tuple[Any, StreamLoader]]]:
    loaders: list[StreamLoader] = []

    def make(read: Callable[..., Any], shards: int = 4, **options: Any) -> tuple[Any, StreamLoader]:
        plan = plan_loop(Shards(range(shards), read), **({"batch_size": 8, "min_part": 1} | options))
        loaders.append(make_stream_loader(plan, 2, collate_fn=list))
        return plan, loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def first_batch(plan: Any, loader: StreamLoader) -> list[Any]:
    """Return the samples of the first step of a job of one member."""
    cursor = plan.streams.opened(Cursor())
    while not plan.is_known(cursor):
        cursor = plan.streams.extended(cursor, loader.look(cursor, 0, 1))
    loader.stand_at(cursor, 0, 1)
    samples: list[Any] = loader.read(1, plan.global_ids(cursor))
    return samples


def test_processes_read_what_one_thread_reads() -> None:
    found = []
    for processes in (0, 2):
        job = StreamJob(
            [17, 0, 30, 5, 22], {"batch_size": 12, "epochs": 2, "shuffle_buffer": 20}, processes=processes
        )
        for size in (2, 1, 3, 3, 2, 2, 1, 1, 2, 2, 2, 2, 2, 2):
            if not job.ended:
                job.resize(size)
                job.step()
        job.close()
        assert job.ended
        found.append((job.steps, job.ledger))
    assert found[0] == found[1]


def test_processes_may_compute_after_the_parent_did(
    new_loader: Callable[..., tuple[Any, StreamLoader]],
) -> None:
    def read(shard: int) -> Iterator[float]:
        for number in range(20):
            yield float((torch.full((300, 300), float(number)) @ torch.ones(300, 300)).mean())

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.ones(2000, 2000).sum()  # the parent's pool of threads begins
        samples = first_batch(*new_loader(read))
    finally:
        torch.set_num_threads(threads)
    assert {round(sample) % 300 for sample in samples} == {0}


def test_an_error_of_the_data_names_the_sample(
    new_loader: Callable[..., tuple[Any, StreamLoader]],
) -> None:
    def read(shard: int) -> Iterator[int]:
        yield shard
        raise LookupError("no such picture")

    with pytest.raises(LookupError, match="no such picture") as caught:
        first_batch(*new_loader(read))
    assert "while reading sample 1 of shard" in caught.value.__notes__[0]


def test_an_error_that_cannot_travel_is_told_in_words(
    new_loader: Callable[..., tuple[Any, StreamLoader]],
) -> None:
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("not this one")

    def read(shard: int) -> Iterator[int]:
        raise Odd("broken file")
        yield 0

    with pytest.raises(RuntimeError, match="Odd: broken file"):
        first_batch(*new_loader(read))


def test_a_process_that_dies_is_told(new_loader: Callable[..., tuple[Any, StreamLoader]]) -> None:
    def read(shard: int) -> Iterator[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield 0

    began = time.monotonic()
    with pytest.raises(SpringtideError, match="a process that reads shards ended \\(exit code -9\\)"):
        first_batch(*new_loader(read))
    assert time.monotonic() - began < 30


def test_samples_draw_the_same_numbers_wherever_read(
    new_loader: Callable[..., tuple[Any, StreamLoader]],
) -> None:
    def read(shard: int, start: int) -> Iterator[tuple[int, int, float]]:
        for number in range(start, 30):
            yield shard, number, float(torch.rand(()))

    before = torch.get_rng_state()
    by_processes = first_batch(*new_loader(read))
    plan = plan_loop(Shards(range(4), read), batch_size=8, min_part=1)
    here = make_stream_loader(plan, collate_fn=list)
    assert first_batch(plan, here) == by_processes
    assert len({number for _, _, number in by_processes}) == 8
    assert torch.equal(torch.get_rng_state(), before), "the script's own numbers are left alone"
