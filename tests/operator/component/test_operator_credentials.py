"""The operator finds the API server by its address, and its token is the one that is on disk now."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web
from kopf._cogs.structs.credentials import Vault
from kube_connections import to

from springtide_kube.connection import REREAD_SECONDS, Connection, Connections, in_cluster
from springtide_kube.errors import ApiError, CredentialsError
from springtide_operator.credentials import Login, find_connection
from springtide_operator.kube import Kube
from springtide_operator.settings import SERVICE_ACCOUNT_DIR, read_settings

AUTHORITY = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A service account's volume."""
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "ca.crt").write_text(AUTHORITY)
    (tmp_path / "namespace").write_text("tide")
    return tmp_path


@pytest.fixture
def pod(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment of a pod that mounts `folder`."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv(SERVICE_ACCOUNT_DIR, str(folder))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return folder


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.96.0.1", "https://10.96.0.1:443"),
        ("fd00:10:96::1", "https://[fd00:10:96::1]:443"),
        ("[fd00:10:96::1]", "https://[fd00:10:96::1]:443"),
    ],
)
def test_server_is_the_address_that_the_kubelet_gives(host: str, url: str, pod: Path) -> None:
    found = in_cluster(pod, {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"})
    assert (found.server, found.headers, found.namespace) == (url, {"Authorization": "Bearer first"}, "tide")
    assert found.configuration.ca_cert_data == AUTHORITY


async def test_a_pod_needs_neither_kubeconfig_nor_a_name(pod: Path) -> None:
    found = await find_connection()
    assert found.server == "https://10.96.0.1:443"
    assert token(found) == "first"
    assert read_settings({SERVICE_ACCOUNT_DIR: str(pod)}).namespace == "tide"


async def test_kubeconfig_wins_when_it_is_set(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://far:6443"}}],
        "users": [{"name": "u", "user": {"token": "mine"}}],
    }
    (pod / "config").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(pod / "config"))
    assert (await find_connection()).server == "https://far:6443"


async def test_what_a_pod_lacks_is_named(pod: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pod / "token").write_text(" \n")
    with pytest.raises(CredentialsError, match="token is empty"):
        await find_connection()
    (pod / "token").unlink()
    with pytest.raises(CredentialsError, match="automountServiceAccountToken"):
        await find_connection()
    (pod / "token").write_text("first")
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT")
    with pytest.raises(CredentialsError, match="KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT"):
        await find_connection()


async def test_files_are_read_again_and_a_bad_moment_is_survived(pod: Path) -> None:
    now = [0.0]
    connections = Connections(find_connection, clock=lambda: now[0])
    assert token(await connections.current()) == "first"
    (pod / "token").write_text("second")
    assert token(await connections.current()) == "first"
    now[0] += REREAD_SECONDS + 1
    assert token(await connections.current()) == "second"
    (pod / "token").write_text("")
    now[0] += REREAD_SECONDS + 1
    assert token(await connections.current()) == "second"
    connections.forget()
    with pytest.raises(CredentialsError):
        await connections.current()


def token(found: Connection) -> str:
    return found.headers["Authorization"].removeprefix("Bearer ")


class Server:
    """An API server in plain HTTP that takes one token."""

    def __init__(self) -> None:
        self.token = "first"
        self.asked: list[str] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        """Answer 200 to the token, else 401."""
        self.asked.append(request.headers.get("Authorization", ""))
        good = self.asked[-1] == f"Bearer {self.token}"
        status = {"kind": "Status", "reason": "Unauthorized", "message": "Unauthorized"}
        return web.json_response({} if good else status, status=200 if good else 401)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def reader(server: Server, pod: Path) -> Any:
    """Return what reads credentials whose token is in a file, for plain HTTP."""
    return to(server.url, lambda: (pod / "token").read_text().strip())


async def test_a_refused_request_reads_the_token_again(server: Server, pod: Path) -> None:
    errors: list[int] = []
    async with Kube(reader(server, pod), on_error=errors.append) as kube:
        await kube.request("GET", "/version")
        server.token = "second"
        (pod / "token").write_text("second")
        await kube.request("GET", "/version")
        assert server.asked == ["Bearer first", "Bearer first", "Bearer second"]
        server.token = "third"  # and the file has the second one still: asked once, and told
        with pytest.raises(ApiError, match="Unauthorized"):
            await kube.request("GET", "/version")
        assert len(server.asked) == 4
        assert errors == [401]
        (pod / "token").write_text("third")
        await kube.request("GET", "/version")


async def test_watches_of_kopf_carry_a_replaced_token(server: Server, pod: Path) -> None:
    now = [0.0]
    connections = Connections(reader(server, pod), clock=lambda: now[0])
    info = await Login(connections, clock=lambda: 100.0).session()
    assert info.server == server.url
    async with info.aiohttp_session as session:
        assert (await session.get(server.url)).status == 200
        server.token = "second"
        (pod / "token").write_text("second")
        now[0] += REREAD_SECONDS + 1
        assert (await session.get(server.url)).status == 200
    assert server.asked == ["Bearer first", "Bearer second"]


async def test_kopf_takes_a_login_after_a_refusal_as_new(server: Server, pod: Path) -> None:
    """kopf ends the operator ("Ran out of valid credentials") for a login that was refused before."""
    now = [0.0]
    login = Login(Connections(reader(server, pod)), clock=lambda: now[0])
    vault = Vault()
    await vault.populate({"login": await login.session()})
    for _ in range(3):
        now[0] += 60.0
        key, item = vault.select()
        again = await login.session()
        await populate_after_refusal(vault, key, item.info, again)
        assert vault.select()[1].info is again
    await vault.close()
    await again.aiohttp_session.close()


async def populate_after_refusal(vault: Vault, key: Any, info: Any, fresh: kopf.AiohttpSession) -> None:
    """Do as kopf does after a 401: one task gives the old ones back, another brings new ones."""
    import asyncio

    giving_back = asyncio.ensure_future(vault.invalidate(key, info))
    await asyncio.sleep(0)
    await info.aiohttp_session.close()
    await vault.populate({str(key): fresh})
    await giving_back
