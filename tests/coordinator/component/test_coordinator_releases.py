"""Clients leave a coordinator of a release too far away, and ignore what they do not know of others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from coordinator_process import Member, until
from later_messages import later

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.codec import speaks_to_proto
from springtide_protocol.serve_client import ServeClient
from springtide_protocol.session_client import SessionClosedError
from springtide_protocol.versions import OWN, Speaks

FAR = Speaks(OWN.newest + 1, OWN.newest + 2)
TOO_FAR = f"the coordinator {FAR}: upgrade"


class Coordinator(pb_grpc.CoordinatorServicer):
    """Welcomes whoever comes, says something that nobody knows, and then something that all know."""

    def __init__(self, speaks: Speaks) -> None:
        self._welcome = pb.Welcome(incarnation=pb.Incarnation(number=1), speaks=speaks_to_proto(speaks))
        self.over = threading.Event()

    def Session(self, requests: Any, context: grpc.ServicerContext) -> Iterator[pb.CoordinatorMessage]:
        """Carry a worker's stream until the test is over.

        Args:
            requests: of the worker.
            context: of the call.
        """
        yield pb.CoordinatorMessage(welcome=self._welcome)
        yield pb.CoordinatorMessage.FromString(later(99))
        yield pb.CoordinatorMessage(known=pb.Known())
        self.over.wait(60)

    def Serve(self, requests: Any, context: grpc.ServicerContext) -> Iterator[pb.ServerOrder]:
        """Carry a server's stream.

        Args:
            requests: of the server.
            context: of the call.
        """
        yield pb.ServerOrder(welcome=self._welcome)
        yield pb.ServerOrder.FromString(later(99))
        yield pb.ServerOrder(leave=pb.ServerLeave(reason="the test is over"))


@contextmanager
def coordinator(speaks: Speaks) -> Iterator[str]:
    """Serve at the address that this gives."""
    servicer = Coordinator(speaks)
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        pb_grpc.add_CoordinatorServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            servicer.over.set()
            server.stop(None).wait(10)


def test_worker_leaves_a_coordinator_too_far_away() -> None:
    with coordinator(FAR) as address:
        member = Member(address, "w0")
        with pytest.raises(SessionClosedError, match=TOO_FAR):
            member.client.wait_connected(30)
        member.close()
        assert member.messages == []


def test_worker_ignores_a_message_of_a_later_release() -> None:
    with coordinator(Speaks(OWN.newest, OWN.newest + 1)) as address:
        member = Member(address, "w0")
        member.wait("known")
        member.close()
        assert [message.WhichOneof("message") for message in member.messages] == ["welcome", "known"]


@pytest.mark.parametrize(
    ("speaks", "reason", "wanted"),
    [(FAR, TOO_FAR, False), (Speaks(OWN.newest, OWN.newest + 1), "lets it go: the test is over", True)],
)
def test_server_ends_by_what_it_understands(speaks: Speaks, reason: str, wanted: bool) -> None:
    ended: list[tuple[str, bool]] = []
    with coordinator(speaks) as address:
        client = ServeClient(address, "token", pb.Server(id="s0"), lambda *end: ended.append(end))
        client.start()
        until(lambda: bool(ended), "the server's end")
        client.close()
    [(text, as_wanted)] = ended
    assert reason in text
    assert as_wanted is wanted
