"""Request bodies in `application/vnd.kubernetes.protobuf`, which kubectl sends for some built-in kinds.

The wire format is decoded by the tables of `protobuf_types`, which hold the kinds that kubectl writes this
way. Answers are always JSON: every client that writes protobuf reads JSON too.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from springtide_local.api import errors
from springtide_local.api.objects import timestamp
from springtide_local.api.protobuf_types import KINDS, MESSAGES
from springtide_local.ports import ApiError, Object

MAGIC = b"k8s\x00"
CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_UNKNOWN = {1: "typeMeta", 2: "raw"}


def decode(body: bytes) -> Object:
    """The object in a body. Raise ApiError 400 for broken bytes, 415 for kinds or fields that are not in
    the tables.
    """
    if not body.startswith(MAGIC):
        raise errors.bad_request("the body is no Kubernetes protobuf: its first bytes are not 'k8s\\0'")
    try:
        envelope = {_UNKNOWN.get(number, ""): value for number, _, value in _fields(body[len(MAGIC) :])}
        meta = {number: value.decode() for number, _, value in _fields(envelope.get("typeMeta", b""))}
        api_version, kind = meta.get(1, ""), meta.get(2, "")
        message = KINDS.get((api_version, kind))
        if message is None:
            raise _unsupported(f"{api_version} {kind}")
        return {"apiVersion": api_version, "kind": kind, **_message(envelope.get("raw", b""), message)}
    except (IndexError, UnicodeDecodeError, AttributeError) as problem:
        raise errors.bad_request(f"the body is no valid protobuf: {problem}") from None


def _unsupported(what: str) -> ApiError:
    return errors.unsupported_media_type(f"{what} is not read as protobuf here; send application/json")


def _fields(data: bytes) -> Iterator[tuple[int, int, Any]]:
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield number, wire, value
        elif wire == _BYTES:
            length, position = _varint(data, position)
            if position + length > len(data):
                raise IndexError("a field is longer than the message")
            yield number, wire, data[position : position + length]
            position += length
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
            yield number, wire, data[position : position + size]
            position += size
        else:
            raise IndexError(f"wire type {wire} is not known")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise IndexError("a number is longer than 64 bits")


def _message(data: bytes, name: str) -> Object:
    table = MESSAGES[name]
    made: Object = {}
    for number, _, raw in _fields(data):
        if number not in table:
            if raw in (0, b""):
                continue
            raise _unsupported(f"field {number} of {name}")
        field, kind = table[number]
        if kind.startswith("map:"):
            entry = {key: value for key, _, value in _fields(raw)}
            key = entry.get(1, b"").decode()
            made.setdefault(field, {})[key] = _value(entry.get(2, b""), kind.removeprefix("map:"))
        elif kind.startswith("[]"):
            made.setdefault(field, []).append(_value(raw, kind.removeprefix("[]")))
        else:
            value = _value(raw, kind)
            if value is not None:
                made[field] = value
    return _without_empty(made)


def _without_empty(made: Object) -> Object:
    """Go writes empty strings and messages that JSON leaves out."""
    return {name: value for name, value in made.items() if value not in ("", {})}


def _value(raw: Any, kind: str) -> Any:
    match kind:
        case "string":
            return raw.decode()
        case "bytes":
            return base64.b64encode(raw).decode()
        case "bool":
            return bool(raw)
        case "int":
            return raw - (1 << 64) if raw >> 63 else raw
        case "Time":
            seconds = next((value for number, _, value in _fields(raw) if number == 1), 0)
            return timestamp(seconds) if seconds > 0 and not seconds >> 63 else None
        case "Quantity":
            return next((value.decode() for number, _, value in _fields(raw) if number == 1), "0")
        case "IntOrString":
            found = {number: value for number, _, value in _fields(raw)}
            return found.get(3, b"").decode() if found.get(1) else _value(found.get(2, 0), "int")
        case _:
            return _message(raw, kind)
