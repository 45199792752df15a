"""Slices of tables that are sent in parts: read as they were at one moment, copied while updates go on."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from ps_servers import TOKEN, names, servers
from ps_slices import PART, STEP_SPEC, Dumped, dumped, make, record

from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.load_parts import loads
from springtide_ps.server.server import Server
from springtide_ps.server.shard_store import ShardStore
from springtide_ps.wire.client import Answer, RefusedError, ServerClient
from springtide_ps.wire.frames import Header, Kind
from springtide_ps.wire.stream import parse_address

KEY = "t2.0"


def until(happens: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Client:
    """A worker's questions, in one generation after the other."""

    def __init__(self, address: str) -> None:
        self.address, self.number = address, 0
        self.link = ServerClient(parse_address(address), TOKEN)

    @property
    def token(self) -> tuple[int, int, int]:
        return (1, 0, self.number)

    def ask(self, kind: Kind, about: dict[str, Any], **more: Any) -> Answer:
        return self.link.ask_step(kind, self.token, about, **more).result(30)

    def enter(self, step: int = 0, *, applied_of: bool = False) -> None:
        self.enter_only(step, applied_of=applied_of)
        self.resolve()

    def enter_only(self, step: int = 0, *, applied_of: bool = False) -> None:
        self.number += 1
        about = {"me": "a", "members": ["a"], "s": step, "lineage": "one"}
        self.ask(Kind.ENTER, {**about, **({"books": True, "skipped": 0} if applied_of else {})})

    def resolve(self) -> None:
        self.ask(Kind.RESOLVE, {"recipe": STEP_SPEC.to_json()})

    def load(self, piece: Slice, version: int = 0, part: int = PART) -> None:
        for about, memory in loads(piece, part):
            self.ask(Kind.LOAD, {**about, "k": KEY, "s": version}, payload=memory)

    def step(self, number: int, ids: list[int]) -> None:
        self.link.stage_rows(self.token, number, "a", "t2", [(0, len(ids))], record(ids, number))
        self.ask(Kind.PREPARE, {"s": number, "me": "a", "count": 1, "norm": False})
        self.ask(Kind.COMMIT, {"s": number, "me": "a", "recipe": STEP_SPEC.to_json()})

    def prepare_only(self, number: int) -> None:
        """A member sends its words to every server; only one has gradients to add."""
        self.ask(Kind.PREPARE, {"s": number, "me": "a", "count": 0, "norm": False})
        self.ask(Kind.COMMIT, {"s": number, "me": "a", "recipe": STEP_SPEC.to_json()})

    def push(self, number: int, ids: list[int]) -> None:
        about = {"k": KEY, "r": number, "d": "float32", "recipe": STEP_SPEC.to_json()}
        self.ask(Kind.PUSH_BATCH, about, payload=record(ids, number))

    def push_early_one(self, number: int, ids: list[int], server: Server) -> None:
        """Push one gradient early, and wait until the servers with copies have stashed it too."""
        about = {"k": KEY, "me": "a", "o": number}
        self.ask(Kind.EARLY_PUSH, {**about, "d": "float32"}, payload=record(ids, number))

        def passed_on() -> bool:
            stashed = [o for c in server.connections for o in c.stash.stashed.values()]
            answers = [answer for gradient in stashed for answer in gradient.passed.values()]
            return bool(answers) and all(answer.done() for answer in answers)

        until(passed_on, "the early push is not passed on")
        self.ask(Kind.PUSH_BATCH, {**about, "r": number, "recipe": STEP_SPEC.to_json()})

    def inventory(self) -> str:
        answer = self.ask(Kind.INVENTORY, {}, any_size=True)
        assert answer.payload is not None
        return answer.payload.numpy().tobytes().decode()

    def dump(self) -> Dumped:
        """Return the description and the bytes of the slice, fetched in one answer."""
        answer = self.ask(Kind.DUMP, {"k": KEY}, any_size=True)
        assert answer.payload is not None
        about = {k: v for k, v in answer.meta.items() if k not in ("version", "of")}
        return about, answer.payload.numpy().tobytes()

    def await_copy(self) -> Dumped:
        """Wait until this server holds the slice as a copy, and return its content."""
        until(lambda: self.inventory() == KEY, "the copy does not come")
        return self.dump()


class Gates:
    """Answers to the parts that a server sends reach it when the test lets them."""

    def __init__(self, server: Server) -> None:
        shards = server.sync_handler.store
        self._fill: Callable[..., Future[Any]] = shards.replicator.fill
        self._parts: queue.Queue[tuple[Future[Any], Future[Any]]] = queue.Queue()
        self.sizes: list[int] = []
        shards.replicator.fill = self._send

    def _send(self, *what: Any) -> Future[Any]:
        gate: Future[Any] = Future()
        self.sizes.append(what[-1].nbytes)
        self._parts.put((self._fill(*what), gate))
        return gate

    def open(self, count: int) -> None:
        """Let so many answers through."""
        for _ in range(count):
            sent, gate = self._parts.get(timeout=30)
            if (error := sent.exception(30)) is not None:
                gate.set_exception(error)
            else:
                gate.set_result(None)

    def open_what_there_is(self) -> None:
        self.open(self._parts.qsize())

    def open_all(self, nbytes: int) -> None:
        self.open(-(-nbytes // PART) - (len(self.sizes) - self._parts.qsize()))


@pytest.fixture
def running() -> Iterator[list[Server]]:
    with servers(2, part_bytes=PART) as found:
        yield found


@pytest.fixture
def clients(running: list[Server]) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        made = [Client(name) for name in names(running)]
        for client in made:
            stack.callback(client.link.close)
        yield made


def fill(first: Client, second: Client) -> None:
    first.ask(Kind.ARRANGE, {"fill": {KEY: [second.address]}})


def test_a_slice_comes_in_parts_and_goes_in_parts(clients: list[Client]) -> None:
    client, piece = clients[0], make(20)
    client.enter()
    client.load(piece)
    assert client.inventory() == KEY
    assert client.dump() == dumped(piece)
    about = {"k": KEY, "at": 0, "most": PART}
    first = client.ask(Kind.DUMP, about, any_size=True)
    client.step(1, [3, 99])
    got = b""
    while first.payload is not None and len(first.payload):
        got += first.payload.numpy().tobytes()
        if len(got) == first.meta["of"]:
            break
        about = {**about, "at": len(got), "reading": first.meta.get("reading", 0)}
        first = client.ask(Kind.DUMP, about, any_size=True)
    assert got == dumped(piece)[1]
    assert "reading" not in first.meta
    piece.apply(record([3, 99], 1), STEP_SPEC)
    assert client.dump() == dumped(piece)


def test_steps_made_during_a_copy_are_all_in_the_copy(
    clients: list[Client], running: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.server.shard_store.MAX_SPECS", 2)
    first, second = clients
    gates, piece, steps = Gates(running[0]), make(30), 12
    for client in clients:
        client.enter()
    first.load(piece)
    fill(first, second)
    gates.open(2)
    for number in range(1, steps + 1):
        first.step(number, [number, 100 + number])
        second.prepare_only(number)
        assert second.inventory() == ""
    assert running[1].sync_handler.store.held_bytes > 0
    gates.open_all(piece.dumped_bytes)
    assert max(gates.sizes) <= PART
    wanted = first.dump()
    assert wanted[0]["pushes"] == piece.table.pushes + steps
    assert second.await_copy() == wanted
    assert running[0].sync_handler.store.snapshots.chunk_reads.nbytes == 0
    # And from then on.
    first.step(steps + 1, [1, 500])
    second.prepare_only(steps + 1)
    assert second.await_copy() == first.dump() != wanted


def test_steps_are_decided_faster_than_they_are_made(
    clients: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.server.shard_store.MAX_SPECS", 2)
    client, piece, expected, go_on, steps = clients[0], make(20), make(20), threading.Event(), 12
    bring = ShardStore.make_steps

    def late(self: ShardStore, *work: Any) -> None:
        assert go_on.wait(30)
        bring(self, *work)

    client.enter()
    client.load(piece)
    assert client.inventory() == KEY
    monkeypatch.setattr(ShardStore, "make_steps", late)
    for number in range(1, steps + 1):
        client.step(number, [number, 100 + number])
    go_on.set()
    for number in range(1, steps + 1):
        expected.apply(record([number, 100 + number], number), STEP_SPEC)
    assert client.inventory() == KEY
    assert client.dump() == dumped(expected)


def test_ranges_pushed_during_a_copy_are_all_in_the_copy(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    gates, piece = Gates(running[0]), make(30, max_rows=36)
    for client in clients:
        client.enter(applied_of=True)
    first.load(piece)
    first.push(0, [1])
    fill(first, second)
    gates.open(1)
    for number in (3, 1, 2, 7):
        first.push(number, [number, 100 + number])
        assert second.inventory() == ""
    first.push(2, [2])  # it has that one already
    first.push_early_one(5, [5, 105], running[0])
    gates.open_all(piece.dumped_bytes)
    wanted = first.dump()
    assert wanted[0]["book"] == {"applied": 6, "ranges": [0, 4, 5, 6, 7, 8]}
    assert second.await_copy() == wanted
    for number in range(8, 30):  # rows are let go, on both
        first.push(number, [1000 + number])
    assert first.dump()[0]["evicted"] > 0
    assert second.dump() == first.dump()


def test_half_made_copy_is_made_anew_in_the_next_generation(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    gates, piece = Gates(running[0]), make(30)
    for client in clients:
        client.enter()
    first.load(piece)
    begun = first.ask(Kind.DUMP, {"k": KEY, "at": 0, "most": PART}, any_size=True)
    fill(first, second)
    gates.open(2)
    first.step(1, [1, 2])
    second.prepare_only(1)
    for client in clients:
        client.enter(step=1)
    shards = [server.sync_handler.store for server in running]
    assert shards[1].held_bytes == 0
    assert shards[1].keys == []
    assert shards[0].snapshots.chunk_reads.nbytes == 0
    about = {"k": KEY, "at": PART, "most": PART, "reading": begun.meta["reading"]}
    with pytest.raises(RefusedError, match="not kept here any more"):
        first.ask(Kind.DUMP, about)
    late = {"k": KEY, "s": 0, "at": 2 * PART, "of": piece.dumped_bytes}
    with pytest.raises(RefusedError, match="and none are here"):
        second.ask(Kind.LOAD, late, payload=torch.zeros(PART, dtype=torch.uint8))
    sent = len(gates.sizes)
    fill(first, second)
    first.step(2, [2, 3])
    second.prepare_only(2)
    gates.open(sent - 2)
    gates.open(-(-piece.dumped_bytes // PART))
    assert second.await_copy() == first.dump()


def test_a_copy_that_breaks_off_costs_the_copy_alone(clients: list[Client], running: list[Server]) -> None:
    first, second = clients
    gates, piece = Gates(running[0]), make(30)
    for client in clients:
        client.enter()
    first.load(piece)
    fill(first, second)
    gates.open(2)
    running[1].close(30.0)

    def is_over() -> bool:
        gates.open_what_there_is()
        return not running[0].sync_handler.store.replicator.is_sending

    until(is_over, "the copy goes on")
    first.step(1, [1])
    piece.apply(record([1], 1), STEP_SPEC)
    assert first.dump() == dumped(piece)


def test_copy_whose_first_part_is_not_sent_holds_up_no_other(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    shards, piece, tried = running[0].sync_handler.store, make(30), threading.Event()
    send = shards.replicator.fill

    def fails(*_: Any) -> Future[Any]:
        tried.set()
        shards.replicator.fill = send
        raise ConnectionError("it is gone")

    for client in clients:
        client.enter()
    first.load(piece)
    shards.replicator.fill = fails
    fill(first, second)
    assert tried.wait(30)
    fill(first, second)
    assert second.await_copy() == dumped(piece)
    assert shards.snapshots.chunk_reads.nbytes == 0


def test_a_copy_that_has_no_answer_is_waited_for_no_longer(
    clients: list[Client], running: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.server.replication.ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("springtide_ps.server.replication.LOOK_SECONDS", 0.02)
    first, second = clients
    gates, piece = Gates(running[0]), make(30)
    for client in clients:
        client.enter()
    first.load(piece)
    fill(first, second)
    shards = running[0].sync_handler.store

    def is_over() -> bool:
        with shards.paused():  # what follows belongs to it
            return bool(gates.sizes) and not shards.replicator.is_sending

    until(is_over, "the copy is still waited for")
    assert shards.snapshots.chunk_reads.nbytes == 0
    assert shards.shard(KEY).forward == []


def test_parts_that_do_not_fit_are_refused(clients: list[Client], running: list[Server]) -> None:
    client, piece = clients[0], make(20)
    client.enter()
    first, second, *_ = loads(piece, PART)
    about = {"k": KEY, "s": 0}
    with pytest.raises(RefusedError, match="and none are here"):
        client.ask(Kind.LOAD, {**second[0], **about}, payload=second[1])
    with pytest.raises(RefusedError, match="are not 20 rows"):
        client.ask(Kind.LOAD, {**first[0], **about, "of": 1000}, payload=first[1])
    client.ask(Kind.LOAD, {**first[0], **about}, payload=first[1])
    with pytest.raises(RefusedError, match=f"from byte {2 * PART} of {piece.dumped_bytes} on, and {PART} of"):
        client.ask(Kind.LOAD, {**second[0], **about, "at": 2 * PART}, payload=second[1])
    assert client.inventory() == ""
    client.load(piece)  # from its beginning
    assert client.dump() == dumped(piece)
    with pytest.raises(RefusedError, match="byte 0 is next, not 5"):
        client.ask(Kind.DUMP, {"k": KEY, "at": 5, "most": PART})


def test_a_slice_without_room_is_refused_with_its_first_part() -> None:
    with servers(memory_limit=1000, part_bytes=PART) as running:
        client = Client(names(running)[0])
        client.enter()
        with pytest.raises(RefusedError, match="does not fit: 0 of 1000 bytes are taken") as refused:
            client.load(make(20))
        assert refused.value.error == "NoRoomError"
        client.load(make(10))
        assert client.inventory() == KEY
        client.link.close()


def test_a_copy_is_made_when_the_state_is_settled(clients: list[Client], running: list[Server]) -> None:
    """A copy of a slice is made only when no step of it is undecided.

    A new server does not know the step that is still to be made.
    """
    first, second = clients
    first.enter()
    first.load(make(1))
    first.link.stage_rows(first.token, 1, "a", "t2", [(0, 1)], record([1]))
    first.ask(Kind.PREPARE, {"s": 1, "me": "a", "count": 1, "norm": False})
    second.number = first.number
    for client in clients:
        client.enter_only(step=1)
    shards = running[0].sync_handler.store
    with shards.paused():
        about = {"t": list(first.token), "fill": {KEY: [second.address]}}
        answered: Future[Any] = Future()
        running[0].sync_handler.answer(
            Header(Kind.ARRANGE, 1, 0, 0), about, torch.empty(0, dtype=torch.uint8), answered.set_result
        )
        assert answered.result(0).frame.kind is Kind.DONE
        assert not shards.has_copy_to_send()
    for client in clients:
        client.resolve()
    assert second.await_copy() == first.dump()
    first.step(2, [1, 2])
    second.prepare_only(2)
    assert second.await_copy() == first.dump()


def test_copy_without_room_gets_no_updates_and_delays_none(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    running[1].sync_handler.memory_limit = 1
    for client in clients:
        client.enter(applied_of=True)
    first.load(make(1))
    assert make(1).dumped_bytes <= PART
    fill(first, second)
    shards = running[0].sync_handler.store

    def is_over() -> bool:
        with shards.paused():
            shards.settle()
            return shards.replicator.is_idle  # the refusal is here

    until(is_over, "the copy is still waited for")
    first.push(0, [1])
    assert shards.shard(KEY).forward == []
    assert first.dump()[0]["book"] == {"applied": 1, "ranges": [0, 1]}
    assert running[1].sync_handler.store.keys == []


@pytest.mark.parametrize("rows", [1, 30])
def test_copy_to_a_hanging_server_delays_no_step_or_generation(
    clients: list[Client], running: list[Server], rows: int
) -> None:
    first, second = clients
    gates, piece = Gates(running[0]), make(rows)
    for client in clients:
        client.enter()
    first.load(piece)
    fill(first, second)
    until(lambda: bool(gates.sizes), "the copy does not begin")
    first.step(1, [1])
    piece.apply(record([1], 1), STEP_SPEC)
    assert first.dump() == dumped(piece)
    first.enter(step=1)
    assert first.inventory() == KEY
