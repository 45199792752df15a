"""A server that is silent can be told from one whose answer takes long."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cut_proxy import CutProxy
from job_tls import job_tls

from springtide_ps.server import server as server_module
from springtide_ps.server.kv_store import Store
from springtide_ps.server.server import Server
from springtide_ps.wire import client as client_module
from springtide_ps.wire.client import ServerClient, ServerLostError
from springtide_ps.wire.frames import Kind
from springtide_ps.wire.keepalive import Keepalive
from springtide_ps.wire.stream import Stream
from springtide_ps.wire.tls import client_context, server_context

TOKEN = "the job's token"
FIRST = (1, 0, 1)
TICK = 0.02
SILENT = 10 * TICK
AUTHORITY, CERTIFICATE, KEY = job_tls("uid")


class Waits:
    def __init__(self, waited_for: bool = False, unsent: int = 0) -> None:
        self.waited_for, self.unsent = waited_for, unsent


def test_a_pulse_is_due_while_the_server_owes_an_answer() -> None:
    keepalive = Keepalive()
    assert not keepalive.due(Waits())
    assert keepalive.due(Waits(waited_for=True))


def test_pulse_is_due_while_a_request_is_read_and_once_after() -> None:
    keepalive = Keepalive()
    keepalive.begin()
    assert keepalive.due(Waits())
    assert keepalive.due(Waits())
    keepalive.end()
    assert not keepalive.due(Waits())
    keepalive.begin()
    keepalive.end()
    assert keepalive.due(Waits())
    assert not keepalive.due(Waits())


def test_answers_on_their_way_are_pulses_themselves() -> None:
    keepalive = Keepalive()
    keepalive.begin()
    assert not keepalive.due(Waits(waited_for=True, unsent=1))


@pytest.fixture(params=["plain", "tls"])
def tls(request: pytest.FixtureRequest) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Return the TLS contexts of the server and of its clients; None for each over plain TCP."""
    if request.param == "plain":
        return None, None
    return server_context(CERTIFICATE, KEY), client_context(AUTHORITY)


Make = Callable[[], ServerClient]


@pytest.fixture
def line(
    tls: tuple[ssl.SSLContext | None, ssl.SSLContext | None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CutProxy, Make]]:
    """The way to a server, and how to make a client at its end."""
    for module in (client_module, server_module):
        monkeypatch.setattr(module, "KEEPALIVE_SECONDS", TICK)
    server = Server(Store(0), TOKEN, "127.0.0.1", tls=tls[0])
    proxy = CutProxy(("127.0.0.1", server.port))
    made: list[ServerClient] = []

    def make() -> ServerClient:
        made.append(ServerClient(("127.0.0.1", proxy.port), TOKEN, tls=tls[1], silent=SILENT))
        return made[-1]

    yield proxy, make
    for client in made:
        client.close()
    proxy.close()
    server.close()


def asks_what_waits(client: ServerClient) -> object:
    """A question that is answered when another member has moved, which it never does."""
    client.ask_step(Kind.ENTER, FIRST, {"me": "a", "members": ["a"], "s": 0, "lineage": "one"}).result(60)
    opened = {"ranges": [], "clocks": {"a": 3, "b": 0}, "bound": 1}
    client.ask_step(Kind.OPEN, FIRST, opened).result(60)
    return client.ask_step(Kind.LEASE, FIRST, {"me": "a", "first": 0, "stop": 4, "done": []})


def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Wait for so many pulses that came to the client; servers get none."""
    came = threading.Semaphore(0)
    receive = Stream.receive

    def heard(stream: Stream, *limits: Any) -> Any:
        header, meta = receive(stream, *limits)
        if header.kind is Kind.KEEPALIVE:
            came.release()
        return header, meta

    monkeypatch.setattr(Stream, "receive", heard)

    def wait(count: int) -> None:
        for _ in range(count):
            assert came.acquire(timeout=30), "no pulse came in 30 s"

    return wait


def test_an_answer_may_take_longer_than_silence_may(
    line: tuple[CutProxy, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make = line
    client = make()
    keepalives = looks(monkeypatch)
    waiting = asks_what_waits(client)
    keepalives(30)  # three times as long as a silence that breaks the connection
    assert not waiting.done()  # type: ignore[attr-defined]
    assert client.broken is None


def test_a_server_that_nothing_comes_from_any_more_is_lost(line: tuple[CutProxy, Make]) -> None:
    proxy, make = line
    client = make()
    waiting = asks_what_waits(client)
    proxy.cut()
    with pytest.raises(ServerLostError, match=r"no sign of life for .* s, while 1 requests wait"):
        waiting.result(30)  # type: ignore[attr-defined]
    assert client.broken is not None


def test_so_is_one_to_which_gradients_cannot_be_sent(line: tuple[CutProxy, Make]) -> None:
    """A connection on which gradients cannot be sent is ended as a lost one.

    Gradients have no answers of their own, and a request queued behind them is never sent.
    """
    proxy, make = line
    client = make()
    client.ask_step(Kind.ENTER, FIRST, {"me": "a", "members": ["a"], "s": 0, "lineage": "one"}).result(60)
    proxy.cut()
    gradient = torch.zeros(8 << 20)
    records = [client.stage_rows(FIRST, 1, "a", "t", [(0, 1)], gradient) for _ in range(4)]
    with pytest.raises(ServerLostError, match="no sign of life"):
        records[-1].result(30)


def test_who_waits_for_nothing_minds_no_silence(line: tuple[CutProxy, Make]) -> None:
    proxy, make = line
    idle, busy = make(), make()
    idle.init("w", torch.arange(4.0)).result(30)
    waiting = asks_what_waits(busy)
    proxy.cut()
    with pytest.raises(ServerLostError):
        waiting.result(30)  # type: ignore[attr-defined]
    proxy.heal()
    out = torch.empty(4)
    idle.pull("w", out).result(30)
    assert out.tolist() == [0, 1, 2, 3]


def test_a_request_that_takes_the_server_long_is_no_silence(
    line: tuple[CutProxy, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads requests carries this one out, and reads no other one meanwhile."""
    _, make = line
    client = make()
    keepalives = looks(monkeypatch)
    goes_on = threading.Event()
    put = Store.create

    def slow(self: Store, *args: object, **more: object) -> object:
        assert goes_on.wait(60)
        return put(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "create", slow)
    asked = client.init("w", torch.arange(4.0))
    keepalives(30)
    goes_on.set()
    assert asked.result(30).meta["created"]


def test_older_server_that_sends_no_pulse_is_waited_for(
    line: tuple[CutProxy, Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, make = line
    ticks: list[float] = []
    monkeypatch.setattr(Stream, "tick", lambda self, seconds, on_tick: ticks.append(seconds))
    make()
    assert ticks == [TICK]
    plain = client_module.connect

    def older(*args: Any) -> tuple[Stream, dict[str, Any]]:
        stream, about = plain(*args)
        stream.keepalives = False
        return stream, about

    monkeypatch.setattr(client_module, "connect", older)
    make()
    assert ticks == [TICK]
