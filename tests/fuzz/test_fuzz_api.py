"""Whole requests, well-formed and hostile, at the embedded cluster's API server: credentials, paths, queries,
headers, bodies and patches, over a real connection.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import fuzzing
import pytest
import yaml
from aiohttp import web

from springtide_local.api.housekeeping import Housekeeper
from springtide_local.api.server import BODY_LIMIT, ApiServer
from springtide_local.api.store import Store

Object = dict[str, Any]
JSON = "application/json"
SECONDS = 4.0
"""Limit of the processor time of a conversation: hundreds of times what an ordinary one does."""
PATCHES = ("json-patch+json", "merge-patch+json", "strategic-merge-patch+json", "apply-patch+yaml")
WIDGETS = yaml.safe_load((Path(__file__).parents[1] / "support" / "local_api_widgets.yaml").read_text())
RBAC = "/apis/rbac.authorization.k8s.io/v1"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SPACE = "/api/v1/namespaces/default"
CONTAINER = {"name": "c", "image": "i", "env": [{"name": "A", "value": "b"}], "ports": [{"containerPort": 1}]}
RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"], "resourceNames": ["p"]}]
OBJECTS: dict[str, Object] = {
    "/api/v1/namespaces": {"metadata": {"name": "n", "labels": {"a": "b"}}},
    "/api/v1/nodes": {"metadata": {"name": "o"}, "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}},
    f"{SPACE}/configmaps": {
        "metadata": {"name": "c", "finalizers": ["a.b/c"], "ownerReferences": []},
        "data": {"a": "b"},
    },
    f"{SPACE}/secrets": {"metadata": {"name": "s"}, "data": {"a": "YWJj"}, "stringData": {"b": "c"}},
    f"{SPACE}/services": {
        "metadata": {"name": "v"},
        "spec": {"ports": [{"port": 80}], "selector": {"a": "b"}},
    },
    f"{SPACE}/pods": {
        "metadata": {"name": "p", "labels": {"a": "b"}},
        "spec": {
            "containers": [CONTAINER],
            "tolerations": [{"key": "a", "operator": "Exists"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "nodeSelector": {"a": "b"},
        },
    },
    f"{SPACE}/events": {
        "metadata": {"name": "e"},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"},
        "reason": "R",
        "type": "Normal",
    },
    f"{SPACE}/resourcequotas": {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "4"}}},
    "/apis/policy/v1/namespaces/default/poddisruptionbudgets": {
        "metadata": {"name": "b"},
        "spec": {"minAvailable": "50%", "selector": {"matchLabels": {"a": "b"}}},
    },
    "/apis/coordination.k8s.io/v1/namespaces/default/leases": {
        "metadata": {"name": "l"},
        "spec": {
            "holderIdentity": "x",
            "leaseDurationSeconds": 1,
            "renewTime": "2026-01-01T00:00:00.000000Z",
        },
    },
    f"{RBAC}/namespaces/default/roles": {"metadata": {"name": "r"}, "rules": RULES},
    f"{RBAC}/clusterroles": {
        "metadata": {"name": "k"},
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]},
        "rules": [],
    },
    f"{RBAC}/namespaces/default/rolebindings": {
        "metadata": {"name": "d"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}],
    },
    "/apis/widgets.test.springtide.dev/v1/namespaces/default/widgets": {
        "apiVersion": "widgets.test.springtide.dev/v1",
        "kind": "Widget",
        "metadata": {"name": "w"},
        "spec": {"color": "red", "size": 2, "parts": [{"name": "a", "weight": 1.5}], "template": {"a": [1]}},
    },
    CRDS: {**WIDGETS, "metadata": {"name": "gadgets.widgets.test.springtide.dev"}},
}
OBJECTS[CRDS] = {
    **OBJECTS[CRDS],
    "spec": {**WIDGETS["spec"], "names": {"plural": "gadgets", "kind": "Gadget"}},
}
BESIDES: dict[str, Object] = {
    f"{SPACE}/pods/p/eviction": {"metadata": {"name": "p"}, "deleteOptions": {"gracePeriodSeconds": 1}},
    f"{SPACE}/pods/p/binding": {"target": {"kind": "Node", "name": "o"}},
    f"{SPACE}/serviceaccounts/default/token": {"spec": {"expirationSeconds": 600, "audiences": ["a"]}},
    "/apis/authorization.k8s.io/v1/subjectaccessreviews": {
        "spec": {"user": "u", "groups": ["g"], "resourceAttributes": {"verb": "get", "resource": "pods"}}
    },
    "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews": {"spec": {"namespace": "default"}},
    "/apis/authentication.k8s.io/v1/tokenreviews": {"spec": {"token": "a.b.c", "audiences": ["a"]}},
}
PLACES = (
    *("/", "/api", "/apis", "/api/v1", "/apis/apps/v1", "/apis/nobody.example/v1/things", "/healthz"),
    *("/version", "/openapi/v3", "/openapi/v3/api/v1", "/openapi/v2", "/debug/springtide/requests"),
    *(
        "/api/v1/watch/pods",
        "/api/v1/pods",
        "/api/v2/pods",
        "/api//v1//pods",
        "/apis/events.k8s.io/v1/events",
    ),
    *(
        "//",
        "/api/v1/pods",
        "/api/v1/namespaces/default/pods/p/log",
        "/nowhere",
        "*",
        "/api/v1/namespaces//pods/",
    ),
)
PARTS = ("status", "scale", "log", "exec", "eviction", "binding", "token", "finalize", "proxy", "nothing")
NAMES = (
    "p",
    "c",
    "..",
    "%2e%2e",
    "%2F",
    "a%2Fb",
    "%00",
    "%ff",
    "%ED%A0%80",
    "%",
    "%zz",
    "\xff",
    "A" * 3000,
    "²",
)
HUGE = "9" * 4400
QUERIES: dict[str, tuple[str, ...]] = {
    "labelSelector": (
        "a=b",
        "a in (b,c),!d",
        "a>1",
        "a notin (",
        "=",
        "," * 900,
        "a=\0",
        "(" * 900,
        "a" * 400,
    ),
    "fieldSelector": ("metadata.name=p", "spec.nodeName!=", "status.phase==x", "x=y", "=" * 900, "a=b,,"),
    "limit": ("1", "0", "-1", "x", HUGE, "1e3", "²", str(2**63)),
    "continue": (
        *("x", "e30=", "W10=", "\xff", "A" * 900),
        *(
            base64.urlsafe_b64encode(text).decode()
            for text in (
                b'{"rv":1e999,"start":["",""]}',
                b'{"rv":-5,"start":["a","b"]}',
                b'{"rv":1,"start":[[],{}]}',
                b'{"rv":%s,"start":["a","b"]}' % (b"9" * 400),
                b"[" * 3000,
            )
        ),
    ),
    "resourceVersion": ("0", "1", "3", "-1", "x", "²", "٣", HUGE, str(2**64), "999999"),
    "resourceVersionMatch": ("Exact", "NotOlderThan", "x"),
    "timeoutSeconds": ("1", "0", "-1", "x", "9" * 400, HUGE, str(2**63), str(2**63 - 1)),
    "watch": ("1", "true", "x", ""),
    "allowWatchBookmarks": ("1",),
    "sendInitialEvents": ("true",),
    "fieldValidation": ("Strict", "Warn", "Ignore", "x"),
    "fieldManager": ("m", "", "\ud800", "m" * 300, "\0", "\n", "é"),
    "force": ("true", "x"),
    "dryRun": ("All", "x"),
    "gracePeriodSeconds": ("0", "-1", "x", "9" * 400, str(2**63 - 1)),
    "propagationPolicy": ("Orphan", "Foreground", "x"),
    "includeObject": ("Object", "None", "x"),
    "tailLines": ("1", "-1", "x"),
    "hash": ("x",),
}
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"
HEADERS: dict[str, tuple[str, ...]] = {
    "Accept": (
        TABLE,
        f"{TABLE},{JSON}",
        "application/yaml",
        "application/vnd.kubernetes.protobuf",
        "*/*",
        ";;q=",
    ),
    "Impersonate-User": ("u", "system:serviceaccount:default:default", "", "\xff", "system:anonymous"),
    "Impersonate-Group": ("system:masters", "g", "\xff"),
    "Impersonate-Uid": ("x",),
    "Impersonate-Extra-A%": ("x", "\xff"),
    "User-Agent": ("kubectl/1", "\xff\xfe/", "/", "", "\t", "é" * 200),
    "Content-Encoding": ("gzip", "deflate", "x"),
    "Expect": ("100-continue", "x"),
    "Content-Length": ("-1", "x", "99999999999"),
    "Transfer-Encoding": ("chunked", "x"),
    "X" * 100: ("x" * 9000,),
}
CREDENTIALS = (
    *("", "Bearer", "Bearer ", "Bearer \xff.\xff.\xff", "Bearer a.b.c", "Bearer ...", "Basic YTpi", "\xff"),
    *("Bearer " + "A" * 7000, "bearer x", "Bearer e30.e30.", "Bearer a.b.c.d"),
)
KINDS = (
    JSON,
    "application/yaml",
    "application/vnd.kubernetes.protobuf",
    "text/plain",
    "",
    "a/b;charset=\xff",
)


class Request(NamedTuple):
    """An HTTP request to send.

    `Authorization: rightful` among its headers is replaced by the admin's token.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""

    def raw(self, token: str) -> bytes:
        headers = dict(self.headers)
        if headers.get("Authorization", "rightful") == "rightful":
            headers["Authorization"] = f"Bearer {token}"
        if self.body and "Transfer-Encoding" not in headers:
            headers.setdefault("Content-Length", str(len(self.body)))
        lines = [f"{self.method} {self.target} HTTP/1.1", "Host: x", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + self.body


def asked(method: str, target: str, body: Any = b"", kind: str = JSON, **headers: str) -> Request:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(method, target, (("Content-Type", kind), *headers.items()), sent)


class World:
    """An API server without TLS, with a fresh store for each conversation."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.store, self._token = Store(), ""
        self._server = ApiServer(self.store, folder)
        self.port = self._call(self._start())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _start(self) -> int:
        application = web.Application(client_max_size=BODY_LIMIT)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self._runner.addresses[0][1]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        return await self._server.handle(request)

    async def _renew(self) -> None:
        self.store.end_watches()
        self.store = Store()
        self._server = ApiServer(self.store, self._folder)
        self._token = self._server.tokens.issue_user("admin", ("system:masters",))
        self.store.create("customresourcedefinitions.apiextensions.k8s.io", copy.deepcopy(WIDGETS))

    def fresh(self) -> None:
        self._call(self._renew())
        for path in (f"{SPACE}/pods", f"{SPACE}/configmaps"):
            status, text = self.send(asked("POST", path, OBJECTS[path]))
            assert status == 201, text

    def send(self, request: Request) -> tuple[int, str]:
        """Return the status, 0 for none, and what came with it; of a watch, its beginning."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            try:
                connection.sendall(request.raw(self._token))
                if {"Content-Length", "Transfer-Encoding"} & {
                    name for name, _ in request.headers
                }:  # else it would wait for more
                    connection.shutdown(socket.SHUT_WR)
            except OSError:  # it has refused already
                pass
            data = b""
            try:
                while b"\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
                    data += more
                head, _, body = data.partition(b"\r\n\r\n")
                length = [
                    line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
                ]
                while length and request.method != "HEAD" and len(body) < int(length[0]):
                    more = connection.recv(1 << 16)
                    assert more, f"the answer ends after {len(body)} of {int(length[0])} bytes"
                    body += more
            except ConnectionError:
                return 0, "the connection was closed"
        return (int(head.split(b" ")[1]) if head else 0), body.decode(errors="replace")

    def housekeeping(self) -> None:
        async def work() -> None:
            Housekeeper(self.store).work()

        self._call(work())

    def stop(self) -> None:
        async def end() -> None:
            self.store.end_watches()
            assert self._runner is not None
            await self._runner.cleanup()

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("api"))
    try:
        yield made
    finally:
        made.stop()


def query(chance: Random) -> str:
    names = [chance.choice(tuple(QUERIES)) for _ in range(chance.choice((0, 0, 1, 1, 2, 4)))]
    pairs = [(name, chance.choice(QUERIES[name])) for name in names]
    text = urlencode(pairs, errors="surrogatepass")
    if chance.random() < 0.05:
        text += chance.choice(("&%ff=%ff", "&=", "&limit=%zz", "&&;;", "&watch", "&labelSelector=%ED%A0%80"))
    return "?" + text if text else ""


def headers(chance: Random, kind: str) -> tuple[tuple[str, str], ...]:
    found = [("Content-Type", kind)]
    if chance.random() < 0.1:
        found.append(("Authorization", chance.choice(CREDENTIALS)))
    while chance.random() < 0.3:
        name = chance.choice(tuple(HEADERS))
        found.append((name, chance.choice(HEADERS[name])))
    return tuple(found)


def json_patch(chance: Random, given: Object) -> list[Object]:
    paths = (
        "",
        "/",
        "/metadata/name",
        "/metadata/labels/a",
        "/spec",
        "/spec/containers/0",
        "/spec/x/-",
        "/~2",
        "a",
    )
    return [
        {
            "op": chance.choice(("add", "remove", "replace", "move", "copy", "test", "x")),
            "path": chance.choice(paths),
            "from": chance.choice(paths),
            "value": fuzzing.mutated(chance, given),
        }
        for _ in range(chance.randrange(4))
    ]


def one(chance: Random) -> Request:
    """A request, mostly close to one that is meant."""
    roll = chance.random()
    if roll < 0.15:
        target, given = chance.choice(PLACES), {}
        method = chance.choice(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "FOO", "TRACE"))
    elif roll < 0.25:
        target, given = chance.choice(tuple(BESIDES.items()))
        method = chance.choice(("POST", "POST", "POST", "GET", "PUT"))
    else:
        target, given = chance.choice(tuple(OBJECTS.items()))
        method = chance.choice(("GET", "POST", "POST", "POST", "PUT", "PATCH", "PATCH", "DELETE"))
        if method in ("PUT", "PATCH") or (method in ("GET", "DELETE") and chance.random() < 0.6):
            target += "/" + (given["metadata"]["name"] if chance.random() < 0.9 else chance.choice(NAMES))
            if chance.random() < 0.3:
                target += "/" + chance.choice(PARTS)
    kind = JSON
    value: Any = fuzzing.mutated(chance, given, 3) if given and chance.random() < 0.8 else given
    if method == "PATCH":
        kind = "application/" + chance.choice(PATCHES)
        if "json-patch" in kind:
            value = json_patch(chance, given)
        elif "apply" in kind and isinstance(value, dict):
            value = {"apiVersion": "v1", "kind": "Pod", **value}
    if method == "DELETE":
        options = {"gracePeriodSeconds": 1, "preconditions": {"uid": "a"}, "propagationPolicy": "Orphan"}
        value = fuzzing.mutated(chance, options)
    if chance.random() < 0.05:
        kind = chance.choice(KINDS)
    body = b""
    if method not in ("GET", "HEAD", "TRACE"):
        # Numbers and halves of characters that JSON cannot say are sent as Python says them.
        body = json.dumps(value).encode()
        if "yaml" in kind and chance.random() < 0.5:
            body = yaml.safe_dump(json.loads(body), allow_unicode=True).encode(errors="replace")
        if chance.random() < 0.05:
            body = fuzzing.damaged(chance, body)
    target = quote(target, safe="/%*\xff") + (query(chance) if chance.random() < 0.6 else "")
    return Request(method, target, headers(chance, kind), body)


def made(chance: Random) -> list[Request]:
    """A conversation: whatever is created may be read, patched and deleted afterwards."""
    return [one(chance) for _ in range(chance.randrange(3, 10))]


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
BOMB = b"a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9)) for n in range(1, 7)
)
MAPS, PODS = f"{SPACE}/configmaps", f"{SPACE}/pods"
EVIL = copy.deepcopy(OBJECTS[CRDS])
EVIL["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = {
    "type": "object",
    "properties": {"spec": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a+)+$"}}}},
}
GADGETS = "/apis/widgets.test.springtide.dev/v1/namespaces/default/gadgets"
SEEDS: tuple[list[Request], ...] = (  # finding 25
    [asked("POST", MAPS, DEEP)],
    [asked("POST", MAPS, b"[" * 500_000)],
    [asked("POST", MAPS, b"- " * 10_000 + b"x", "application/yaml")],
    [asked("POST", MAPS, BOMB, "application/yaml")],
    [asked("PATCH", f"{MAPS}/c?fieldManager=m", b"{a: " * 9_000, "application/apply-patch+yaml")],
    [asked("PATCH", f"{MAPS}/c", DEEP, "application/merge-patch+json")],
    [asked("DELETE", f"{PODS}/p?gracePeriodSeconds=x")],
    [asked("DELETE", f"{PODS}/p", {"gracePeriodSeconds": "x"})],
    [asked("DELETE", f"{PODS}/p", {"preconditions": [1], "propagationPolicy": {}, "dryRun": [1]})],
    [asked("DELETE", f"{PODS}/p", ["x"])],
    [asked("POST", f"{PODS}/p/eviction", {"deleteOptions": "x"})],
    [asked("GET", PODS, Authorization="Bearer \xff.\xff.\xff")],
    [asked("POST", MAPS, b"x" * (4 << 20))],
    [
        asked("POST", CRDS, EVIL),
        asked(
            "POST",
            GADGETS,
            {
                "apiVersion": "widgets.test.springtide.dev/v1",
                "kind": "Gadget",
                "metadata": {"name": "g"},
                "spec": {"a": "a" * 40 + "!"},
            },
        ),
    ],
    *(
        [
            asked(
                "GET", f"{PODS}?{name}={quote(text, errors='surrogatepass')}&watch={watch}&timeoutSeconds=1"
            )
            for text in QUERIES[name]
        ]
        for watch in "01"
        for name in ("resourceVersion", "continue", "limit")
    ),
    [asked("GET", f"{PODS}?watch=1&timeoutSeconds={text}") for text in QUERIES["timeoutSeconds"]],
    [asked("POST", f"{PODS}/p/binding", {"target": text}) for text in ("x", ["x"], {"name": ["x"]})],
    [
        asked(
            "POST", f"{SPACE}/resourcequotas", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": text}}}
        )
        for text in ("1e999999", "1e-999999", "9" * 70_000, "1e400", "x")
    ],
    [asked("POST", MAPS, b"{}", **{"Content-Encoding": "gzip"})],
    [Request("POST", MAPS, (("User-Agent", "\xff\xfe/1"),), b'{"metadata":{"name":"u"}}')],
    [asked("POST", f"{MAPS}?fieldManager=%ED%A0%80", {"metadata": {"name": "u"}})],
)
MEANT = ("without impersonating a user", "failed to create typed patch object")
"""Requests that a cluster, too, answers with 500."""


def meant(request: Request, status: int, text: str) -> bool:
    names = [name for name, value in request.headers if name.startswith("Impersonate") and value]
    somebody = "Impersonate-User" in names
    if request.method == "HEAD":  # the answer has no text
        return status < 500 or status == 501 or bool(names and not somebody)
    return status < 500 or status in (501, 504) or any(words in text for words in MEANT)


@pytest.mark.slow
def test_any_conversation_leaves_the_api_server_serving(world: World) -> None:
    def check(conversation: list[Request]) -> None:
        world.fresh()
        began = time.process_time()
        for request in conversation:
            status, text = world.send(request)
            assert meant(request, status, text), (
                f"{request.method} {request.target[:200]}: {status} {text[:500]}"
            )
        world.housekeeping()
        assert time.process_time() - began < SECONDS
        for path in ("/api/v1/pods", "/api/v1/configmaps", "/apis/widgets.test.springtide.dev/v1/widgets"):
            for accept in (JSON, TABLE):
                status, text = world.send(asked("GET", path, Accept=accept))
                assert status in (200, 404) if "widgets" in path else status == 200, (
                    f"{path}: {status} {text[:500]}"
                )
                assert json.loads(text)

    assert fuzzing.run("conversation", SEEDS, made, check, 150) >= len(SEEDS)
