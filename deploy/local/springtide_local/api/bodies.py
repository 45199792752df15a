"""Bodies of requests: decoded within limits, so that none costs more than its size is worth.

Kubernetes takes objects that are nested 10,000 levels deep, and none is. Here the limit is what Python's own
recursion bears, many times over; whatever is beyond is refused in the same words.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from springtide_local.api import errors, protobuf
from springtide_local.ports import ApiError, Object

MAX_DEPTH = 128
_MAX_REPEATED = 50_000  # nodes of a YAML document that stand there by an alias only
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def decode(kind: str, body: bytes) -> Any:
    """Return what a body says.

    Args:
        kind: The content type.
        body: The bytes.

    Raises:
        ApiError: 400 for what is malformed, too deep or too large when written out; 415 for other types.
    """
    try:
        if kind == protobuf.CONTENT_TYPE:
            return protobuf.decode(body)
        if kind.endswith("yaml"):
            return _yaml(body)
        if kind.endswith("json") or kind == "application/octet-stream":
            return _json(body)
    except (ValueError, yaml.YAMLError) as problem:
        raise _malformed(str(problem)) from None
    except RecursionError:
        raise _malformed("exceeded max depth") from None
    raise errors.unsupported_media_type(
        "the body of the request was in an unknown format - accepted media types include: application/json, "
        "application/yaml"
    )


def _malformed(why: str) -> ApiError:
    return errors.bad_request(f"the object provided is unrecognized or malformed: {why}")


def _json(body: bytes) -> Any:
    # Go's decoder, too, puts a replacement where bytes, or halves of a pair, are no character.
    text = body.decode(errors="replace")
    found = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
        _check_depth(found)
    return _whole(found) if "\\u" in text else found


def _yaml(body: bytes) -> Any:
    if body.lstrip()[:1] == b"{":  # kubectl sends JSON also where it says YAML
        try:
            return _json(body)
        except ValueError:
            pass
    text = body.decode(errors="replace")
    _check_events(text)
    found = yaml.load(text, Loader=_Loader)
    _check_values(found)
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"invalid character '{text[-1]}' looking for beginning of value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"json: cannot unmarshal number {text} into Go value of type float64")
    return value


def _whole(value: Any) -> Any:
    """Return the value with a replacement for each half of a surrogate pair in its texts."""
    if isinstance(value, dict):
        return {_whole(name): _whole(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        return "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in value)
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError("exceeded max depth")


def _check_events(text: str) -> None:
    """Look at a YAML document before anything is made of it: how deep it is, and what its aliases repeat."""
    sizes: dict[str | None, int] = {}
    opened: list[tuple[str | None, int]] = []
    nodes = repeated = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            nodes += 1
            opened.append((event.anchor, nodes + repeated))
            if len(opened) > MAX_DEPTH:
                raise ValueError("exceeded max depth")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes + repeated - before + 1
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise ValueError(f"yaml: anchor '{event.anchor}' value contains itself")
            repeated += sizes.get(event.anchor, 1)
            if repeated > _MAX_REPEATED:
                raise ValueError("yaml: document contains excessive aliasing")
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1


def _check_values(value: Any) -> None:
    """Refuse what YAML can say and JSON cannot, and make all keys text."""
    if isinstance(value, dict):
        for name in list(value):
            _check_values(value[name])
            if not isinstance(name, str):
                if not isinstance(name, bool | int | float):
                    raise ValueError(f"yaml: a key must be text, not {name!r}")
                text = str(name).lower() if isinstance(name, bool) else str(name)
                value[text] = value.pop(name)
    elif isinstance(value, list):
        for item in value:
            _check_values(item)
    elif value is not None and not isinstance(value, str | bool | int | float):
        raise ValueError(f"yaml: {type(value).__name__} is no value of JSON")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ValueError(f"json: unsupported value: {value}")


def of_type(obj: Object, where: str, name: str, kind: str) -> Any:
    """Return a field of an object, if it has the type that it must have.

    Args:
        obj: decoded JSON.
        where: name of the object's Go type, for the error.
        name: of the field.
        kind: `string`, `int64`, `bool`, `object` or `[]string`.

    Returns:
        The value; None without it.

    Raises:
        ApiError: 400, in the words of Go's decoder, for another type.
    """
    value = obj.get(name)
    if value is None:
        return None
    good = {
        "string": isinstance(value, str),
        "int64": isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63,
        "bool": isinstance(value, bool),
        "object": isinstance(value, dict),
        "[]string": isinstance(value, list) and all(isinstance(item, str) for item in value),
    }[kind]
    if not good:
        shown = {dict: "object", list: "array", str: "string", bool: "bool"}.get(type(value), "number")
        if shown == "number":
            shown += f" {value}"
        raise _malformed(f"json: cannot unmarshal {shown} into Go struct field {where}.{name} of type {kind}")
    return value
