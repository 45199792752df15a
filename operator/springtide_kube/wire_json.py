"""JSON from the API server, read so that no single object can end the reader.

The API server stores objects of 1.5 MB that are nested up to 10,000 levels deep. Python's own decoder gives
up on such a text with a RecursionError at about 990 levels, and a whole list is lost with the one bad object
in it. Here what lies deeper than `MAX_DEPTH` is replaced by null, and long lists are taken apart object by
object, so that only one of them is in memory in full at a time.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

MAX_DEPTH = 100
WHOLE_BYTES = 4 * 1024 * 1024  # a page of ordinary objects is less, and is read in one go
WHOLE_VALUES = 150_000  # of such a page: 1.4 MB of `{}` are 35 MB of Python objects

_IN_STRING = re.compile(rb'\\.?|"', re.DOTALL)
_OUTSIDE = re.compile(rb'"[^"\\]*+"|["\[\]{}]')
# Runs of objects that hold no others, such as entries of env, are one token: what is large is mostly these.
# Groups are bounded instead of possessive, which Python before 3.11.5 gets wrong (gh-106052), so that no text
# makes the matcher remember much.
_BELOW = re.compile(
    rb'(?:\{[^{}\[\]"]*+(?:"[^"\\]*+"[^{}\[\]"]*+){0,200}\}[,\s]*+){1,200}|"[^"\\]*+"|["\[\]{}]'
)
_BACKSLASH, _QUOTE, _OPEN_LIST, _OPEN_OBJECT = b"\\"[0], b'"'[0], b"["[0], b"{"[0]


def loads(data: bytes | str) -> Any:
    """Return the value of a JSON text, without what is nested too deeply.

    Raises ValueError where the text is no JSON.
    """
    try:
        return from_json(data)
    except ValueError:
        raw = data.encode() if isinstance(data, str) else data
        shallow = limit_depth(raw)
        if len(shallow) == len(raw):
            raise
        return from_json(shallow)


def limit_depth(data: bytes) -> bytes:
    """Return the text with null in place of every object and list deeper than `MAX_DEPTH`."""
    splitter = Splitter(items=None)
    splitter.feed(data)
    return splitter.rest()


def values(data: bytes) -> int:
    """Return about how many values a text holds, never fewer than half of them."""
    return data.count(b"{") + data.count(b"[") + data.count(b",")


class Splitter:
    """Takes a list apart while it arrives: `feed` returns the items that are complete, `rest` the text around
    them, with an empty list in their place.

    Nothing here is recursive, and nothing of the list is kept but the item that is not complete yet.
    """

    def __init__(self, items: bytes | None = b"items") -> None:
        self._key = items
        self._carry = b""
        self._in_string = False
        self._depth = 0
        self._base = 0  # depth of the item, or 0 for the text around
        self._in_items = False
        self._cutting = False
        self._rest = bytearray()
        self._item = bytearray()
        self._string_at = 0  # where in the rest the last string of the outermost object begins
        self._last = b""  # that string

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take more of the text.

        Returns the items that are complete by now.
        """
        data = self._carry + chunk
        self._carry = b""
        found: list[bytes] = []
        done = 0  # what is before is where it belongs, or dropped
        at = 0
        while match := self._pattern().search(data, at):
            start, at = match.span()
            char = data[start]
            if self._in_string:
                if char == _BACKSLASH and at - start == 1:  # what it escapes has not come yet
                    self._keep(data[done:start])
                    self._carry = data[start:]
                    return found
                if char == _QUOTE:
                    self._in_string = False
                    if self._depth == 1 and not self._in_items:
                        self._keep(data[done:at])
                        done = at
                        self._last = bytes(self._rest[self._string_at + 1 : -1])
            elif char == _QUOTE:
                self._in_string = at - start == 1
                if self._depth == 1 and not self._in_items:
                    self._keep(data[done:start])
                    done, self._string_at = start, len(self._rest)
                    if not self._in_string:
                        self._last = data[start + 1 : at - 1]
            elif at - start > 1:
                continue  # whole objects
            elif char in (_OPEN_LIST, _OPEN_OBJECT):
                self._depth += 1
                if self._in_items:
                    if self._depth == 3:
                        done, self._base = start, 2
                elif self._depth == 2 and char == _OPEN_LIST and self._last == self._key:
                    self._keep(data[done : start + 1])
                    done, self._in_items = start + 1, True
                    continue
                if self._depth - self._base == MAX_DEPTH + 1:
                    self._keep(data[done:start] + b"null")
                    self._cutting = True
            else:
                if self._cutting:
                    if self._depth - self._base == MAX_DEPTH + 1:
                        self._cutting, done = False, start + 1
                    self._depth -= 1
                    continue
                self._depth -= 1
                if self._in_items and self._depth == 2:
                    self._item += data[done : start + 1]
                    found.append(bytes(self._item))
                    self._item.clear()
                    done, self._base = start + 1, 0
                elif self._in_items and self._depth == 1:
                    done, self._in_items, self._key = start, False, None
        self._keep(data[done:])
        return found

    def _pattern(self) -> re.Pattern[bytes]:
        """Return what to look for next."""
        if self._in_string:
            return _IN_STRING
        if not self._cutting and self._depth - self._base >= MAX_DEPTH:
            return _OUTSIDE
        return _BELOW if self._depth >= (3 if self._in_items else 1) else _OUTSIDE

    def rest(self) -> bytes:
        """Return the text without its items."""
        return bytes(self._rest)

    def _keep(self, part: bytes) -> None:
        if self._cutting:
            return
        if not self._in_items:
            self._rest += part
        elif self._depth > 2 or self._base:
            self._item += part
