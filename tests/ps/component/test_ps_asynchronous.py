"""Pushes that are applied when they come, through real servers over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any

import pytest
import torch
from ps_loose import until
from ps_servers import TOKEN, names, servers

from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.server import Server
from springtide_ps.wire.client import Answer, RefusedError, ServerClient
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.stream import parse_address

FIRST = (1, 0, 1)
SECOND = (1, 0, 2)


class Client:
    """A worker's questions in a few words."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.link = ServerClient(parse_address(address), TOKEN)

    def ask(
        self, kind: Kind, token: tuple[int, int, int], about: dict[str, Any], **more: Any
    ) -> Future[Answer]:
        return self.link.ask_step(kind, token, about, **more)

    def enter(self, token: tuple[int, int, int], members: list[str]) -> None:
        about = {"me": members[0], "members": members, "s": 0, "lineage": "one", "books": True, "skipped": 0}
        self.ask(Kind.ENTER, token, about).result(20)

    def load(self, token: tuple[int, int, int], key: str, values: list[float]) -> None:
        chunk = Chunk(torch.tensor(values), [(0, 0, 0, len(values))], "sgd", [{"lr": 1.0}])
        meta, payload = chunk.dump()
        self.ask(Kind.LOAD, token, {**meta, "k": key, "s": 0}, payload=payload).result(20)

    def push(
        self,
        token: tuple[int, int, int],
        number: int,
        key: str,
        gradient: list[float],
        lr: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[list[float], dict[str, Any]]:
        """(values after it, what the server says)."""
        out = torch.zeros(len(gradient))
        about = {"k": key, "r": number, "recipe": StepSpec(1.0, False, ({"lr": lr},)).to_json()}
        payload = torch.tensor(gradient, dtype=dtype)
        future = self.ask(Kind.PUSH_BATCH, token, about, payload=payload, out=out, typed=True)
        answer = future.result(20)
        return out.tolist(), answer.meta

    def pull(self, token: tuple[int, int, int], key: str, size: int = 2) -> list[float]:
        out = torch.zeros(size)
        self.ask(Kind.PULL_CHUNK, token, {"k": key}, out=out).result(20)
        return out.tolist()

    def applied_batches(self, token: tuple[int, int, int]) -> dict[str, Any]:
        answer = self.ask(Kind.APPLIED_BATCHES, token, {}, any_size=True).result(20)
        assert answer.payload is not None
        found = json.loads(answer.payload.numpy().tobytes())
        assert isinstance(found, dict)
        return found

    def open(self, token: tuple[int, int, int], clocks: dict[str, int], **more: Any) -> None:
        about = {"ranges": [], "clocks": clocks, "bound": None, **more}
        self.ask(Kind.OPEN, token, about).result(20)

    def lease(
        self,
        token: tuple[int, int, int],
        who: str,
        done: tuple[int, ...] = (),
        stop: int = 4,
        sent: tuple[int, ...] = (),
    ) -> Future[Answer]:
        if done:
            self.ask(Kind.FINISHED, token, {"me": who, "done": list(done)})
        about = {"me": who, "first": 0, "stop": stop, "sent": list(sent)}
        return self.ask(Kind.LEASE, token, about)

    def leased(self, token: tuple[int, int, int], who: str, **more: Any) -> dict[str, Any]:
        return self.lease(token, who, **more).result(20).meta


@pytest.fixture
def running() -> Iterator[list[Server]]:
    with servers(2) as found:
        yield found


@pytest.fixture
def clients(running: list[Server]) -> Iterator[list[Client]]:
    made = [Client(name) for name in names(running)]
    for client in made:
        client.enter(FIRST, ["a", "b"])
    yield made
    for client in made:
        client.link.close()


def test_a_range_counts_once(clients: list[Client], running: list[Server]) -> None:
    client = clients[0]
    client.load(FIRST, "k", [1.0, 2.0])
    values, said = client.push(FIRST, 3, "k", [0.5, 0.5])
    assert values == [0.5, 1.5]
    assert said == {"applied": 1, "ranges": [3, 4], "already": False, "before": 0}
    values, said = client.push(FIRST, 3, "k", [9.0, 9.0])
    assert values == [0.5, 1.5]
    assert said == {"applied": 1, "ranges": [3, 4], "already": True, "before": 1}
    values, said = client.push(FIRST, 2, "k", [1.0, 0.0], lr=0.5)
    assert values == client.pull(FIRST, "k") == [0.0, 1.5]
    assert said["before"] == 1
    assert client.applied_batches(FIRST) == {"k": {"applied": 2, "ranges": [2, 4]}}
    assert (running[0].counters.batches, running[0].counters.repeated) == (2, 1)


def test_a_new_generation_renews_the_token_and_nothing_else(clients: list[Client]) -> None:
    client = clients[0]
    client.load(FIRST, "k", [1.0, 2.0])
    client.push(FIRST, 0, "k", [1.0, 1.0])
    client.enter(SECOND, ["b"])
    with pytest.raises(RefusedError, match="is over"):
        client.push(FIRST, 1, "k", [1.0, 1.0])
    with pytest.raises(RefusedError, match="is over"):
        client.pull(FIRST, "k")
    assert client.applied_batches(SECOND) == {"k": {"applied": 1, "ranges": [0, 1]}}
    values, said = client.push(SECOND, 1, "k", [1.0, 1.0])  # sent again
    assert (values, said["already"]) == ([-1.0, 0.0], False)


def test_what_does_not_fit_is_refused_and_changes_nothing(clients: list[Client]) -> None:
    client = clients[0]
    client.load(FIRST, "k", [1.0, 2.0])
    with pytest.raises(RefusedError, match="4 bytes"):
        client.push(FIRST, 0, "k", [1.0])
    with pytest.raises(RefusedError, match="not held here"):
        client.push(FIRST, 0, "other", [1.0])
    about = {"k": "k", "r": 0, "recipe": StepSpec(1.0, False, ({}, {})).to_json()}
    with pytest.raises(RefusedError, match="2 parameter groups"):
        client.ask(Kind.PUSH_BATCH, FIRST, about, payload=torch.zeros(2), typed=True).result(20)
    assert client.applied_batches(FIRST) == {"k": {"applied": 0, "ranges": []}}


def test_a_chunk_takes_its_book_along(clients: list[Client]) -> None:
    client = clients[0]
    client.load(FIRST, "k", [1.0, 2.0])
    client.push(FIRST, 7, "k", [1.0, 1.0])
    answer = client.ask(Kind.DUMP, FIRST, {"k": "k"}, any_size=True).result(20)
    assert answer.payload is not None
    again = Chunk.load(answer.meta, answer.payload)
    assert isinstance(again.applied_batches, AppliedBatches)
    assert again.applied_batches.to_json() == {"applied": 1, "ranges": [7, 8]}


def test_a_copy_has_every_update_that_was_answered(clients: list[Client]) -> None:
    first, second = clients
    first.load(FIRST, "k", [0.0, 0.0])
    first.push(FIRST, 0, "k", [1.0, 0.0])
    first.ask(Kind.ARRANGE, FIRST, {"fill": {"k": [second.address]}}).result(20)
    # Updates go on while the copy is made; from it on, each answer means that the copy has the update.
    number = 1
    while "k" not in second.applied_batches(FIRST):
        first.push(FIRST, number, "k", [1.0, 0.0])
        number += 1
    for more in range(number, number + 20):
        # In 16 bits on the way, of which the copy gets what the first one got.
        values, _ = first.push(FIRST, more, "k", [1.0, 0.0], dtype=torch.bfloat16)
        assert second.pull(FIRST, "k") == values == [-more - 1.0, 0.0]
    assert second.applied_batches(FIRST) == first.applied_batches(FIRST)


def test_a_push_is_not_answered_when_its_copy_fails(clients: list[Client], running: list[Server]) -> None:
    first, second = clients
    for client in clients:
        client.load(FIRST, "k", [0.0, 0.0])
    first.ask(Kind.ARRANGE, FIRST, {"forward": {"k": [second.address]}}).result(20)
    assert first.push(FIRST, 0, "k", [1.0, 0.0])[0] == [-1.0, 0.0]
    second.enter(SECOND, ["a"])  # refuses the old token
    with pytest.raises(RefusedError, match="copy could not be made"):
        first.push(FIRST, 1, "k", [1.0, 0.0])
    assert second.applied_batches(SECOND) == {"k": {"applied": 1, "ranges": [0, 1]}}


def test_push_waits_for_hanging_copy_until_next_generation(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    for client in clients:
        client.load(FIRST, "k", [0.0, 0.0])
    first.ask(Kind.ARRANGE, FIRST, {"forward": {"k": [second.address]}}).result(20)
    about = {"k": "k", "r": 0, "recipe": StepSpec(1.0, False, ({"lr": 1.0},)).to_json()}
    values = torch.zeros(2)
    with running[1].sync_handler.store.shard("k").lock:
        pushed = first.ask(
            Kind.PUSH_BATCH, FIRST, about, payload=torch.tensor([1.0, 0.0]), out=values, typed=True
        )
        with pytest.raises(NoAnswer):
            pushed.result(0.05)
        first.enter(SECOND, ["a"])
        with pytest.raises(RefusedError, match=r"generation \(1, 0, 1\) is over"):
            pushed.result(20)
    # What the copy says in the end comes too late for anybody, and nobody waits until it is made.
    assert first.push(SECOND, 0, "k", [1.0, 0.0])[1]["already"]
    made = {"k": {"applied": 1, "ranges": [0, 1]}}
    until(lambda: second.applied_batches(FIRST) == made, "the copy")
    assert not values.any()


def test_ranges_are_leased_and_the_end_is_told_to_all(clients: list[Client]) -> None:
    client = clients[0]
    early = client.lease(FIRST, "a")
    with pytest.raises(NoAnswer):
        early.result(0.05)
    client.open(FIRST, {"a": 0, "b": 0}, ranges=[1, 3])
    assert early.result(20).meta == {"range": 0, "finished": 2, "waited": True}
    assert client.leased(FIRST, "b") == {"range": 3, "finished": 2, "waited": False}
    waits = client.lease(FIRST, "a", (0,))
    with pytest.raises(NoAnswer):
        waits.result(0.05)
    assert client.leased(FIRST, "b", done=(3,)) == {"finished": 4, "waited": False}
    assert waits.result(20).meta == {"finished": 4, "waited": True}
    with pytest.raises(RefusedError, match="no member"):
        client.leased(FIRST, "stranger")


def test_next_batch_is_leased_while_the_last_is_on_its_way(clients: list[Client]) -> None:
    client = clients[0]
    client.open(FIRST, {"a": 0, "b": 0}, bound=2)
    assert client.leased(FIRST, "a")["range"] == 0
    assert client.leased(FIRST, "a", sent=(0,)) == {"range": 1, "finished": 0, "waited": False}
    ahead = client.lease(FIRST, "a", (0,), sent=(1,))  # it would be the third step beside none of b's
    with pytest.raises(NoAnswer):
        ahead.result(0.05)
    assert client.leased(FIRST, "b")["range"] == 2
    client.ask(Kind.FINISHED, FIRST, {"me": "b", "done": [2]}).result(20)
    assert ahead.result(20).meta == {"range": 3, "finished": 2, "waited": True}
    for rubbish in ({"done": 3}, {"done": [-1]}, {"done": [0.5]}, {"done": [0] * 1025}):
        with pytest.raises(RefusedError, match="done"):
            client.ask(Kind.FINISHED, FIRST, {"me": "a", **rubbish}).result(20)
    with pytest.raises(RefusedError, match="no member"):
        client.ask(Kind.FINISHED, FIRST, {"me": "stranger", "done": [1]}).result(20)


def test_a_member_in_front_waits_until_the_slowest_moves(clients: list[Client]) -> None:
    client = clients[0]
    client.open(FIRST, {"a": 0, "b": 0}, bound=1)
    assert client.leased(FIRST, "a", stop=9)["range"] == 0
    ahead = client.lease(FIRST, "a", (0,), stop=9)
    assert client.leased(FIRST, "b", stop=9)["range"] == 1
    assert not ahead.done()
    assert client.leased(FIRST, "b", done=(1,), stop=9)["range"] in (2, 3)
    assert ahead.result(20).meta["waited"]


def test_questions_of_an_old_generation_are_sent_away(clients: list[Client]) -> None:
    client = clients[0]
    client.open(FIRST, {"a": 0}, bound=None)
    assert client.leased(FIRST, "a", stop=1)["range"] == 0
    client.enter(SECOND, ["a", "b"])
    waits = client.lease(SECOND, "b", stop=1)
    with pytest.raises(RefusedError, match="is over"):
        client.lease(FIRST, "a", stop=1).result(20)
    client.open(SECOND, {"a": 1, "b": 1}, ranges=[0, 1])
    assert waits.result(20).meta == {"finished": 1, "waited": True}
    with pytest.raises(RefusedError, match="is over"):
        client.open(FIRST, {"a": 0})
