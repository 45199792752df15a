"""The proxy of the tests: what is cut, for whom, and what ends with it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from cut_proxy import CutProxy, ports_of

Dial = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def line() -> Iterator[tuple[CutProxy, Dial]]:
    """A proxy, and who makes a connection through it: (the client's end, the server's end)."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)
    proxy = CutProxy(listener.getsockname(), holds_ends=True)
    ends: list[socket.socket] = [listener]

    def dial() -> tuple[socket.socket, socket.socket]:
        near = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
        ends.append(near)
        far, _ = listener.accept()
        ends.append(far)
        far.settimeout(10)
        near.sendall(b"a")
        assert far.recv(1) == b"a"
        return near, far

    yield proxy, dial
    proxy.close()
    for end in ends:
        end.close()


def test_only_the_chosen_client_is_cut_and_hears_all_of_it_later(line: tuple[CutProxy, Dial]) -> None:
    proxy, dial = line
    (cut, its_server), (other, others_server) = dial(), dial()
    port = cut.getsockname()[1]
    assert {port, other.getsockname()[1]} <= ports_of(os.getpid())
    proxy.cut(lambda client: client == port)
    cut.sendall(b"b")
    other.sendall(b"c")
    assert others_server.recv(1) == b"c"
    its_server.setblocking(False)
    with pytest.raises(BlockingIOError):
        its_server.recv(1)
    its_server.settimeout(10)
    proxy.heal()
    assert its_server.recv(1) == b"b"


def test_silent_line_does_not_report_the_other_sides_end(line: tuple[CutProxy, Dial]) -> None:
    proxy, dial = line
    (cut, its_server), (other, others_server) = dial(), dial()
    port = cut.getsockname()[1]
    proxy.cut(lambda client: client == port)
    its_server.close()
    others_server.close()
    assert other.recv(1) == b""
    cut.setblocking(False)
    with pytest.raises(BlockingIOError):
        cut.recv(1)
    cut.settimeout(10)
    proxy.heal()
    assert cut.recv(1) == b""


def ends(sock: socket.socket) -> bool:
    """Whether the connection comes to its end, in whatever way."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_reset_line_ends_and_so_do_new_ones_until_restored(line: tuple[CutProxy, Dial]) -> None:
    proxy, dial = line
    near, far = dial()
    proxy.cut(reset=True)
    assert ends(near)
    assert ends(far)
    with socket.socket() as again:
        again.settimeout(10)
        # The reset may be there before connect() has returned.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            again.connect(("127.0.0.1", proxy.port))
            assert ends(again)
    proxy.heal()


def test_nobody_waits_for_a_cut_line_to_close_the_proxy(line: tuple[CutProxy, Dial]) -> None:
    proxy, dial = line
    dial()
    proxy.cut()
    closer = threading.Thread(target=proxy.close, daemon=True)
    closer.start()
    closer.join(10)
    assert not closer.is_alive()
