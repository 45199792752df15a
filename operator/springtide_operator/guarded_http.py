"""Answers of the API server, read object by object: for our own requests, and for kopf's.

kopf reads lists with `response.json()` and watches line by line with `json.loads`. Both raise RecursionError
for one object that is nested deeply enough, which ends kopf, and both keep every object in full. kopf takes a
session of ours, and aiohttp a class of responses of ours, so what kopf sees is already cut to what is read of
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import aiohttp
from pydantic_core import from_json

from springtide_operator import records, wire_json

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

CHUNK_BYTES = 256 * 1024
SMALL_LINE_BYTES = 32 * 1024  # of a watch: is handed on as it is unless it is nested
_SMALL_DEPTH = 200  # so many brackets are no deeper than that


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


def read_event(line: bytes, reader: records.Reader | None) -> bytes:
    """Return a line of a watch, cut to what is read of its object; small ones as they are.

    Args:
        line: JSON of one event.
        reader: makes of an object what is read of it; None: all of it.

    Raises:
        ValueError: it is no JSON.
    """
    if len(line) <= SMALL_LINE_BYTES and line.count(b"{") + line.count(b"[") <= _SMALL_DEPTH:
        return line
    event = _object(wire_json.loads(line))
    found = event.get("object")
    if reader is not None and isinstance(found, dict) and event.get("type") not in ("ERROR", "BOOKMARK"):
        event["object"] = records.read(found, reader)
    return json.dumps(event).encode()


class GuardedResponse(aiohttp.ClientResponse):
    """A response whose lists and watches are read by this module."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Begin to read; the body of a watch comes line by line."""
        await super().start(connection)
        if self.url.query.get("watch") == "true" and self.status < 400:
            lines = _Lines(self.content, records.reader_for(self.url.path))
            self.content = lines  # type: ignore[assignment]
        return self

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
        reader = records.reader_for(self.url.path)
        if self.status >= 400:
            return await super().json(encoding=encoding, loads=loads, content_type=content_type)
        if reader is None:
            return wire_json.loads(await self.read())
        page = await read_page(self.content, reader)
        return {**page.around, "items": page.items}


class _Lines:
    """Whole lines of a stream, each cut to what is read of it; all else is the stream's."""

    def __init__(self, content: aiohttp.StreamReader, reader: records.Reader | None) -> None:
        self._content = content
        self._reader = reader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield one line after the other. One that is no JSON is left out."""
        parts: list[bytes] = []
        async for data in self._content.iter_chunked(size):
            *whole, left = data.split(b"\n")
            for end in whole:
                line = b"".join([*parts, end])
                parts.clear()
                try:
                    yield read_event(line, self._reader) + b"\n"
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
