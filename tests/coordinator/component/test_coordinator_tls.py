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
from job_tls import job_tls

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.serve_client import ServeClient
from springtide_protocol.sync_client import SyncClient, SyncError

OURS, CERTIFICATE, KEY = job_tls("ours")
THEIRS = job_tls("theirs").authority
OLD = job_tls("ours", root_key=b"o" * 32)
OLD_TOKEN = "a token of before"


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoordinatorProcess]:
    folder = tmp_path_factory.mktemp("state")
    with CoordinatorProcess(
        folder,
        SPRINGTIDE_TLS_CERTIFICATE=CERTIFICATE,
        SPRINGTIDE_TLS_KEY=KEY,
        SPRINGTIDE_SERVERS="1",
        SPRINGTIDE_FORMER_TOKEN_1=OLD_TOKEN,
        SPRINGTIDE_FORMER_CERTIFICATE_1=OLD.certificate,
        SPRINGTIDE_FORMER_KEY_1=OLD.key,
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


def test_members_of_an_older_key_are_let_in_and_trust_their_own(coordinator: CoordinatorProcess) -> None:
    """The coordinator of a job that has got another key: it shows each client what that trusts."""
    with contextlib.ExitStack() as stack:
        for name, authority, token in (("old", OLD.authority, OLD_TOKEN), ("new", OURS, TOKEN)):
            member = Member(coordinator.address, name, token=token, authority=authority)
            stack.callback(member.client.close)
            until(lambda member=member: member.client.connected, f"the {name} worker to be welcomed")


async def test_certificate_that_has_ended_is_not_trusted(tmp_path: Path) -> None:
    ended = job_tls("ours", seconds=3600.0, ends_in=-1.0)
    given = {"SPRINGTIDE_TLS_CERTIFICATE": ended.certificate, "SPRINGTIDE_TLS_KEY": ended.key}
    with CoordinatorProcess(tmp_path, **given) as process:
        async with SyncClient(process.address, TOKEN, authority=ended.authority) as client:
            with pytest.raises(SyncError, match=r"UNAVAILABLE|DEADLINE"):
                await client.sync(request(), timeout=5)


def test_half_a_certificate_is_an_error_at_the_start(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "SPRINGTIDE_TOKEN": TOKEN,
        "SPRINGTIDE_STATE_DIR": str(tmp_path),
        "SPRINGTIDE_TLS_CERTIFICATE": CERTIFICATE,
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
