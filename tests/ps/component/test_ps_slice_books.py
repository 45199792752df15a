"""Slices of tables that keep books: by themselves, and pushed range by range to real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_servers import TOKEN, names, servers

from springtide_ps.params.applied import AppliedBatches, IntervalSet
from springtide_ps.params.chunk import ChunkError, StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.embedding_shard import Slice, records
from springtide_ps.server.server import Server
from springtide_ps.server.shard import Shard
from springtide_ps.server.snapshot import describe
from springtide_ps.wire.client import Answer, RefusedError, ServerClient
from springtide_ps.wire.frames import DTYPE_NAMES, Kind
from springtide_ps.wire.stream import parse_address

TOKEN_OF = (1, 0, 1)
STEP_SPEC = StepSpec(1.0, False, ({"lr": 1.0},))
DIM = 3


def make(**spec: Any) -> Slice:
    return Slice(TableSpec(DIM, "sgd", init="zeros", **spec), 2, 0, [{"lr": 1.0}])


def record(ids: list[int], value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    gradients = torch.full((len(ids), DIM), value, dtype=dtype)
    return records(torch.tensor(ids, dtype=torch.int64), gradients).view(-1)


# ---- by itself


@given(st.lists(st.integers(0, 6), max_size=12))
@settings(deadline=None, max_examples=50)
def test_a_slice_takes_its_book_along_and_a_cut_does_not(numbers: list[int]) -> None:
    piece = make(max_rows=4)
    piece.applied_batches = AppliedBatches()
    for number in numbers:
        if piece.applied_batches.enter(number):
            piece.apply(record([number], 1.0), STEP_SPEC)
    again = piece.again(*piece.dump())
    assert again.applied_batches is not None
    assert again.applied_batches.to_json() == piece.applied_batches.to_json()
    assert again.applied_batches.applied == len(set(numbers)) == again.table.pushes
    assert again.dump()[0] == piece.dump()[0]
    assert torch.equal(again.dump()[1], piece.dump()[1])
    assert "book" not in describe(piece)["about"]
    piece.applied_batches = None
    assert piece.again(*piece.dump()).applied_batches is None


@pytest.mark.parametrize(
    "applied_batches", [{"applied": -1, "ranges": []}, {"applied": 0, "ranges": [2]}, "book"]
)
def test_a_book_that_is_none_is_refused(applied_batches: object) -> None:
    meta, payload = make().dump()
    with pytest.raises(ChunkError, match="no slice of a table"):
        Slice.load({**meta, "book": applied_batches}, payload)


def test_steps_become_a_book_and_a_book_of_all_ranges_steps() -> None:
    held = Shard(make(), 7)
    assert held.begin_applied_batches(skipped=2)
    assert held.chunk is not None
    assert held.chunk.applied_batches is not None
    assert held.chunk.applied_batches.to_json() == {"applied": 7, "ranges": [0, 7], "skipped": 2}
    assert held.version == 0
    held.chunk.applied_batches.enter(8)
    assert not held.count_steps(9)
    held.chunk.applied_batches.enter(7)
    assert not held.count_steps(8)
    assert held.count_steps(9)
    assert (held.version, held.chunk.applied_batches) == (9, None)
    assert not Shard().begin_applied_batches(0)  # nothing is here


# ---- on servers


class Client:
    """A worker's questions about one slice."""

    def __init__(self, address: str) -> None:
        self.address, self.link = address, ServerClient(parse_address(address), TOKEN)

    def ask(self, kind: Kind, about: dict[str, Any], **more: Any) -> Answer:
        return self.link.ask_step(kind, TOKEN_OF, about, **more).result(30)

    def load(self) -> None:
        meta, payload = make().dump()
        self.ask(Kind.LOAD, {**meta, "k": "t2.0", "s": 0}, payload=payload)

    def push(
        self, number: int, ids: list[int], value: float, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """Push one batch's gradients, and return the server's answer."""
        about = {"k": "t2.0", "r": number, "d": DTYPE_NAMES[dtype], "recipe": STEP_SPEC.to_json()}
        return self.ask(Kind.PUSH_BATCH, about, payload=record(ids, value, dtype)).meta

    def rows(self, ids: list[int]) -> list[float]:
        """The first number of each."""
        out = torch.zeros(len(ids), DIM)
        about = {"k": "t2", "s": 0, "p": [0], "n": [len(ids)]}
        self.ask(Kind.ROWS, about, payload=torch.tensor(ids), out=out)
        return out[:, 0].tolist()

    def applied_batches(self) -> dict[str, Any]:
        answer = self.ask(Kind.APPLIED_BATCHES, {}, any_size=True)
        assert answer.payload is not None
        found = json.loads(answer.payload.numpy().tobytes())
        assert isinstance(found, dict)
        return found


@pytest.fixture
def running() -> Iterator[list[Server]]:
    with servers(2) as found:
        yield found


@pytest.fixture
def clients(running: list[Server]) -> Iterator[list[Client]]:
    made = [Client(name) for name in names(running)]
    for client in made:
        about = {"me": "a", "members": ["a"], "s": 0, "lineage": "one", "books": True, "skipped": 0}
        client.ask(Kind.ENTER, about)
    yield made
    for client in made:
        client.link.close()


def test_a_range_counts_once_also_without_rows(clients: list[Client], running: list[Server]) -> None:
    client = clients[0]
    client.load()
    assert client.push(1, [5, -7], 1.0) == {"applied": 1, "ranges": [1, 2], "already": False, "before": 0}
    assert client.push(1, [5, -7], 9.0)["already"] is True
    assert client.rows([5, -7, 6]) == [-1.0, -1.0, 0.0]
    assert client.push(0, [], 1.0)["ranges"] == [0, 2]
    assert client.push(0, [5], 1.0)["already"] is True
    assert client.push(2, [5], 2.0, torch.bfloat16)["applied"] == 3
    assert client.rows([5, -7]) == [-3.0, -1.0]
    assert client.applied_batches() == {"t2.0": {"applied": 3, "ranges": [0, 3]}}
    assert (running[0].counters.batches, running[0].counters.repeated) == (3, 2)


def test_an_early_push_is_applied_when_its_range_is_pushed(
    clients: list[Client], running: list[Server]
) -> None:
    client = clients[0]
    client.load()
    named = {"k": "t2.0", "r": 0, "recipe": STEP_SPEC.to_json(), "o": 4, "me": "a"}
    assert client.ask(Kind.PUSH_BATCH, named).meta == {"whole": True}
    client.link.push_early(TOKEN_OF, "a", "t2.0", 4, {"d": "float16"}, record([5], 1.0, torch.float16))
    assert client.rows([5]) == [0.0]
    assert client.ask(Kind.PUSH_BATCH, named).meta["applied"] == 1
    assert client.rows([5]) == [-1.0]
    assert running[0].stashed_bytes == 0


def test_a_copy_has_every_range_that_was_answered(clients: list[Client]) -> None:
    first, second = clients
    first.load()
    first.push(0, [1], 1.0)
    first.ask(Kind.ARRANGE, {"fill": {"t2.0": [second.address]}})
    # Updates go on while the copy is made; from it on, each answer means that the copy has the update.
    number = 1
    while "t2.0" not in second.applied_batches():
        first.push(number, [1], 1.0)
        number += 1
    for more in range(number, number + 10):
        first.push(more, [1, 100 + more], 1.0, torch.bfloat16)
        assert second.rows([1, 100 + more]) == [-more - 1.0, -1.0]
    assert second.applied_batches() == first.applied_batches()


def test_what_does_not_fit_is_refused_and_changes_nothing(clients: list[Client]) -> None:
    client = clients[0]
    client.load()
    about = {"k": "t2.0", "r": 0, "d": "float32", "recipe": STEP_SPEC.to_json()}
    with pytest.raises(RefusedError, match="21 bytes are no gradients of rows, which have 20 bytes"):
        client.ask(Kind.PUSH_BATCH, about, payload=torch.zeros(21, dtype=torch.uint8))
    with pytest.raises(RefusedError, match="travel as one of float32"):
        client.ask(Kind.PUSH_BATCH, {**about, "d": "float64"}, payload=record([1], 1.0))
    with pytest.raises(RefusedError, match="is a slice of a table"):
        client.ask(Kind.PUSH_BATCH, {**about, "sel": True}, payload=record([1], 1.0))
    two = {**about, "recipe": StepSpec(1.0, False, ({}, {})).to_json()}
    with pytest.raises(RefusedError, match="2 parameter groups"):
        client.ask(Kind.PUSH_BATCH, two, payload=record([1], 1.0))
    with pytest.raises(RefusedError, match="is a slice of a table"):
        client.ask(Kind.PULL_CHUNK, {"k": "t2.0"}, out=torch.zeros(DIM))
    assert client.applied_batches() == {"t2.0": {"applied": 0, "ranges": []}}
    assert client.rows([1]) == [0.0]


def test_a_book_with_gaps_is_counted(clients: list[Client]) -> None:
    client = clients[0]
    client.load()
    for number in (9, 3, 4):
        client.push(number, [1], 1.0)
    applied_batches = AppliedBatches.from_json(client.applied_batches()["t2.0"])
    assert applied_batches.intervals == IntervalSet([(3, 5), (9, 10)])
