"""The real coordinator against callers without a token, or with the job's alone."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
from coordinator_process import TOKEN, CoordinatorProcess

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import client_options, token_metadata

OWN = "o" * 64
SYNC = "/springtide.coordinator.v1.Coordinator/Sync"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    """One coordinator that knows the operator by its digest, as the operator makes it."""
    digest = hashlib.sha256(OWN.encode()).hexdigest()
    folder = tmp_path_factory.mktemp("state")
    with CoordinatorProcess(folder, SPRINGTIDE_OPERATOR_DIGEST=digest) as made:
        yield made


def channel(stack: ExitStack, server: CoordinatorProcess) -> grpc.Channel:
    options = [*client_options(30), ("grpc.max_send_message_length", 8 << 20)]
    return stack.enter_context(grpc.insecure_channel(server.address, options=options))


def sync(stack: ExitStack, server: CoordinatorProcess, own: str = OWN, **asked: object) -> pb.SyncReply:
    stub = pb_grpc.CoordinatorStub(channel(stack, server))
    request = pb.SyncRequest(**{"target": 1, **asked})  # type: ignore[arg-type]
    reply: pb.SyncReply = stub.Sync(request, metadata=token_metadata(TOKEN, own), timeout=20)
    return reply


@pytest.mark.parametrize("own", ["", "x", TOKEN])
def test_a_worker_cannot_speak_as_the_operator(own: str, server: CoordinatorProcess) -> None:
    with ExitStack() as stack:
        with pytest.raises(grpc.RpcError) as caught:
            sync(stack, server, own)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED  # type: ignore[attr-defined]
        assert sync(stack, server).incarnation.number == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"servers": 2147483647},
        {"target": 4294967295},
        {"minimum": 4294967295},
        {"maximum": 4294967295},
        {"processes_per_pod": 4294967295},
        {"incarnation_number": 2**64 - 1},
        {"living": [pb.Pod(uid="a", slot=4294967295)]},
        {"living_servers": [pb.Pod(uid="a", slot=4294967295)]},
        {"consistency": pb.Consistency(mode="Never")},
        {"consistency": pb.Consistency(mode="BoundedStaleness", staleness=4294967295)},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_counts_beyond_every_job_are_refused(asked: dict[str, object], server: CoordinatorProcess) -> None:
    with ExitStack() as stack:
        with pytest.raises(grpc.RpcError) as caught:
            sync(stack, server, **asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
        began = time.monotonic()
        sync(stack, server, servers=0)
        assert time.monotonic() - began < 5
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1.0, 1e308])
def test_times_that_cannot_be_change_nothing(seconds: float, server: CoordinatorProcess) -> None:
    with ExitStack() as stack:
        asked = {"pause_seconds": seconds, "suspend_by": seconds, "hang_seconds": seconds}
        reply = sync(stack, server, **asked, living=[pb.Pod(uid="a", leave_by=seconds)])
        assert reply.incarnation.number == 1


def test_callers_without_a_token_cost_no_memory(tmp_path: Path) -> None:
    with ExitStack() as stack, CoordinatorProcess(tmp_path) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        codes: Counter[str] = Counter()

        def call() -> None:
            with ExitStack() as own:
                ask = channel(own, server).unary_unary(SYNC)
                for _ in range(4):
                    try:
                        ask(bytes(4 << 20), timeout=20)
                    except grpc.RpcError as error:
                        codes[error.code().name] += 1  # type: ignore[attr-defined]

        threads = [threading.Thread(target=call) for _ in range(64)]
        for thread in threads:
            thread.start()
        peak = before
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
        print(f"from {before >> 20} to {peak >> 20} MiB; {codes}")
        assert sum(codes.values()) == 256
        assert peak - before < 100 << 20
        sync(stack, server, "")
