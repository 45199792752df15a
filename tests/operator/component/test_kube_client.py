"""The client of the Kubernetes API: how it reads kubeconfigs, trusts servers, and serves other threads."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import ssl
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from job_tls import job_tls
from kube_connections import to

from springtide_kube.blocking import BlockingClient
from springtide_kube.client import Caller, Client
from springtide_kube.connection import (
    REREAD_KUBECONFIG_SECONDS,
    Connection,
    Connections,
    from_kubeconfig,
)
from springtide_kube.discovery import Discovery
from springtide_kube.errors import ApiRefusal, CredentialsError, Unreachable
from springtide_operator.credentials import Login
from springtide_protocol.tls_names import SERVER_NAME

Object = dict[str, Any]

TEST = Caller("springtide-test", "springtide-test")


def kubeconfig(folder: Path, cluster: Object, user: Object, namespace: str = "tide") -> list[str]:
    """Write a kubeconfig, and return its path."""
    context = {"cluster": "c", "user": "u", "namespace": namespace}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": context}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return [str(path)]


@asynccontextmanager
async def serve(answer: Any, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve what `answer(request)` returns; yield the URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def nothing(request: web.Request) -> web.Response:
    return web.json_response({})


def plugin(folder: Path, body: str) -> Object:
    """Write a credential plugin, and return the user whose credentials it gives."""
    script = folder / "plugin"
    script.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}}


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def credential(token: str, ends: datetime | None = None) -> str:
    status = {"token": token} | ({"expirationTimestamp": ends.isoformat()} if ends else {})
    found = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}
    return f"echo '{json.dumps(found)}'"


async def test_plugin_of_a_kubeconfig_gives_the_token(tmp_path: Path) -> None:
    user = plugin(tmp_path, credential("given"))
    found = await from_kubeconfig(kubeconfig(tmp_path, {"server": "https://far:6443"}, user))
    assert (found.server, found.namespace) == ("https://far:6443", "tide")
    assert found.headers == {"Authorization": "Bearer given"}
    assert found.seconds == REREAD_KUBECONFIG_SECONDS


async def test_plugin_is_run_again_when_its_token_ends(tmp_path: Path) -> None:
    now = [0.0]
    user = plugin(tmp_path, credential("given", datetime.now(UTC) + timedelta(hours=1)))
    paths = kubeconfig(tmp_path, {"server": "https://far:6443"}, user)
    connections = Connections(partial(from_kubeconfig, paths), clock=lambda: now[0])
    for at, count in ((0.0, 1), (3000.0, 1), (3400.0, 2)):
        now[0] = at
        await connections.current()
        assert runs(tmp_path) == count, f"after {at:.0f} s"


async def test_plugin_is_run_again_after_a_refusal(tmp_path: Path) -> None:
    """A token without an end is good until somebody says that it is not."""
    good = "first"

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(
            {}, status=200 if request.headers["Authorization"] == f"Bearer {good}" else 401
        )

    async with serve(answer) as url:
        paths = kubeconfig(tmp_path, {"server": url}, plugin(tmp_path, credential("first")))
        connections = Connections(partial(from_kubeconfig, paths))
        async with Client(connections, TEST) as client:
            await client.request("GET", "/version")
            good = "second"
            plugin(tmp_path, credential("second"))
            await asyncio.gather(*(client.request("GET", "/version") for _ in range(4)))
        assert await connections.refused({"Authorization": "Bearer first"}), "another one is known by now"
    assert runs(tmp_path) == 2, "those that were refused together read together"


async def test_token_file_of_a_kubeconfig_is_read_again(tmp_path: Path) -> None:
    now = [0.0]
    (tmp_path / "token").write_text("first")
    paths = kubeconfig(tmp_path, {"server": "http://far"}, {"tokenFile": str(tmp_path / "token")})
    connections = Connections(partial(from_kubeconfig, paths), clock=lambda: now[0])
    assert (await connections.current()).headers == {"Authorization": "Bearer first"}
    (tmp_path / "token").write_text("second")
    now[0] = REREAD_KUBECONFIG_SECONDS
    assert (await connections.current()).headers == {"Authorization": "Bearer second"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no usable kubeconfig"),
        ("{]", "no usable kubeconfig: ParserError"),
        ("[1]", "no usable kubeconfig"),
        ('{"contexts": [], "clusters": [], "current-context": "x"}', "no usable kubeconfig.*x"),
    ],
)
async def test_bad_kubeconfig_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(CredentialsError, match=f"{tmp_path}/config: {said}"):
        await from_kubeconfig([str(tmp_path / "config")])


@asynccontextmanager
async def tls_server(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """A server with a certificate for SERVER_NAME; yield its URL and its authority."""
    made = job_tls("uid")
    (folder / "cert").write_text(made.certificate)
    (folder / "key").write_text(made.key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "cert", folder / "key")
    async with serve(nothing, context) as url:
        yield url, made.authority


def trusting(authority: str, url: str, **more: str) -> Object:
    data = base64.b64encode(authority.encode()).decode()
    return {"server": url, "certificate-authority-data": data, **more}


async def test_server_may_have_another_name_if_told(tmp_path: Path) -> None:
    """`tls-server-name` holds for our own requests, and for kopf's."""
    async with tls_server(tmp_path) as (url, authority):
        cluster = trusting(authority, url, **{"tls-server-name": SERVER_NAME})
        connections = Connections(partial(from_kubeconfig, kubeconfig(tmp_path, cluster, {"token": "t"})))
        async with Client(connections, TEST) as client:
            assert await client.request("GET", "/version") == {}
        session = await Login(connections).session()
        async with session.aiohttp_session as of_kopf, of_kopf.get(f"{url}/version") as answer:
            assert answer.status == 200
        kubeconfig(tmp_path, trusting(authority, url), {"token": "t"})
        connections.forget()
        async with Client(connections, TEST) as client:
            with pytest.raises(Unreachable, match="certificate is not accepted"):
                await client.request("GET", "/version")
        session = await Login(connections).session()
        async with session.aiohttp_session as of_kopf:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await of_kopf.get(f"{url}/version")


async def test_replaced_authority_is_trusted_at_once(tmp_path: Path) -> None:
    now = [0.0]
    async with tls_server(tmp_path) as (url, authority):
        name = {"tls-server-name": SERVER_NAME}
        other = job_tls("another").authority
        paths = kubeconfig(tmp_path, trusting(other, url, **name), {"token": "t"})
        connections = Connections(partial(from_kubeconfig, paths), clock=lambda: now[0])
        session = await Login(connections, clock=lambda: now[0]).session()
        async with Client(connections, TEST) as client, session.aiohttp_session as of_kopf:
            with pytest.raises(Unreachable, match="certificate is not accepted"):
                await client.request("GET", "/version")
            kubeconfig(tmp_path, trusting(authority, url, **name), {"token": "t"})
            now[0] = REREAD_KUBECONFIG_SECONDS
            assert await client.request("GET", "/version") == {}
            assert (await of_kopf.get(f"{url}/version")).status == 200, "without another login"


async def test_unusable_authority_is_named(tmp_path: Path) -> None:
    paths = kubeconfig(tmp_path, trusting("no certificate", "https://far:6443"), {"token": "t"})
    connections = Connections(partial(from_kubeconfig, paths))
    async with Client(connections, TEST) as client:
        with pytest.raises(CredentialsError, match="the credentials for https://far:6443 cannot be used"):
            await client.connect()
        with pytest.raises(Unreachable, match="cannot be used"):
            await client.request("GET", "/version")
    with pytest.raises(CredentialsError, match="cannot be used"):
        await Login(connections).session()


@asynccontextmanager
async def proxy() -> AsyncIterator[tuple[str, list[str]]]:
    """A proxy that answers itself; yield its URL, and what it is asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response({})

    async with serve(answer) as url:
        yield url, asked


async def test_proxy_of_a_kubeconfig_is_gone_through(tmp_path: Path) -> None:
    async with proxy() as (url, asked):
        paths = kubeconfig(tmp_path, {"server": "http://far.invalid", "proxy-url": url}, {"token": "t"})
        connections = Connections(partial(from_kubeconfig, paths))
        async with Client(connections, TEST) as client:
            await client.request("GET", "/version")
        session = await Login(connections).session()
        async with session.aiohttp_session as of_kopf, of_kopf.get("http://far.invalid/apis"):
            pass
    assert asked == ["http://far.invalid/version", "http://far.invalid/apis"]


@pytest.mark.parametrize("trusted", [True, False])
async def test_only_people_s_programs_obey_http_proxy(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async with proxy() as (url, asked):
        monkeypatch.setenv("HTTP_PROXY", url)
        monkeypatch.setenv("NO_PROXY", "")
        caller = Caller("springtide-test", trust_env=trusted)
        async with Client(Connections(to("http://127.0.0.1:9")), caller) as client:
            if trusted:
                await client.request("GET", "/version")
            else:
                with pytest.raises(Unreachable, match="Connection refused"):
                    await client.request("GET", "/version")
    assert asked == (["http://127.0.0.1:9/version"] if trusted else [])


async def test_failed_read_of_credentials_is_no_answer(tmp_path: Path) -> None:
    errors: list[int] = []
    read = partial(from_kubeconfig, [str(tmp_path / "none")])
    async with Client(Connections(read), TEST, on_error=errors.append) as client:
        with pytest.raises(Unreachable, match="none not found") as refused:
            await client.request("GET", "/version")
    assert (refused.value.code, refused.value.reason, errors) == (0, "NoCredentials", [0])


async def test_what_breaks_off_is_no_answer() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b'{"half": \n')
        assert request.transport is not None
        request.transport.close()
        return response

    async with serve(answer) as url, Client(Connections(to(url)), TEST) as client:
        with pytest.raises(Unreachable, match="does not answer"):
            await client.request("GET", "/x")
        lines = client.lines("/x", {})
        assert await anext(lines) == '{"half": '
        with pytest.raises(Unreachable, match="does not answer"):
            await anext(lines)


async def test_path_is_sent_as_it_is_meant() -> None:
    """People type names that no object can have; what is quoted already stays so."""
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response({})

    async with serve(answer) as url, Client(Connections(to(url + "/prefix/")), TEST) as client:
        await client.request("GET", "/a b/ü", query={"labelSelector": "a=b,c!=d e"})
        await client.request("GET", "/a%2Fb/..%2Fc?x=%26")
    assert seen == [
        "/prefix/a%20b/%C3%BC?labelSelector=a%3Db,c!%3Dd+e",
        "/prefix/a%2Fb/..%2Fc?x=%26",
    ]


async def test_silence_is_named_with_its_server() -> None:
    held = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        await held.wait()
        return web.json_response({})

    async with serve(answer) as url, Client(Connections(to(url)), TEST, timeout=0.1) as client:
        with pytest.raises(Unreachable, match=f"the API server at {url} does not answer: no answer in time"):
            await client.request("GET", "/x")
        held.set()


async def test_kinds_that_come_later_are_found() -> None:
    kinds: list[Object] = []
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/apis/none/v1":
            return web.json_response({"message": "not found"}, status=404)
        return web.json_response({"resources": kinds})

    def thing(kind: str) -> Object:
        return {"apiVersion": "a.dev/v1", "kind": kind, "metadata": {"name": "n"}}

    async with serve(answer) as url, Client(Connections(to(url)), TEST) as client:
        discovery = Discovery(client)
        assert await discovery.path({**thing("A"), "apiVersion": "none/v1"}, "ns") is None
        assert await discovery.path(thing("A"), "ns") is None
        kinds += [
            {"kind": "A", "name": "as", "namespaced": True},
            {"kind": "A", "name": "as/status", "namespaced": True},
            {"kind": "B", "name": "bs", "namespaced": False},
        ]
        assert await discovery.path(thing("A"), "ns") == "/apis/a.dev/v1/namespaces/ns/as/n"
        assert await discovery.path(thing("B"), "ns") == "/apis/a.dev/v1/bs/n"
    assert asked == ["/apis/none/v1", "/apis/a.dev/v1", "/apis/a.dev/v1"]


async def test_threads_share_one_blocking_client(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []
    before = set(threading.enumerate())  # a cluster that tests share has a client of its own

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers["User-Agent"], request.query.get("fieldManager", "")))
        if request.path == "/no":
            return web.json_response({"reason": "Forbidden", "message": "not you"}, status=403)
        return web.Response(text="a line\n") if request.path == "/log" else web.json_response({"ok": 1})

    async with serve(answer) as url:
        with BlockingClient(Path(kubeconfig(tmp_path, {"server": url}, {})[0]), TEST) as client:
            patch = partial(client.request, "PATCH", "/x", {}, force="true")
            found = await asyncio.gather(*(asyncio.to_thread(patch) for _ in range(8)))
            assert found == [{"ok": 1}] * 8
            assert await asyncio.to_thread(client.text, "/log") == "a line\n"
            with pytest.raises(ApiRefusal, match=r"not you \(403 Forbidden\)"):
                await asyncio.to_thread(client.request, "GET", "/no")
        client.close()
    assert seen == [("springtide-test", "springtide-test")] * 8 + [("springtide-test", "")] * 2
    came = set(threading.enumerate()) - before
    assert not [thread for thread in came if thread.name == "kubernetes client"]


def test_endpoint_changes_with_what_it_is_made_of(tmp_path: Path) -> None:
    """Files that a kubeconfig names keep their names when they are written anew."""

    def found(**changes: Any) -> Connection:
        made = asyncio.run(to("https://far:6443")())
        for key, value in changes.items():
            setattr(made.configuration, key, value)
        return made

    certificate = tmp_path / "cert"
    certificate.write_text("one")
    before = found(cert_file=str(certificate)).endpoint
    assert before == found(cert_file=str(certificate)).endpoint
    assert before != found().endpoint
    assert found(proxy="http://proxy").endpoint != found().endpoint
    assert found(ca_cert_data="PEM").endpoint != found().endpoint
    certificate.write_text("two")
    os.utime(certificate, ns=(1, 1))
    assert before != found(cert_file=str(certificate)).endpoint
