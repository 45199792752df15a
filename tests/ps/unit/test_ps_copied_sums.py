"""A copy that begins between two words on a step gets its sums as they were, whenever it reads them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from ps_loose import until

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import StepProtocolError

TOKEN = (1, 0, 1)
OPTIONS = {"lr": 0.5}


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_sum_on_its_way_to_a_copy_is_not_used_up(scale: float) -> None:
    sent, told = list[torch.Tensor](), threading.Event()

    def forward(address: str, which: tuple[int, int], key: str, total: torch.Tensor, done: Any) -> None:
        sent.append(total)  # it waits behind the chunk itself
        told.set()

    shards = ShardStore(forward, lambda *_: Future())
    try:
        shards.enter(TOKEN, ["a", "b"], 0, "L")
        shards.load(TOKEN, "k", 0, Chunk(torch.zeros(8), [(0, 0, 0, 8)], "sgd", [OPTIONS]))
        for member in "ab":
            shards.stage(TOKEN, 1, member, "k", torch.full((8,), 3.0))
            shards.prepare(TOKEN, 1, member, 1, False, lambda *_: None)
        shards.arrange(TOKEN, {}, {"k": ["other"]}, [])
        assert told.wait(60)
        for member in "ab":
            shards.commit(TOKEN, 1, member, StepSpec(scale, False, (OPTIONS,)), lambda *_: None)
        values = shards.shard("k")
        until(lambda: values.version == 1, "the step")
        assert torch.equal(values.values, torch.full((8,), -3.0 * scale))
        # The next step's gradient comes into the memory of what was used up.
        spare = shards.take_spare("k", 32, None)
        if spare is not None:
            spare.zero_()
        assert [total.tolist() for total in sent] == [[6.0] * 8]
    finally:
        shards.close()


@pytest.mark.parametrize("given_up", [True, False])
def test_only_the_sum_of_a_copy_that_stays_is_missed(given_up: bool) -> None:
    copy, begun = Future[Any](), threading.Event()
    sums, answers = list[Any](), list[Exception | None]()

    def fill(*_: Any) -> Future[Any]:
        begun.set()
        return copy

    def forward(address: str, which: tuple[int, int], key: str, total: torch.Tensor, done: Any) -> None:
        sums.append(done)

    shards = ShardStore(forward, fill)
    try:
        shards.enter(TOKEN, ["a"], 0, "L")
        shards.load(TOKEN, "k", 0, Chunk(torch.zeros(8), [(0, 0, 0, 8)], "sgd", [OPTIONS]))
        shards.arrange(TOKEN, {}, {"k": ["other"]}, [])
        assert begun.wait(60)
        shards.stage(TOKEN, 1, "a", "k", torch.ones(8))
        until(lambda: len(sums) == 1, "the sum is sent")
        if given_up:
            copy.set_exception(StepProtocolError("no room"))
        sums[0](StepProtocolError("chunk 'k' is not held here"))
        shards.prepare(TOKEN, 1, "a", 1, False, lambda _, error: answers.append(error))
        until(lambda: len(answers) == 1, "an answer")
        assert (answers[0] is None) == given_up
    finally:
        shards.close()
