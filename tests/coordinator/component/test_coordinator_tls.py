"""A coordinator with a certificate talks to who trusts exactly that one, and to nobody in the clear."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from coordinator_process import TOKEN, CoordinatorProcess, Member, until

from springtide_operator.certificate import job_certificate
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.serve_client import ServeClient
from springtide_protocol.sync_client import SyncClient, SyncError

OURS, KEY = job_certificate(b"r" * 32, "ours")
THEIRS, _ = job_certificate(b"r" * 32, "theirs")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    folder = tmp_path_factory.mktemp("state")
    with CoordinatorProcess(
        folder, SPRINGTIDE_TLS_CERTIFICATE=OURS, SPRINGTIDE_TLS_KEY=KEY, SPRINGTIDE_SERVERS="1"
    ) as process:
        yield process


def request() -> pb.SyncRequest:
    return pb.SyncRequest(target=1, minimum=1, maximum=1, incarnation_number=1)


async def test_who_trusts_its_certificate_is_answered(coordinator: CoordinatorProcess) -> None:
    async with SyncClient(coordinator.address, TOKEN, authority=OURS) as client:
        assert (await client.sync(request(), timeout=60)).incarnation.number == 1


@pytest.mark.parametrize("authority", ["", THEIRS], ids=["in the clear", "another job's certificate"])
async def test_nobody_else_gets_through(coordinator: CoordinatorProcess, authority: str) -> None:
    async with SyncClient(coordinator.address, TOKEN, authority=authority) as client:
        with pytest.raises(SyncError, match=r"UNAVAILABLE|DEADLINE") as refused:
            await client.sync(request(), timeout=5)
    assert refused.value.retry


def test_workers_and_servers_speak_tls_and_still_need_a_token(
    coordinator: CoordinatorProcess,
) -> None:
    with contextlib.ExitStack() as stack:
        member = Member(coordinator.address, "a", authority=OURS)
        stack.callback(member.client.close)
        until(lambda: member.client.connected, "the worker to be welcomed")
        server = pb.Server(id="s", pod_uid="s", pod_name="s", slot=0, address="127.0.0.1:1")
        client = ServeClient(coordinator.address, TOKEN, server, lambda why, well: None, authority=OURS)
        stack.callback(client.close)
        client.start()
        until(lambda: client.connected, "the server to be welcomed")
        stranger = Member(coordinator.address, "b", token="wrong", authority=OURS)
        stack.callback(stranger.client.close)
        until(lambda: "token" in stranger.client.last_error, "the wrong token to be refused")
        clear = Member(coordinator.address, "c")
        stack.callback(clear.client.close)
        until(lambda: clear.client.last_error != "not connected yet", "an error")
        assert not clear.client.connected


def test_half_a_certificate_is_an_error_at_the_start(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "SPRINGTIDE_TOKEN": TOKEN,
        "SPRINGTIDE_STATE_DIR": str(tmp_path),
        "SPRINGTIDE_TLS_CERTIFICATE": OURS,
    }
    done = subprocess.run(
        [sys.executable, "-m", "springtide_coordinator"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "set both or none" in done.stderr
