"""Follow a collection for as long as it takes: list, watch, and list again after any break, without gaps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from springtide_cli.kube import KubePort
from springtide_kube.errors import ApiRefusal, Unreachable

Object = dict[str, Any]

FIRST_PAUSE = 0.5  # s; doubles up to LONGEST_PAUSE while the API server does not answer
LONGEST_PAUSE = 5.0
WATCH_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Seen:
    """An object as it is now, or as it was when it went."""

    change: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The API server does not answer (any more)."""

    message: str


@dataclass(frozen=True, slots=True)
class Back:
    """The API server answers again, and everything was listed."""


News = Seen | Disconnected | Back


class _ListAgain(Exception):
    """The watch cannot go on from where it was."""


async def follow(kube: KubePort, path: str, query: Mapping[str, str]) -> AsyncIterator[News]:
    """Yield ADDED for all that is there, then every change. Never ends by itself.

    An object that vanished while nobody watched comes as DELETED; one that was added again under its old name
    is another object (uid).

    Args:
        kube: the cluster.
        path: of the collection's URL.
        query: parameters of the URL, as selectors.

    Raises:
        ApiRefusal: asking again cannot help (no right, no such resource).
    """
    known: dict[str, Object] = {}
    silent, wait = False, FIRST_PAUSE
    while True:
        try:
            listed = await kube.request("GET", path, query=query)
            if silent:
                yield Back()
                silent = False
            for news in _compare(known, listed.get("items", [])):
                yield news
            version = listed.get("metadata", {}).get("resourceVersion", "")
            wait = FIRST_PAUSE
            while True:
                async for news in _watch(kube, path, query, version, known):
                    version = news.object["metadata"].get("resourceVersion", version)
                    if news.object.get("kind") != "Bookmark":
                        yield news
        except _ListAgain:
            continue
        except (Unreachable, ApiRefusal) as error:
            if isinstance(error, ApiRefusal) and error.code in (401, 403, 404, 405):
                raise
            if not silent:
                yield Disconnected(error.message)
                silent = True
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_PAUSE)


def _compare(known: dict[str, Object], items: list[Object]) -> list[Seen]:
    now = {item["metadata"]["uid"]: item for item in items}
    news = [Seen("DELETED", known[uid]) for uid in list(known) if uid not in now]
    for uid, item in now.items():
        before = known.get(uid)
        if before is None:
            news.append(Seen("ADDED", item))
        elif before["metadata"].get("resourceVersion") != item["metadata"].get("resourceVersion"):
            news.append(Seen("MODIFIED", item))
    known.clear()
    known.update(now)
    return news


async def _watch(
    kube: KubePort, path: str, query: Mapping[str, str], version: str, known: dict[str, Object]
) -> AsyncIterator[Seen]:
    more = {
        "watch": "1",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(WATCH_SECONDS),
    }
    ended_at_once = True
    async for line in kube.lines(path, {**query, **more}):
        ended_at_once = False
        try:
            event = json.loads(line)
            kind, obj = event["type"], event["object"]
        except (ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"the watch of {path} was cut in the middle of a line") from error
        if kind == "ERROR":
            if obj.get("code") in (410, 504):
                raise _ListAgain
            raise Unreachable(f"the watch of {path} failed: {obj.get('message')}")
        if kind == "BOOKMARK":
            yield Seen("MODIFIED", {**obj, "kind": "Bookmark"})
            continue
        uid = obj["metadata"]["uid"]
        if kind == "DELETED":
            known.pop(uid, None)
        else:
            known[uid] = obj
        yield Seen(kind, obj)
    if ended_at_once:
        # An API server that closes every watch without a word must not be asked in a tight loop.
        raise Unreachable(f"the watch of {path} was closed")
