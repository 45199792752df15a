"""A tiny API server over HTTP: one job whose status a test writes. For the command as a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Object = dict[str, Any]

TOKEN = "secret-token"


class FakeApi:
    """`refuse`: a Status that answers the next applies. `finish(...)`: the job's condition from now on."""

    def __init__(self) -> None:
        self.refuse: Object | None = None
        self.job: Object | None = None
        self.changed = asyncio.Event()
        self.watched = asyncio.Event()
        self.seen_tokens: set[str] = set()
        self.port = 0
        self._version = 1
        self._stop = asyncio.Event()

    def finish(self, condition: str, message: str) -> None:
        assert self.job is not None
        self._version += 1
        self.job["metadata"]["resourceVersion"] = str(self._version)
        found = {"type": condition, "status": "True", "reason": "Test", "message": message}
        self.job["status"] = {"state": condition, "step": 7, "conditions": [found]}
        self.changed.set()

    def kubeconfig(self, folder: Path, namespace: str | None = None) -> Path:
        context: Object = {"cluster": "c", "user": "u"} | ({"namespace": namespace} if namespace else {})
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": context}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(text))
        return path

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen_tokens.add(request.headers.get("Authorization", ""))
        path = request.path
        if path == "/apis/springtide.dev/v1alpha1":
            return web.json_response(
                {"resources": [{"kind": "TrainingJob", "name": "trainingjobs", "namespaced": True}]}
            )
        if request.query.get("watch"):
            return await self._watch(request)
        if path.endswith(("/trainingjobs", "/events")):
            items = [self.job] if self.job and path.endswith("/trainingjobs") else []
            return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})
        if request.method == "PATCH":
            return await self._apply(request)
        if self.job is None:
            return web.json_response({"reason": "NotFound", "message": "trainingjobs not found"}, status=404)
        return web.json_response(self.job)

    async def _apply(self, request: web.Request) -> web.Response:
        if self.refuse is not None:
            return web.json_response(self.refuse, status=self.refuse["code"])
        job: Object = json.loads(await request.text())
        namespace = request.path.split("/")[5]
        job["metadata"] |= {"uid": "u1", "namespace": namespace, "resourceVersion": str(self._version)}
        self.job = job
        return web.json_response(job, status=201)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path.endswith("/trainingjobs"):
            self.watched.set()
            waits = [asyncio.ensure_future(event.wait()) for event in (self.changed, self._stop)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
            line = json.dumps({"type": "MODIFIED", "object": self.job}).encode() + b"\n"
            if self.changed.is_set():
                self.changed.clear()
                for start in range(0, len(line), 50):  # in pieces, as a network would
                    await response.write(line[start : start + 50])
        await self._stop.wait()
        return response

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeApi]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            self._stop.set()
            await runner.cleanup()
