"""Which server a failure is about, and when a wait for several servers ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest
from coordinator_process import until
from cut_proxy import CutProxy
from ps_servers import TOKEN, names, servers

from springtide.comm.store import FormationCancelled
from springtide.ps.connections import Connections, NotWaitedForError, ServerError, servers_in
from springtide_ps.wire.client import Answer, ServerLostError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("parameter server 10.0.0.7:7080 cannot be reached: timed out", ["10.0.0.7"]),
        ("parameter server [fd00::7]:7080 cannot be reached: timed out", ["fd00::7"]),
        ("the step's gradients at parameter server fd00::7:7080: no answer in 9 s", ["fd00::7"]),
        (
            "the step's gradients at parameter server 10.0.0.7:7080: parameter server 10.0.0.7:7080: a copy "
            "could not be made: 10.0.0.8:7080: parameter server 10.0.0.8:7080: no sign of life for 10 s",
            ["10.0.0.8"],
        ),
        ("[10.0.0.9]:4711: Connection closed by peer", []),
        ("the parameter server is not known", []),
    ],
)
def test_the_server_that_an_error_is_about(text: str, wanted: list[str]) -> None:
    assert servers_in(ServerError(text)) == wanted


@pytest.fixture
def connections() -> Iterator[Connections]:
    """Yield connections to two servers named "a" and "b"."""
    with servers(2) as running:
        made = Connections(TOKEN, 10.0, 60.0)
        made.connect(dict(zip("ab", names(running), strict=True)))
        yield made
        made.close()


def asked() -> list[tuple[str, Future[Answer]]]:
    return [("a", Future()), ("b", Future())]


def test_all_answers_come_in_the_order_of_the_requests(connections: Connections) -> None:
    requests = asked()
    for number, (_, future) in reversed(list(enumerate(requests))):
        future.set_result(Answer(number, {}))
    assert [answer.version for answer in connections.answers(requests, "it")] == [0, 1]


def test_the_first_that_fails_ends_the_wait_for_the_others(connections: Connections) -> None:
    """The first server waits for the second one's copy; what is wrong is known of the second."""
    requests = asked()
    requests[1][1].set_exception(ServerLostError("it is gone"))
    with pytest.raises(ServerError, match=rf"it at parameter server {connections['b'].address}: it is gone"):
        connections.answers(requests, "it")


def test_there_is_one_limit_for_all(connections: Connections) -> None:
    connections.answer_seconds = 0.05
    requests = asked()
    requests[0][1].set_result(Answer(0, {}))
    with pytest.raises(
        ServerError, match=rf"at parameter server {connections['b'].address}: no answer in 0.05 s"
    ):
        connections.answers(requests, "it")


def test_the_end_of_the_generation_ends_the_wait(connections: Connections) -> None:
    requests: list[Any] = asked()
    requests[0][1].set_result(Answer(0, {}))
    connections.over("the generation is over")
    with pytest.raises(ServerError, match=rf"{connections['b'].address}: the generation is over"):
        connections.answers(requests, "it")


def test_an_answer_no_longer_waited_for_accuses_no_server(connections: Connections) -> None:
    connections.over("the generation is over")
    with pytest.raises(NotWaitedForError) as caught:
        connections.answers(asked(), "it")
    assert servers_in(caught.value) == []


def test_the_complaint_that_ended_the_generation_is_not_ones_own() -> None:
    told = "worker-1 parked (FORMATION_FAILED): parameter server 10.0.0.9:7080 cannot be reached: timed out"
    assert servers_in(FormationCancelled(told)) == []


def test_the_reason_of_the_end_accuses_the_server_in_it(connections: Connections) -> None:
    connections.over("parameter server 10.0.0.9:7080: it is gone")
    with pytest.raises(ServerError) as caught:
        connections.answers(asked(), "it")
    assert servers_in(caught.value) == ["10.0.0.9"]


def test_servers_are_reached_that_were_heard_in_the_generation() -> None:
    with servers(2) as running, closing(CutProxy(("127.0.0.1", running[0].port))) as proxy:
        made = Connections(TOKEN, 10.0, 60.0)
        by_id = {"a": proxy.address, "b": names(running)[1]}
        made.connect(by_id)
        assert made.reached() == ["a", "b"]
        proxy.cut()
        made.connect(by_id)  # the next generation: the same connections
        until(lambda: made.reached() == ["b"], "the answer of the server that is reached")
        proxy.heal()
        until(lambda: made.reached() == ["a", "b"], "the answer that was held up")
        made["b"].close()
        assert made.reached() == ["a"]
        made.close()


def test_the_end_of_the_generation_ends_the_connecting() -> None:
    """A server that ends each connection at once is tried again, until the generation is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        made = Connections(TOKEN, 60.0, 60.0)
        ended: list[Callable[[], object]] = []

        def refuse() -> None:
            for _ in range(2):
                listener.accept()[0].close()
            ended[0]()
            listener.accept()[0].close()

        refusing = threading.Thread(target=refuse)
        refusing.start()
        with pytest.raises(ServerError, match=f"127.0.0.1:{port} cannot be reached") as caught:
            made.connect({"a": f"127.0.0.1:{port}"}, ended.append)
        with socket.create_connection(("127.0.0.1", port)):
            refusing.join(10)
    assert servers_in(caught.value) == ["127.0.0.1"]
