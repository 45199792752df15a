"""The send queue of a client that asks for much and reads little: bounded, and no loss for other clients."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_servers import TOKEN, names, servers

from springtide_ps.params.chunk import Chunk
from springtide_ps.server.kv_handler import Answer
from springtide_ps.server.send_queue import UNSENT_BYTES, SendQueue
from springtide_ps.server.server import Server
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.client import RefusedError, ServerClient
from springtide_ps.wire.frames import Frame, FrameError, Kind
from springtide_ps.wire.stream import connect, parse_address

FIRST = (1, 0, 1)
ELEMENTS = 1 << 18
NBYTES = 4 * ELEMENTS
ASKED = 160  # more than twice what may wait


def answer(request: int, nbytes: int = 0) -> Answer:
    return Answer(Frame(Kind.VALUES, request, {}, nbytes), memoryview(bytes(nbytes)))


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.one_of(st.none(), st.integers(0, 3)), st.booleans()), max_size=40
    )
)
@settings(deadline=None, max_examples=60)
def test_answers_go_by_rank_then_order_and_waiting_is_counted(
    steps: list[tuple[int, int | None, bool]],
) -> None:
    outgoing, waiting = SendQueue(), list[tuple[int, int, Answer]]()
    for number, (nbytes, rank, take) in enumerate(steps):
        if rank is not None:
            outgoing.open(number, 0, rank)
        outgoing.put(answer(number, nbytes))
        waiting.append(((rank or 0) if nbytes else -1, number, answer(number, nbytes)))
        waiting.sort(key=lambda item: item[:2])
        if take:
            found = outgoing.take()
            assert found is not None
            assert found.frame == waiting.pop(0)[2].frame
            outgoing.sent(found)
        payloads = sum(len(item.payload) for _, _, item in waiting)
        assert payloads <= outgoing.unsent <= payloads + 4096 * len(waiting)
    outgoing.end()
    assert [found.frame for found in iter(outgoing.take, None)] == [item.frame for _, _, item in waiting]
    assert outgoing.take() is None


def test_a_request_waits_for_room_and_an_answer_never_does() -> None:
    outgoing, read = SendQueue(unsent=10_000), threading.Event()
    outgoing.wait_for_room()
    for number in range(5):
        outgoing.put(answer(number, 9_000))

    def reader() -> None:
        outgoing.wait_for_room()
        read.set()

    thread = threading.Thread(target=reader)
    thread.start()
    for left in range(5, 0, -1):
        assert left == 1 or not read.is_set()
        found = outgoing.take()
        assert found is not None
        outgoing.sent(found)
    assert read.wait(60)
    thread.join(60)
    outgoing.put(answer(9, 20_000))
    outgoing.end()
    outgoing.wait_for_room()  # nothing will be sent any more


def test_requests_without_an_answer_are_bounded() -> None:
    outgoing = SendQueue(open_limit=3, open_bytes=100)
    for number in (1, 2, 3):
        outgoing.open(number, 20)
    with pytest.raises(StepProtocolError, match=r"3 requests of this client \(60 bytes\) have no answer yet"):
        outgoing.open(4, 0)
    outgoing.put(answer(2))
    with pytest.raises(StepProtocolError, match="wait for some"):
        outgoing.open(4, 61)
    with pytest.raises(FrameError, match="another one is called so"):
        outgoing.open(3, 0)
    outgoing.open(4, 60)
    for number in (1, 3, 4, 7):
        outgoing.put(answer(number))
    outgoing.open(5, 100)


def waiting_bytes(server: Server) -> int:
    """Return the largest number of bytes that wait to be sent to one client."""
    return max((client.send_queue.unsent for client in server.connections), default=0)


@pytest.mark.parametrize(
    "kind", [Kind.PULL_CHUNK, Kind.FETCH, Kind.DUMP, Kind.PULL], ids=lambda kind: kind.name
)
def test_a_client_that_asks_for_much_and_reads_nothing(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    most, plain = [0], SendQueue.put

    def put(self: SendQueue, answer: Answer) -> None:
        plain(self, answer)
        most[0] = max(most[0], self.unsent)

    monkeypatch.setattr(SendQueue, "put", put)
    with servers(1) as running:
        address = parse_address(names(running)[0])
        good = ServerClient(address, TOKEN)
        values = torch.arange(ELEMENTS, dtype=torch.float32)
        members = {"me": "a", "members": ["a"], "s": 0, "lineage": "one"}
        good.ask_step(Kind.ENTER, FIRST, members).result(60)
        meta, payload = Chunk(values.clone(), [(0, 0, 0, ELEMENTS)], "sgd", [{"lr": 1.0}]).dump()
        good.ask_step(Kind.LOAD, FIRST, {**meta, "k": "k", "s": 0}, payload).result(60)
        good.ask_step(Kind.RESOLVE, FIRST, {"recipe": None}).result(60)
        good.init("k", values).result(60)
        bad, _ = connect(address, TOKEN, 30)
        about = {"key": "k"} if kind is Kind.PULL else {"t": list(FIRST), "k": "k", "s": 0}
        for number in range(1, ASKED + 1):
            bad.send(Frame(kind, number, about))
        deadline = time.monotonic() + 60
        while waiting_bytes(running[0]) < UNSENT_BYTES:
            assert time.monotonic() < deadline, f"only {waiting_bytes(running[0])} bytes wait"
            time.sleep(0.005)
        out = torch.empty(ELEMENTS)
        for _ in range(20):
            good.ask_step(Kind.PULL_CHUNK, FIRST, {"k": "k"}, out=out).result(60)
        assert torch.equal(out, values)
        for number in range(1, ASKED + 1):
            header, _ = bad.receive()
            assert (header.request, header.kind) == (number, Kind.VALUES)
            bad.skip(header.payload_bytes)
        assert most[0] < UNSENT_BYTES + 2 * NBYTES
        bad.close()
        good.close()


def test_a_server_ends_while_a_client_does_not_read() -> None:
    with servers(1) as running:
        address = parse_address(names(running)[0])
        good = ServerClient(address, TOKEN)
        good.init("k", torch.zeros(ELEMENTS)).result(60)
        bad, _ = connect(address, TOKEN, 30)
        for number in range(1, ASKED + 1):
            bad.send(Frame(Kind.PULL, number, {"key": "k"}))
        good.close()
    bad.close()


def test_member_that_asks_again_gets_its_first_answer_too() -> None:
    with servers(1) as running:
        client = ServerClient(parse_address(names(running)[0]), TOKEN)
        client.ask_step(Kind.ENTER, FIRST, {"me": "a", "members": ["a"], "s": 0, "lineage": "one"}).result(60)
        opened = {"ranges": [], "clocks": {"a": 3, "b": 0}, "bound": 1}
        client.ask_step(Kind.OPEN, FIRST, opened).result(60)
        question = {"me": "a", "first": 0, "stop": 4, "done": []}
        first = client.ask_step(Kind.LEASE, FIRST, question)
        second = client.ask_step(Kind.LEASE, FIRST, question)
        with pytest.raises(RefusedError, match="a has asked again"):
            first.result(60)
        assert not second.done()  # b is to move first
        client.close()
