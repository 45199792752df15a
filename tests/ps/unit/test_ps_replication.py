"""Copies of shards without sockets: other servers answer when the test lets them, or never."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ps_slices import PART, STEP_SPEC, dumped, make, record

from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.load_parts import loads
from springtide_ps.server.replication import Incoming
from springtide_ps.server.shard import Sum
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.server.step_protocol import StepProtocolError, Token

TOKEN: Token = (1, 0, 1)
KEY, ADDRESS = "t2.0", "10.0.0.2:4000"


@dataclass
class Other:
    """A server that copies go to. Sums are taken at once; parts of a copy have no answer by themselves."""

    sums: list[Sum] = field(default_factory=list)
    parts: list[Future[Any]] = field(default_factory=list)

    def forward(
        self,
        address: str,
        which: Sum,
        key: str,
        total: torch.Tensor,
        done: Callable[[Exception | None], None],
    ) -> None:
        self.sums.append(which)
        done(None)

    def fill(
        self, address: str, key: str, version: int, meta: dict[str, Any], payload: torch.Tensor
    ) -> Future[Any]:
        self.parts.append(Future())
        return self.parts[-1]


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def store(other: Other) -> Iterator[ShardStore]:
    made = ShardStore(other.forward, other.fill, PART)
    made.enter(TOKEN, ["a", "b"], 0, "one")
    made.resolve(TOKEN, None)
    yield made
    made.close()


def until(happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def begin_copy(store: ShardStore, other: Other, piece: Slice) -> None:
    store.load(TOKEN, KEY, 0, piece)
    store.arrange(TOKEN, {}, {KEY: [ADDRESS]}, [])
    until(lambda: bool(other.parts), "the copy does not begin")


def prepare(store: ShardStore) -> None:
    """Have both members prepare step 1, to which one of them has a gradient."""
    store.stage(TOKEN, 1, "a", KEY, record([1]))
    for member, count in (("a", 1), ("b", 0)):
        store.prepare(TOKEN, 1, member, count, False, lambda _, error: None)


def test_overdue_copy_ends_while_a_step_is_tried(
    store: ShardStore, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.server.replication.LOOK_SECONDS", 0.02)
    begin_copy(store, other, make(1))
    prepare(store)
    store.commit(TOKEN, 1, "a", STEP_SPEC, lambda _, error: None)
    store.try_step(TOKEN, 1, "a")
    store.settle()
    assert store.replicator.is_sending
    monkeypatch.setattr("springtide_ps.server.replication.ANSWER_SECONDS", 0.0)
    until(lambda: store.shard(KEY).forward == [], "the copy is still waited for")
    assert store.replicator.is_idle


def test_copy_without_answer_is_waited_for_until_it_is_overdue(store: ShardStore, other: Other) -> None:
    begin_copy(store, other, make(1))
    store.replicator.end_overdue()
    assert store.replicator.is_sending
    other.parts[0].set_result(None)
    until(lambda: store.replicator.is_idle, "the answer is not seen")
    assert store.shard(KEY).forward == [ADDRESS]


def test_refused_copy_gets_no_more_sums(store: ShardStore, other: Other) -> None:
    begin_copy(store, other, make(1))
    other.parts[0].set_exception(RuntimeError("there is no room"))
    until(lambda: store.shard(KEY).forward == [], "the answer is not seen")
    prepare(store)
    assert other.sums == []


def test_copy_that_has_begun_gets_the_sums(store: ShardStore, other: Other) -> None:
    begin_copy(store, other, make(1))
    prepare(store)
    assert other.sums == [(1, 0)]


def test_two_parts_of_a_large_slice_are_in_flight(store: ShardStore, other: Other) -> None:
    piece = make(30)
    begin_copy(store, other, piece)
    store.settle()
    assert len(other.parts) == 2
    other.parts[0].set_result(None)
    until(lambda: len(other.parts) == 3, "the next part is not sent")


def test_new_generation_forgets_the_copy_that_is_sent(store: ShardStore, other: Other) -> None:
    begin_copy(store, other, make(1))
    store.enter((1, 0, 2), ["a"], 0, "one")
    assert store.replicator.is_idle
    other.parts[0].set_result(None)  # to nobody
    assert store.replicator.is_idle


def test_update_of_a_slice_on_its_way_waits_until_it_is_whole(store: ShardStore) -> None:
    piece = make(30)
    first, *rest = loads(piece, PART)

    def take(about: dict[str, Any], memory: torch.Tensor) -> None:
        at, total = about["at"], first[0]["of"]
        store.load_part(TOKEN, KEY, 0, lambda: Slice.begin(first[0], total), at, total, memory)

    take(*first)
    assert store.postpone(TOKEN, KEY, lambda slice_: slice_.apply(record([1]), STEP_SPEC))
    for part in rest:
        take(*part)
    assert not store.replicator.is_coming(KEY)
    piece.apply(record([1]), STEP_SPEC)
    assert dumped(store.slice_of(KEY)) == dumped(piece)
    assert not store.postpone(TOKEN, KEY, lambda slice_: None)


def test_update_of_another_generation_is_not_postponed(store: ShardStore) -> None:
    store.replicator.begin_incoming(KEY, Incoming((1, 0, 0), 0, make(0), 100))
    assert not store.postpone(TOKEN, KEY, lambda slice_: None)


def test_part_out_of_order_is_refused(store: ShardStore) -> None:
    store.replicator.begin_incoming(KEY, Incoming(TOKEN, 0, make(0), 100))
    with pytest.raises(StepProtocolError, match="from byte 50 of 100 on, and 0 of 100 are here"):
        store.replicator.expect_part(KEY, 50, 100)


def test_slice_that_comes_anew_ends_the_earlier_one(store: ShardStore) -> None:
    earlier, later = (Incoming(TOKEN, 0, make(0), 100) for _ in range(2))
    store.replicator.begin_incoming(KEY, earlier)
    store.replicator.begin_incoming(KEY, later)
    with pytest.raises(StepProtocolError, match="comes anew from its beginning"):
        store.replicator.take_updates(KEY, earlier)
    store.replicator.give_up(KEY, earlier)  # which is not expected
    assert store.replicator.incoming(KEY) is later
