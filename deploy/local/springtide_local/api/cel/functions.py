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
    """Return the first place of a value in a list, or of a text in a string; -1 where it is not.

    Args:
        values: a list or a string.
        wanted: the value or text.
    """
    if isinstance(values, str):
        return celtypes.IntType(values.find(wanted))
    return celtypes.IntType(next((i for i, value in enumerate(values) if value == wanted), -1))


def last_index_of(values: Any, wanted: Any) -> Any:
    """Return the last place of a value in a list, or of a text in a string; -1 where it is not.

    Args:
        values: a list or a string.
        wanted: the value or text.
    """
    if isinstance(values, str):
        return celtypes.IntType(values.rfind(wanted))
    found = [i for i, value in enumerate(values) if value == wanted]
    return celtypes.IntType(found[-1] if found else -1)


def lower_ascii(text: Any) -> Any:
    return celtypes.StringType("".join(char.lower() if char.isascii() else char for char in text))


def upper_ascii(text: Any) -> Any:
    return celtypes.StringType("".join(char.upper() if char.isascii() else char for char in text))


def replace(text: Any, old: Any, new: Any, count: Any = -1) -> Any:
    """Replace a text in a string.

    Args:
        text: a string.
        old: the text.
        new: in its place.
        count: how many are replaced, from the left; -1: all.
    """
    return celtypes.StringType(str(text).replace(old, new, int(count)))


def split(text: Any, separator: Any, count: Any = -1) -> Any:
    """Cut a string into a list.

    Args:
        text: a string.
        separator: between the parts.
        count: of parts, at most; -1: any.
    """
    parts = str(text).split(separator, int(count) - 1 if count > 0 else -1)
    return celtypes.ListType([celtypes.StringType(part) for part in parts])


def join(values: Any, separator: Any = "") -> Any:
    """Join a list of strings.

    Args:
        values: a list of strings.
        separator: between two of them.
    """
    return celtypes.StringType(str(separator).join(values))


def substring(text: Any, start: Any, end: Any = None) -> Any:
    """Return a part of a string.

    Args:
        text: a string.
        start: place of its first character, from 0.
        end: behind its last one; None: to the end.

    Raises:
        ValueError: the part does not lie in the string.
    """
    stop = len(text) if end is None else int(end)
    if not 0 <= start <= stop <= len(text):
        raise ValueError("index out of range")
    return celtypes.StringType(str(text)[int(start) : stop])


def trim(text: Any) -> Any:
    return celtypes.StringType(str(text).strip())


def char_at(text: Any, index: Any) -> Any:
    """Return a character of a string; "" at its end.

    Args:
        text: a string.
        index: from 0.

    Raises:
        ValueError: the place does not lie in the string.
    """
    if not 0 <= index <= len(text):
        raise ValueError("index out of range")
    return celtypes.StringType(str(text)[int(index) : int(index) + 1])


def find(text: Any, pattern: Any) -> Any:
    """Return the first match of a regular expression; "" where there is none.

    Args:
        text: a string.
        pattern: in RE2's syntax.
    """
    match = regex.compiled(pattern).search(text)
    return celtypes.StringType(match.group(0) if match else "")


def find_all(text: Any, pattern: Any) -> Any:
    """Return all matches of a regular expression.

    Args:
        text: a string.
        pattern: in RE2's syntax.
    """
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
