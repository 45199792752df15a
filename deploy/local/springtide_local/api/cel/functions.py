"""The functions that Kubernetes adds to CEL and cel-python lacks: lists, strings, regular expressions."""

from __future__ import annotations

import itertools
from typing import Any

from celpy import celtypes

from springtide_local.api import regex


def _ordered(values: list[Any]) -> bool:
    return all(not later < earlier for earlier, later in itertools.pairwise(values))


def is_sorted(values: Any) -> Any:
    return celtypes.BoolType(_ordered(list(values)))


def total(values: Any) -> Any:
    result: Any = celtypes.IntType(0)
    for index, value in enumerate(values):
        result = value if index == 0 else result + value
    return result


def smallest(values: Any) -> Any:
    if not values:
        raise ValueError("min called on empty list")
    return min(values)


def largest(values: Any) -> Any:
    if not values:
        raise ValueError("max called on empty list")
    return max(values)


def index_of(values: Any, wanted: Any) -> Any:
    if isinstance(values, str):
        return celtypes.IntType(values.find(wanted))
    return celtypes.IntType(next((i for i, value in enumerate(values) if value == wanted), -1))


def last_index_of(values: Any, wanted: Any) -> Any:
    if isinstance(values, str):
        return celtypes.IntType(values.rfind(wanted))
    found = [i for i, value in enumerate(values) if value == wanted]
    return celtypes.IntType(found[-1] if found else -1)


def lower_ascii(text: Any) -> Any:
    return celtypes.StringType("".join(char.lower() if char.isascii() else char for char in text))


def upper_ascii(text: Any) -> Any:
    return celtypes.StringType("".join(char.upper() if char.isascii() else char for char in text))


def replace(text: Any, old: Any, new: Any, count: Any = -1) -> Any:
    return celtypes.StringType(str(text).replace(old, new, int(count)))


def split(text: Any, separator: Any, count: Any = -1) -> Any:
    parts = str(text).split(separator, int(count) - 1 if count > 0 else -1)
    return celtypes.ListType([celtypes.StringType(part) for part in parts])


def join(values: Any, separator: Any = "") -> Any:
    return celtypes.StringType(str(separator).join(values))


def substring(text: Any, start: Any, end: Any = None) -> Any:
    stop = len(text) if end is None else int(end)
    if not 0 <= start <= stop <= len(text):
        raise ValueError("index out of range")
    return celtypes.StringType(str(text)[int(start) : stop])


def trim(text: Any) -> Any:
    return celtypes.StringType(str(text).strip())


def char_at(text: Any, index: Any) -> Any:
    if not 0 <= index <= len(text):
        raise ValueError("index out of range")
    return celtypes.StringType(str(text)[int(index) : int(index) + 1])


def find(text: Any, pattern: Any) -> Any:
    match = regex.compiled(pattern).search(text)
    return celtypes.StringType(match.group(0) if match else "")


def find_all(text: Any, pattern: Any) -> Any:
    return celtypes.ListType(
        [celtypes.StringType(match.group(0)) for match in regex.compiled(pattern).finditer(text)]
    )


FUNCTIONS = {
    "isSorted": is_sorted,
    "sum": total,
    "min": smallest,
    "max": largest,
    "indexOf": index_of,
    "lastIndexOf": last_index_of,
    "lowerAscii": lower_ascii,
    "upperAscii": upper_ascii,
    "replace": replace,
    "split": split,
    "join": join,
    "substring": substring,
    "trim": trim,
    "charAt": char_at,
    "find": find,
    "findAll": find_all,
}
