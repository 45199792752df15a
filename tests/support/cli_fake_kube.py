"""A KubePort whose answers a test writes, and builders for jobs and events as an API server stores them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from springtide_kube.errors import ApiRefusal, Unreachable

Object = dict[str, Any]

_versions = itertools.count(1)


def job(
    *,
    name: str = "digits",
    uid: str = "u1",
    conditions: Mapping[str, tuple[bool, str, str]] | None = None,
    **status: Any,
) -> Object:
    """conditions: {type: (status, reason, message)}; status: fields of .status."""
    written = dict(status)
    if conditions:
        written["conditions"] = [
            {"type": kind, "status": str(true), "reason": reason, "message": message}
            for kind, (true, reason, message) in conditions.items()
        ]
    obj: Object = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "resourceVersion": str(next(_versions)),
        },
    }
    return obj | {"status": written} if written else obj


def event(reason: str, message: str, *, uid: str = "e1", count: int = 1, kind: str = "Normal") -> Object:
    return {
        "metadata": {"name": uid, "uid": uid, "resourceVersion": str(next(_versions))},
        "reason": reason,
        "message": message,
        "count": count,
        "type": kind,
    }


def pod(
    name: str,
    *,
    uid: str,
    phase: str = "Running",
    state: str = "running",
    containers: tuple[str, ...] = ("worker",),
) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": uid,
            "resourceVersion": str(next(_versions)),
        },
        "spec": {"containers": [{"name": c} for c in containers]},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": c, "state": {state: {}}} for c in containers],
        },
    }


class FakeKube:
    """Lists come from `lists[path]`, watches and logs from queues; exceptions in either are raised.

    A queue's item is a line, an exception, or None for the end of the stream.
    """

    def __init__(self) -> None:
        self.namespace = "default"
        self.answers: dict[tuple[str, str], Any] = {}
        self.lists: dict[str, list[Any]] = {}
        self.streams: dict[str, asyncio.Queue[Any]] = {}
        self.requests: list[tuple[str, str, Any, dict[str, str], str]] = []
        self.opened: list[tuple[str, dict[str, str]]] = []

    def stream(self, path: str) -> asyncio.Queue[Any]:
        return self.streams.setdefault(path, asyncio.Queue())

    def send(self, path: str, change: str, obj: Object) -> None:
        """One watch event."""
        self.stream(path).put_nowait(json.dumps({"type": change, "object": obj}))

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        self.requests.append((method, path, body, dict(query or {}), content_type))
        answer = self.answers.get((method, path))
        if answer is None and method == "GET" and path in self.lists:
            # The last list stays: a broken watch lists the same again.
            queue = self.lists[path]
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            if isinstance(answer, list):
                answer = {"metadata": {"resourceVersion": str(next(_versions))}, "items": answer}
        if callable(answer):
            answer = answer(body)
        if answer is None:
            raise ApiRefusal(404, "NotFound", f"{path} not found")
        if isinstance(answer, Exception):
            raise answer
        result: Object = answer
        return result

    async def lines(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        self.opened.append((path, dict(query)))
        queue = self.stream(path)
        while True:
            item = await queue.get()
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for what other tasks do. Raise TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 (what is waited for sets no event)
            await asyncio.sleep(0.001)


UNREACHABLE = Unreachable("the API server at https://127.0.0.1:1 does not answer: Connection refused")
