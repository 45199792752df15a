"""Answers of the API server, read object by object: for our own requests, and for kopf's.

kopf reads lists with `response.json()` and watches line by line with `json.loads`. Both raise RecursionError
for one object that is nested deeply enough, which ends kopf, and both keep every object in full. kopf takes a
session of ours, and aiohttp a class of responses of ours, so what kopf sees is already cut to what is read of
it.

Where a `Feed` is given, it takes the objects here, and kopf sees an empty list, and bookmarks in place of the
events: enough to list and watch, go on after a break and list anew when that is too late, which is kopf's
part. For each object kopf would keep a record for ever and run a task for seconds, which is several times
what the operator keeps of it (docs/decisions/0072-what-a-pod-costs.md).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Protocol

import aiohttp
from pydantic_core import from_json

from springtide_kube import wire_json
from springtide_kube.errors import ApiError
from springtide_operator import records
from springtide_operator.kopf_lists import KopfLists

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

CHUNK_BYTES = 256 * 1024
SMALL_LINE_BYTES = 32 * 1024  # of a watch: is handed on as it is unless it is nested
_SMALL_DEPTH = 200  # so many brackets are no deeper than that
_GONE = frozenset({410, 429})  # kopf lists anew, or asks again: no reason to give up
_EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "everything is listed anew"}


HANDED_ON = frozenset({"customresourcedefinitions"})  # kinds that kopf itself looks at, too


class Feed(Protocol):
    """Takes what kopf's lists and watches bring, in the order in which it comes."""

    def take_event(self, plural: str, kind: str | None, obj: Object) -> None:
        """Take an event.

        Args:
            plural: what objects of that kind are called in URLs.
            kind: ADDED, MODIFIED or DELETED; None: the object was listed.
            obj: as far as it is read.
        """
        ...

    def begins(self, plural: str, namespace: str) -> None:
        """Learn that a list is sent for.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which is listed; "": all of them.
        """
        ...

    def listed(self, plural: str, namespace: str, uids: set[str], resource_version: str) -> None:
        """Learn that a list is whole, so that what it lacks is gone.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which was listed; "": all of them.
            uids: of all objects of the list.
            resource_version: of the list.
        """
        ...


class Page(NamedTuple):
    """A page of a list: its items, read, and what stands around them."""

    items: list[Object]
    around: Object


async def read_page(content: aiohttp.StreamReader, reader: records.Reader | None) -> Page:
    """Read a list from a response's body, object by object.

    Args:
        content: the body.
        reader: makes of an object what is read of it; None: all of it.

    Raises:
        ValueError: it is no JSON.
    """
    whole: list[bytes] = []
    size = 0
    splitter: wire_json.Splitter | None = None
    items: list[Object] = []
    async for chunk in content.iter_chunked(CHUNK_BYTES):
        if splitter is None:
            whole.append(chunk)
            size += len(chunk)
            if size <= wire_json.WHOLE_BYTES:
                continue
            splitter, chunks = wire_json.Splitter(), [*whole]
            whole.clear()
        else:
            chunks = [chunk]
        for part in chunks:
            items += _read_items(splitter.feed(part), reader)
            await asyncio.sleep(0)  # so many megabytes must not hold everybody else up
    if splitter is not None:
        return Page(items, _object(wire_json.loads(splitter.rest())))
    text = b"".join(whole)
    whole.clear()
    if wire_json.values(text) <= wire_json.WHOLE_VALUES:
        try:
            page = _object(from_json(text))
        except ValueError:
            pass
        else:
            found = [_object(item) for item in page.pop("items", None) or []]
            return Page([item for one in found if (item := _read(one, reader)) is not None], page)
    splitter = wire_json.Splitter()
    for start in range(0, len(text), CHUNK_BYTES):
        items += _read_items(splitter.feed(text[start : start + CHUNK_BYTES]), reader)
        await asyncio.sleep(0)
    return Page(items, _object(wire_json.loads(splitter.rest())))


def read_event(
    line: bytes, reader: records.Reader | None, take: Callable[[str, Object], bool] = lambda kind, obj: False
) -> bytes:
    """Return a line of a watch, cut to what is read of its object.

    Args:
        line: JSON of one event.
        reader: makes of an object what is read of it; None: all of it.
        take: is called with the event's kind and its object; where it has taken it, a bookmark with the
            object's version is returned.

    Raises:
        ValueError: it is no JSON.
    """
    small = len(line) <= SMALL_LINE_BYTES and line.count(b"{") + line.count(b"[") <= _SMALL_DEPTH
    event = _object(from_json(line) if small else wire_json.loads(line))
    kind, found = event.get("type"), event.get("object")
    if kind == "ERROR" and isinstance(found, dict) and found.get("code") not in _GONE:
        # kopf takes any other error in a watch for the end of the operator.
        said = str(found.get("message", found))[:200]
        log.warning("a watch ended with an error, and begins anew with a list: %s", said)
        return json.dumps({"type": "ERROR", "object": _EXPIRED}).encode()
    if reader is None or not isinstance(found, dict) or kind in ("ERROR", "BOOKMARK"):
        return line if small else json.dumps(event).encode()
    event["object"] = records.read(found, reader)
    if take(str(kind), event["object"]):
        meta = event["object"]["metadata"]
        version = {key: meta[key] for key in ("resourceVersion",) if key in meta}
        event = {"type": "BOOKMARK", "object": {"metadata": version}}
    return json.dumps(event).encode()


class Taken:
    """Hand objects to a feed, and remember the uids of lists that are not whole yet."""

    def __init__(self, feed: Feed, lists: KopfLists) -> None:
        self._feed, self.lists = feed, lists
        self._uids: dict[str, set[str]] = {}  # by path, of the list that is being read there

    def event(self, plural: str, kind: str, obj: Object) -> bool:
        """Hand the feed an event; return whether that was all that is to be done with it.

        Args:
            plural: what objects of that kind are called in URLs.
            kind: of the event.
            obj: as far as it is read.
        """
        self._feed.take_event(plural, kind, obj)
        return plural not in HANDED_ON

    def began(self, path: str, first: bool) -> None:
        """Say that a page of a list is sent for.

        Args:
            path: of the list's URL.
            first: whether a list begins with this page.
        """
        if first:
            self._feed.begins(records.plural_of(path), namespace_of(path))
        self.lists.began(path, first)

    def page(self, path: str, first: bool, page: Page) -> list[Object]:
        """Hand the feed a page of a list, and say when the list is whole.

        Args:
            path: of the list's URL.
            first: whether a list begins with this page.
            page: of the list.

        Returns:
            Those of its objects that are left for kopf.
        """
        plural = records.plural_of(path)
        if first:
            self._uids[path] = set()
        uids = self._uids.setdefault(path, set())
        for item in page.items:
            uids.add(str(item["metadata"].get("uid")))
            self._feed.take_event(plural, None, item)
        meta = page.around.get("metadata") or {}
        if not meta.get("continue"):
            del self._uids[path]
            namespace = namespace_of(path)
            self._feed.listed(plural, namespace, uids, meta.get("resourceVersion") or "0")
            self.lists.listed(path, namespace)
        return page.items if plural in HANDED_ON else []


class GuardedResponse(aiohttp.ClientResponse):
    """A response whose lists and watches are read by this module."""

    taken: Taken | None = None  # see `response_class`

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Begin to read; the body of a watch comes line by line."""
        path, taken = self.url.path, self.taken
        is_watch = self.url.query.get("watch") == "true"
        is_fed = taken is not None and records.reader_for(path) is not None
        if taken is not None and is_fed and not is_watch:
            taken.began(path, "continue" not in self.url.query)
        await super().start(connection)
        if taken is not None and is_fed and self.status >= 400 and self.status not in _GONE:
            taken.lists.refused(path, await self._refusal())
            if self.status == 403 and records.plural_of(path) != "nodes":
                self.status = 503  # kopf never comes back to what it may not read; this it asks for again
        if is_watch and self.status < 400:
            self.content = _Lines(self.content, path, taken)  # type: ignore[assignment]
        return self

    async def _refusal(self) -> ApiError:
        """Return what the server says. aiohttp keeps the body, so that kopf reads it, too."""
        try:
            said = _object(wire_json.loads(await self.read()))
        except (ValueError, aiohttp.ClientError):
            said = {}
        reason, message = (
            str(said.get("reason") or self.reason),
            str(said.get("message") or "no reason given"),
        )
        return ApiError(self.status, reason, message)

    async def json(
        self,
        *,
        encoding: str | None = None,
        loads: Callable[[str], Any] = json.loads,
        content_type: str | None = "application/json",
    ) -> Any:
        """Return the body; of a list with what is read of its objects only.

        Args:
            encoding: for errors alone, as aiohttp has it.
            loads: likewise.
            content_type: likewise.

        Raises:
            ValueError: it is no JSON.
        """
        path = self.url.path
        reader = records.reader_for(path)
        if self.status >= 400:
            return await super().json(encoding=encoding, loads=loads, content_type=content_type)
        if reader is None:
            return wire_json.loads(await self.read())
        page = await read_page(self.content, reader)
        items = page.items
        if self.taken is not None:
            items = self.taken.page(path, "continue" not in self.url.query, page)
        return {**page.around, "items": items}


def response_class(feed: Feed, lists: KopfLists) -> type[GuardedResponse]:
    """Return a class of responses for aiohttp.

    Args:
        feed: takes what lists and watches bring.
        lists: hears of them.
    """

    class FeedingResponse(GuardedResponse):
        taken = Taken(feed, lists)

    return FeedingResponse


def namespace_of(path: str) -> str:
    """Return the namespace that a URL's path is about; "" for all of them."""
    _, found, rest = path.partition("/namespaces/")
    return rest.partition("/")[0] if found else ""


class _AnewError(Exception):
    """End a watch, for kopf is to list anew."""


class _Lines:
    """Whole lines of a stream, each cut to what is read of it; all else is the stream's."""

    def __init__(self, content: aiohttp.StreamReader, path: str, taken: Taken | None) -> None:
        self._content = content
        self._path, self._plural = path, records.plural_of(path)
        self._reader = records.reader_for(path)
        self._taken = taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    def _take(self, kind: str, obj: Object) -> bool:
        return self._taken is not None and self._taken.event(self._plural, kind, obj)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield one line after the other. One that is no JSON is left out.

        Where kopf is to list anew, the last one says what a server says that has forgotten the version.
        """
        if self._taken is None or self._reader is None:
            async for line in self._lines(size):
                yield line
            return
        lists = self._taken.lists
        lists.opened(self._path, namespace_of(self._path), self._end)
        try:
            async for line in self._lines(size):
                yield line
        except _AnewError:
            yield json.dumps({"type": "ERROR", "object": _EXPIRED}).encode() + b"\n"
        finally:
            lists.closed(self._path, self._end)

    def _end(self) -> None:
        self._content.set_exception(_AnewError())

    async def _lines(self, size: int) -> AsyncIterator[bytes]:
        parts: list[bytes] = []
        async for data in self._content.iter_chunked(size):
            *whole, left = data.split(b"\n")
            for end in whole:
                line = b"".join([*parts, end])
                parts.clear()
                try:
                    yield read_event(line, self._reader, self._take) + b"\n"
                except (ValueError, TypeError, KeyError) as error:
                    log.error("an event of a watch cannot be read, and is left out: %s", _short(error))
            if left:
                parts.append(left)


def _read_items(found: list[bytes], reader: records.Reader | None) -> list[Object]:
    items = []
    for text in found:
        try:
            item = _read(_object(wire_json.loads(text)), reader)
        except ValueError as error:
            log.error("an object of a list cannot be read, and is left out: %s", _short(error))
            continue
        if item is not None:
            items.append(item)
    return items


def _read(item: Object, reader: records.Reader | None) -> Object | None:
    if reader is None:
        return item
    try:
        return records.read(item, reader)
    except (KeyError, TypeError) as error:
        log.error("an object without a name is left out: %s", _short(error))
        return None


def _object(value: Any) -> Object:
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, and {type(value).__name__} came")
    return value


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
