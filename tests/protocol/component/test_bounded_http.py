"""The server of metrics ports against peers that are slow, many, large or silent."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from springtide_protocol.bounded_http import BoundedServer, Reply, Request, ThrottledValue, in_words
from springtide_protocol.lobby import Lobby, raise_descriptor_limit


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def echo(request: Request) -> Reply:
    if request.path == "/fails":
        raise ValueError("a fault of ours")
    return in_words(200, f"{request.path} {dict(request.query)} {request.headers.get('x-one', '')}")


def server(
    stack: ExitStack, answer: Callable[[Request], Reply] = echo, seconds: float = 30.0
) -> BoundedServer:
    made = BoundedServer(answer, "127.0.0.1", 0, seconds=seconds)
    stack.callback(made.close)
    return made


def connected(stack: ExitStack, made: BoundedServer, sent: bytes = b"") -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=20))
    sock.sendall(sent)
    return sock


def get(made: BoundedServer, path: str = "/a?b=c") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{made.port}{path}", headers={"X-One": "1"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return str(answer.read().decode())


def ended(sock: socket.socket) -> bool:
    """Whether the server has closed its end, within the socket's limit."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    return True


def test_a_request_gets_its_answer(stack: ExitStack) -> None:
    made = server(stack)
    assert get(made) == "/a {'b': 'c'} 1\n"
    sock = connected(stack, made, b"HEAD /a HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.0 200")
    assert answer.endswith(b"\r\n\r\n")


def test_silent_connections_do_not_keep_others_out(stack: ExitStack) -> None:
    made = server(stack)
    silent = [connected(stack, made) for _ in range(100)]
    assert get(made).startswith("/a")
    assert len(made.lobby) <= 8
    assert ended(silent[0])


def test_a_dripping_request_ends_at_its_deadline(stack: ExitStack) -> None:
    made = server(stack, seconds=1.0)
    sock = connected(stack, made, b"GET / HTTP/1.0\r\n")
    sock.settimeout(0.05)
    began = time.monotonic()
    while not dripped(sock):
        assert time.monotonic() - began < 10


def dripped(sock: socket.socket) -> bool:
    """Send a byte; True when the server has ended the connection."""
    try:
        sock.sendall(b"X")
        return not sock.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_whoever_reads_nothing_is_dropped(stack: ExitStack) -> None:
    made = server(stack, lambda _: Reply(200, b"x" * (64 << 20)), seconds=0.5)
    connected(stack, made, b"GET / HTTP/1.0\r\n\r\n")
    until(lambda: len(made.lobby) == 1, "it is being answered")
    until(lambda: len(made.lobby) == 0, "it is dropped")


def test_slow_readers_of_much_do_not_keep_others_out(stack: ExitStack) -> None:
    much = b"x" * (8 << 20)
    made = server(stack, lambda request: Reply(200, much) if request.path == "/much" else echo(request))
    for _ in range(8):
        assert connected(stack, made, b"GET /much HTTP/1.0\r\n\r\n").recv(1)
    assert get(made).startswith("/a")


def test_a_head_without_an_end_is_refused(stack: ExitStack) -> None:
    made = server(stack)
    sock = connected(stack, made)
    with pytest.raises(ConnectionError):  # it does not read on for ever
        sock.sendall((b"X: " + b"y" * 4000) * 10_000)
    assert get(made).startswith("/a")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\xff\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\nbody",
        b"GET /?" + b"&".join(b"a=%d" % i for i in range(99)) + b" HTTP/1.1\r\n\r\n",
        b"GET /\xff\x00 HTTP/1.1\r\n\xff: \xff\r\n\r\n",
        b"\n\n",
    ],
)
def test_odd_bytes_harm_nobody(sent: bytes, stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    made = server(stack)
    assert ended(connected(stack, made, sent))
    assert get(made).startswith("/a")
    assert not [record for record in caplog.records if record.exc_info]


def test_a_fault_of_ours_is_answered_and_logged_once(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    made = server(stack)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        get(made, "/fails")
    assert [record.message for record in caplog.records if record.exc_info] == ["metrics: /fails failed"]


def test_threads_are_bounded_while_answers_take_long(stack: ExitStack) -> None:
    go = threading.Event()
    asked = []

    def answer(request: Request) -> Reply:
        asked.append(threading.current_thread())
        go.wait(30)
        return in_words(200, "ok")

    made = server(stack, answer)
    for _ in range(12):
        connected(stack, made, b"GET / HTTP/1.0\r\n\r\n")
    until(lambda: len(asked) == 8, "eight are answered")
    assert len(made.lobby) <= 8
    go.set()
    until(lambda: len(made.lobby) == 0, "all are done")
    assert get(made) == "ok\n"


def test_close_ends_open_connections(stack: ExitStack) -> None:
    made = server(stack)
    sock = connected(stack, made)
    until(lambda: len(made.lobby) == 1, "it is there")
    made.close()
    assert ended(sock)
    with pytest.raises(OSError, match=r"refused|reset"):
        socket.create_connection(("127.0.0.1", made.port), timeout=5)


def test_asking_without_a_pause_costs_a_tenth() -> None:
    now, made = [0.0], []

    def compute() -> int:
        now[0] += 0.3
        made.append(now[0])
        return len(made)

    kept = ThrottledValue(compute, clock=lambda: now[0])
    assert [kept() for _ in range(4)] == [1, 2, 3, 4]  # a burst sees numbers of now
    while now[0] < 1000.0:
        kept()
        now[0] += 0.01
    assert 300 < len(made) < 345  # 0.3 s each, of 1,000 s
    now[0] += 15.0
    assert kept() == len(made)  # and so does a scrape after a pause


def pair(stack: ExitStack) -> socket.socket:
    ours, theirs = socket.socketpair()
    stack.enter_context(theirs)
    return stack.enter_context(ours)


def lobby_of(stack: ExitStack, most: int, clock: Callable[[], float] = time.monotonic) -> Lobby:
    lobby = Lobby(most, 10.0, clock)
    stack.callback(lobby.close)
    return lobby


def test_a_full_lobby_drops_the_oldest_of_the_busiest(stack: ExitStack) -> None:
    lobby = lobby_of(stack, 3)
    rightful = lobby.enter(pair(stack), "10.0.0.9")
    first = lobby.enter(pair(stack), "10.0.0.1")
    second = lobby.enter(pair(stack), "10.0.0.1")
    third = lobby.enter(pair(stack), "10.0.0.1")
    assert [guest.dropped for guest in (rightful, first, second, third) if guest] == [
        False,
        True,
        False,
        False,
    ]
    assert len(lobby) == 3


def test_who_has_said_all_is_not_dropped_for_others(stack: ExitStack) -> None:
    lobby = lobby_of(stack, 1)
    guest = lobby.enter(pair(stack), "10.0.0.1")
    assert guest is not None
    assert lobby.serve(guest)
    assert lobby.enter(pair(stack), "10.0.0.2") is None
    lobby.leave(guest)
    lobby.leave(guest)
    assert lobby.enter(pair(stack), "10.0.0.2") is not None


def test_a_guest_is_dropped_when_its_time_is_over(stack: ExitStack) -> None:
    now = [0.0]
    lobby = lobby_of(stack, 8, lambda: now[0])
    old = lobby.enter(pair(stack), "10.0.0.1")
    now[0] = 5.0
    young = lobby.enter(pair(stack), "10.0.0.1")
    now[0] = 10.0
    lobby.expire()
    assert old is not None
    assert young is not None
    assert (old.dropped, young.dropped) == (True, False)
    assert not lobby.serve(old)


def test_the_descriptor_limit_is_raised_to_what_may_be() -> None:
    assert raise_descriptor_limit(64) >= 64
    before = raise_descriptor_limit(64)
    assert before == raise_descriptor_limit(64)
