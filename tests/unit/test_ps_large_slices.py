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
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_servers import TOKEN, names, servers

from springtide_ps.chunk import ChunkError, Recipe
from springtide_ps.client import Answer, RefusedError, ServerClient
from springtide_ps.frames import Kind
from springtide_ps.frozen import Cuts, give, tell
from springtide_ps.parts import loads
from springtide_ps.readings import KEPT_SECONDS, READINGS_LIMIT, Readings
from springtide_ps.rounds import RoundError
from springtide_ps.server import Server
from springtide_ps.slices import Slice, records
from springtide_ps.stream import parse_address
from springtide_ps.tables import TableSpec

DIM = 3
PART = 100
KEY = "t2.0"
RECIPE = Recipe(1.0, False, ({"lr": 0.5},))
Dumped = tuple[dict[str, Any], bytes]


def record(ids: list[int], value: float = 1.0) -> torch.Tensor:
    return records(torch.tensor(ids, dtype=torch.int64), torch.full((len(ids), DIM), float(value))).view(-1)


def make(rows: int = 0, optimizer: str = "adam", **spec: Any) -> Slice:
    """With rows that were trained."""
    piece = Slice(TableSpec(DIM, optimizer, seed=1, **spec), 2, 0, [{"lr": 0.5}])
    for first in range(0, rows, 7):
        piece.apply(record(list(range(first, min(rows, first + 7)))), RECIPE)
    return piece


def dumped(piece: Slice) -> Dumped:
    about, memory = piece.dump()
    return about, memory.numpy().tobytes()


# ---- by themselves


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 12), st.integers(1, 400), st.sampled_from(["sgd", "adagrad", "adam"]))
def test_parts_of_any_size_make_an_equal_slice(rows: int, part: int, optimizer: str) -> None:
    piece = make(rows, optimizer)
    made: Slice | None = None
    for about, memory in loads(piece, part):
        assert len(memory) <= part or "of" not in about
        if "of" not in about:
            made = Slice.load(about, memory)
            break
        if not about["at"]:
            made = Slice.begin(about, about["of"])
        assert made is not None
        assert not len(made.table)
        made.write(about["at"], memory)
    assert made is not None
    if piece.dumped_bytes > part:
        made.finish()
    assert dumped(made) == dumped(piece)
    for other in (piece, made):
        other.apply(record([3, 50]), RECIPE)
    assert dumped(made) == dumped(piece)


def test_what_is_no_slice_takes_no_memory() -> None:
    about = make(5).about()
    with pytest.raises(ChunkError, match="17 bytes are not 5 rows"):
        Slice.begin(about, 17)
    each = make(1).dumped_bytes
    with pytest.raises(ChunkError, match="no slice of a table"):
        Slice.begin({**about, "rows": 1 << 50}, each << 50)


MOVES = st.lists(
    st.sampled_from(["change", "drop", "freeze", "of the cut", "begin", "read", "read"]), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(MOVES, st.integers(1, 300))
def test_parts_of_one_moment_are_never_mixed_with_another(moves: list[str], part: int) -> None:
    cuts, piece = Cuts(lambda: 0.0), make(6)
    held: Slice | None = piece
    wanted: dict[int, tuple[Dumped, bytearray]] = {}
    cut: tuple[str, Dumped, bytearray] | None = None
    for number, move in enumerate(moves):
        if move in ("change", "drop") and held is not None:
            cuts.before("k", held, 0)
            held.apply(record([number, 100 + number]), RECIPE)
            held = None if move == "drop" else held
        elif move == "freeze" and held is not None:
            cuts.freeze(str(number), 0, 1, [("k", 0)])
            cut = str(number), dumped(held), bytearray()
        elif move == "begin" and held is not None:
            wanted[cuts.readings.begin("k")] = dumped(held), bytearray()
        elif move == "of the cut" and cut is not None:
            name, (about, memory), got = cut
            told = tell(cuts.find(name), "k", held, 0)
            assert told is not None
            assert told["bytes"] == len(memory)
            found = give(cuts.find(name), "k", held, 0, len(got), part)
            assert found is not None
            assert (found[0], found[2]) == (about, len(memory))
            got += found[1].numpy().tobytes()
            assert bytes(got) == memory[: len(got)]
            if len(got) == len(memory):
                with pytest.raises(RoundError, match="not here any more"):
                    give(cuts.find(name), "k", held, 0)
                assert cuts.nbytes == 0
                cut = None
        elif move == "read" and wanted:
            reading = min(wanted)
            (about, memory), got = wanted[reading]
            some = cuts.readings.take(reading, "k", held, len(got), part)
            assert (some[0], some[2]) == (about, len(memory))
            got += some[1].numpy().tobytes()
            assert bytes(got) == memory[: len(got)]
            if len(got) == len(memory):
                del wanted[reading]
    if not wanted:
        assert cuts.readings.nbytes == 0


def test_a_part_out_of_order_is_refused() -> None:
    cuts, piece = Cuts(lambda: 0.0), make(6)
    cuts.freeze("one", 0, 1, [("k", 0)])
    reading = cuts.readings.begin("k")
    assert give(cuts.find("one"), "k", piece, 0, 0, PART)
    cuts.readings.take(reading, "k", piece, 0, PART)
    for at in (0, PART + 1):
        with pytest.raises(RoundError, match=f"byte {PART} is next, not {at}"):
            give(cuts.find("one"), "k", piece, 0, at, PART)
        with pytest.raises(RoundError, match=f"byte {PART} is next, not {at}"):
            cuts.readings.take(reading, "k", piece, at, PART)


def test_only_what_is_still_to_be_read_is_copied_and_once() -> None:
    cuts, piece = Cuts(lambda: 0.0), make(6)
    cuts.freeze("one", 0, 1, [("k", 0)])
    give(cuts.find("one"), "k", piece, 0, 0, PART)
    readings = [cuts.readings.begin("k") for _ in range(3)]
    for reading in readings:
        cuts.readings.take(reading, "k", piece, 0, PART)
    for _ in range(2):
        cuts.before("k", piece, 0)
    assert cuts.nbytes == cuts.readings.nbytes == piece.dumped_bytes - PART
    for reading in readings:
        cuts.readings.end(reading)
    assert cuts.readings.nbytes == 0


def test_readings_that_nobody_goes_on_with_are_forgotten() -> None:
    now = [0.0]
    readings, piece = Readings(lambda: now[0]), make(6)
    old = readings.begin("k")
    readings.before("k", piece)
    assert readings.nbytes > 0
    now[0] = KEPT_SECONDS + 1
    readings.before("other", piece)
    assert readings.nbytes == 0
    with pytest.raises(RoundError, match="not kept here any more"):
        readings.take(old, "k", piece, 0, PART)
    for _ in range(READINGS_LIMIT):
        readings.begin("k")
    with pytest.raises(RoundError, match="are being read already"):
        readings.begin("k")
    readings.clear()
    readings.begin("k")


# ---- through servers


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

    def enter(self, step: int = 0, *, books: bool = False) -> None:
        self.number += 1
        about = {"me": "a", "members": ["a"], "s": step, "lineage": "one"}
        self.ask(Kind.ENTER, {**about, **({"books": True, "skipped": 0} if books else {})})
        self.ask(Kind.RESOLVE, {"recipe": RECIPE.to_json()})

    def load(self, piece: Slice, version: int = 0, part: int = PART) -> None:
        for about, memory in loads(piece, part):
            self.ask(Kind.LOAD, {**about, "k": KEY, "s": version}, payload=memory)

    def step(self, number: int, ids: list[int]) -> None:
        self.link.stage_rows(self.token, number, "a", "t2", [(0, len(ids))], record(ids, number))
        self.ask(Kind.PREPARE, {"s": number, "me": "a", "count": 1, "norm": False})
        self.ask(Kind.COMMIT, {"s": number, "me": "a", "recipe": RECIPE.to_json()})

    def prepare_only(self, number: int) -> None:
        """A member sends its words to every server; only one has gradients to add."""
        self.ask(Kind.PREPARE, {"s": number, "me": "a", "count": 0, "norm": False})
        self.ask(Kind.COMMIT, {"s": number, "me": "a", "recipe": RECIPE.to_json()})

    def push(self, number: int, ids: list[int]) -> None:
        about = {"k": KEY, "r": number, "d": "float32", "recipe": RECIPE.to_json()}
        self.ask(Kind.PUSH_RANGE, about, payload=record(ids, number))

    def push_offered(self, number: int, ids: list[int], server: Server) -> None:
        """When the copies have the offer, too."""
        about = {"k": KEY, "me": "a", "o": number}
        self.ask(Kind.OFFER, {**about, "d": "float32"}, payload=record(ids, number))

        def passed_on() -> bool:
            offers = [o for c in list(server._clients.values()) for o in c.offers._held.values()]
            answers = [answer for offer in offers for answer in offer.passed.values()]
            return bool(answers) and all(answer.done() for answer in answers)

        until(passed_on, "the offer is not passed on")
        self.ask(Kind.PUSH_RANGE, {**about, "r": number, "recipe": RECIPE.to_json()})

    def inventory(self) -> str:
        answer = self.ask(Kind.INVENTORY, {}, any_size=True)
        assert answer.payload is not None
        return answer.payload.numpy().tobytes().decode()

    def dump(self) -> Dumped:
        """In one answer."""
        answer = self.ask(Kind.DUMP, {"k": KEY}, any_size=True)
        assert answer.payload is not None
        about = {k: v for k, v in answer.meta.items() if k not in ("version", "of")}
        return about, answer.payload.numpy().tobytes()

    def await_copy(self) -> Dumped:
        """What this server holds once the copy is there."""
        until(lambda: self.inventory() == KEY, "the copy does not come")
        return self.dump()


class Gates:
    """Answers to the parts that a server sends reach it when the test lets them."""

    def __init__(self, server: Server) -> None:
        shards = server.steps.shards
        self._fill: Callable[..., Future[Any]] = shards._fill
        self._parts: queue.Queue[tuple[Future[Any], Future[Any]]] = queue.Queue()
        self.sizes: list[int] = []
        shards._fill = self._send

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
    piece.apply(record([3, 99], 1), RECIPE)
    assert client.dump() == dumped(piece)


def test_steps_go_on_while_a_copy_is_made_and_the_copy_has_them_all(
    clients: list[Client], running: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.shards._RECIPES_LIMIT", 2)
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
    assert running[1].steps.shards.held_bytes > 0
    gates.open_all(piece.dumped_bytes)
    assert max(gates.sizes) <= PART
    wanted = first.dump()
    assert wanted[0]["pushes"] == piece.table.pushes + steps
    assert second.await_copy() == wanted
    assert running[0].steps.shards.cuts.readings.nbytes == 0
    # And from then on.
    first.step(steps + 1, [1, 500])
    second.prepare_only(steps + 1)
    assert second.await_copy() == first.dump() != wanted


def test_ranges_are_pushed_while_a_copy_is_made_and_the_copy_has_them_all(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    gates, piece = Gates(running[0]), make(30, max_rows=36)
    for client in clients:
        client.enter(books=True)
    first.load(piece)
    first.push(0, [1])
    fill(first, second)
    gates.open(1)
    for number in (3, 1, 2, 7):
        first.push(number, [number, 100 + number])
        assert second.inventory() == ""
    first.push(2, [2])  # it has that one already
    first.push_offered(5, [5, 105], running[0])
    gates.open_all(piece.dumped_bytes)
    wanted = first.dump()
    assert wanted[0]["book"] == {"applied": 6, "ranges": [0, 4, 5, 6, 7, 8]}
    assert second.await_copy() == wanted
    for number in range(8, 30):  # rows are let go, on both
        first.push(number, [1000 + number])
    assert first.dump()[0]["evicted"] > 0
    assert second.dump() == first.dump()


def test_a_generation_ends_copies_that_are_half_made_and_the_next_one_makes_them_anew(
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
    shards = [server.steps.shards for server in running]
    assert shards[1].held_bytes == 0
    assert shards[1]._held == {}
    assert shards[0].cuts.readings.nbytes == 0
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
        return running[0].steps.shards._sending is None

    until(is_over, "the copy goes on")
    first.step(1, [1])
    piece.apply(record([1], 1), RECIPE)
    assert first.dump() == dumped(piece)


def test_a_copy_whose_first_part_cannot_be_sent_holds_up_no_other(
    clients: list[Client], running: list[Server]
) -> None:
    first, second = clients
    shards, piece, tried = running[0].steps.shards, make(30), threading.Event()
    send = shards._fill

    def fails(*_: Any) -> Future[Any]:
        tried.set()
        shards._fill = send
        raise ConnectionError("it is gone")

    for client in clients:
        client.enter()
    first.load(piece)
    shards._fill = fails
    fill(first, second)
    assert tried.wait(30)
    fill(first, second)
    assert second.await_copy() == dumped(piece)
    assert shards.cuts.readings.nbytes == 0


def test_a_copy_that_has_no_answer_is_waited_for_no_longer(
    clients: list[Client], running: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_ps.copying._ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("springtide_ps.copying._LOOK_SECONDS", 0.02)
    first, second = clients
    gates, piece = Gates(running[0]), make(30)
    for client in clients:
        client.enter()
    first.load(piece)
    fill(first, second)
    shards = running[0].steps.shards
    until(lambda: bool(gates.sizes) and shards._sending is None, "the copy is still waited for")
    assert shards.cuts.readings.nbytes == 0
    assert shards._held[KEY].forward == []


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
