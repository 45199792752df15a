"""A copy that begins between two words on a step gets its sums as they were, whenever it reads them."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from ps_loose import until

from springtide_ps.chunk import Chunk, Recipe
from springtide_ps.copying import CopyingShards

TOKEN = (1, 0, 1)
OPTIONS = {"lr": 0.5}


@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_sum_on_its_way_to_a_copy_is_not_used_up(scale: float) -> None:
    sent, told = list[torch.Tensor](), threading.Event()

    def forward(address: str, which: tuple[int, int], key: str, total: torch.Tensor, done: Any) -> None:
        sent.append(total)  # it waits behind the chunk itself
        told.set()

    shards = CopyingShards(forward, lambda *_: Future())
    try:
        shards.enter(TOKEN, ["a", "b"], 0, "L")
        shards.load(TOKEN, "k", 0, Chunk(torch.zeros(8), [(0, 0, 0, 8)], "sgd", [OPTIONS]))
        for member in "ab":
            shards.stage(TOKEN, 1, member, "k", torch.full((8,), 3.0))
            shards.prepare(TOKEN, 1, member, 1, False, lambda *_: None)
        shards.arrange(TOKEN, {}, {"k": ["other"]}, [])
        assert told.wait(60)
        for member in "ab":
            shards.commit(TOKEN, 1, member, Recipe(scale, False, (OPTIONS,)), lambda *_: None)
        values = shards._held["k"]
        until(lambda: values.version == 1, "the step")
        assert torch.equal(values.values, torch.full((8,), -3.0 * scale))
        # The next step's gradient comes into the memory of what was used up.
        spare = shards.take_spare("k", 32, None)
        if spare is not None:
            spare.zero_()
        assert [total.tolist() for total in sent] == [[6.0] * 8]
    finally:
        shards.close()
