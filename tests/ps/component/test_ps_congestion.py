"""Streams of parameters are not paced on short paths, and keep the machine's congestion control on others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from ps_servers import TOKEN, names, servers

from springtide_ps.wire import congestion
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.congestion import NEAR_SECONDS, choose, instead_of
from springtide_ps.wire.stream import parse_address

NEAR, FAR = NEAR_SECONDS / 2, NEAR_SECONDS * 20


def name_of(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def use(sock: socket.socket, name: str) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        pytest.skip(f"this kernel has no {name} for this user: {error}")


@contextmanager
def connected(name: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection that uses this congestion control and has carried a byte each way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        use(listener, name)
        with socket.create_connection(listener.getsockname(), 30) as ours:
            use(ours, name)
            theirs, _ = listener.accept()
            with theirs:
                for one, other in ((ours, theirs), (theirs, ours)):
                    one.sendall(b"x")
                    assert other.recv(1) == b"x"
                yield ours, theirs


@pytest.mark.parametrize("current", ["bbr", "bbr2"])
def test_a_paced_one_is_replaced_on_a_short_path_alone(current: str) -> None:
    assert instead_of(current, NEAR)[0] == "cubic"
    assert "reno" in instead_of(current, NEAR)  # which every kernel allows to everybody
    assert instead_of(current, FAR) == ()
    assert instead_of(current, None) == ()


@pytest.mark.parametrize("current", ["cubic", "reno", "dctcp", ""])
def test_another_one_is_the_machines_own_choice(current: str) -> None:
    assert instead_of(current, NEAR) == ()


def test_both_ends_of_a_real_connection() -> None:
    with connected("bbr") as ends:
        for end in ends:
            assert name_of(end) == "bbr"
            chosen = choose(end)
            assert chosen in ("cubic", "reno")
            assert name_of(end) == chosen
            assert choose(end) == chosen


def test_a_long_path_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "round_trip_of", lambda sock: FAR)
    with connected("bbr") as ends:
        assert [choose(end) for end in ends] == ["bbr", "bbr"]
        assert [name_of(end) for end in ends] == ["bbr", "bbr"]


def test_a_kernel_that_allows_none_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(congestion, "INSTEAD", ("no_such_name",))
    with connected("bbr") as (ours, _):
        assert choose(ours) == "bbr"
        assert name_of(ours) == "bbr"


def test_reno_stays() -> None:
    with connected("reno") as ends:
        assert [choose(end) for end in ends] == ["reno", "reno"]


def test_what_is_no_tcp_has_none() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert choose(ours) == ""


def test_the_round_trip_of_a_connection_is_known() -> None:
    with connected("reno") as ends:
        for end in ends:
            found = congestion.round_trip_of(end)
            assert found is not None
            assert 0 <= found < 1


def test_streams_of_parameters_are_not_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        use(probe, "bbr")
    chosen, plain = list[str](), congestion.choose

    def looked_at(sock: socket.socket) -> str:
        use(sock, "bbr")
        chosen.append(plain(sock))
        assert name_of(sock) == chosen[-1]
        return chosen[-1]

    monkeypatch.setattr(congestion, "choose", looked_at)
    with servers(1) as running, closing(ServerClient(parse_address(names(running)[0]), TOKEN)) as client:
        client.status().result(30)
    assert len(chosen) == 2
    assert set(chosen) <= {"cubic", "reno"}
