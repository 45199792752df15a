"""The part of Kubernetes' JSONPath that printer columns use: fields, indexes, `*`, filters by equality."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import Any

_TOKEN = re.compile(
    r"""\.(?P<field>(?:\\.|[^.\[\]\\])+)
      | \[(?P<index>-?\d+)\]
      | \[(?P<all>\*)\]
      | \['(?P<quoted>[^']+)'\]
      | \[\?\(@(?P<left>(?:\.(?:\\.|[^.\[\]\s=!<>)\\])+)+)
          \s*(?P<op>==|!=)\s*(?P<right>"[^"]*"|'[^']*'|[^)\s]+)\)\]
    """,
    re.VERBOSE,
)
Step = Callable[[Any], list[Any]]


def find(obj: Any, path: str) -> list[Any]:
    """Return all values at a path.

    Args:
        obj: decoded JSON.
        path: such as `.status.conditions[?(@.type=="Ready")].status`.

    Raises:
        ValueError: it is no such path.
    """
    values = [obj]
    for step in _steps(path):
        values = [found for value in values for found in step(value)]
    return values


@functools.lru_cache(maxsize=1024)
def _steps(path: str) -> tuple[Step, ...]:
    text = path.strip().removeprefix("{").removesuffix("}").removeprefix("$")
    steps: list[Step] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ValueError(f"cannot read the JSONPath {path!r} from {text[position:]!r}")
        steps.append(_step(match))
        position = match.end()
    return tuple(steps)


def _step(match: re.Match[str]) -> Step:
    if match["index"] is not None:
        index = int(match["index"])
        return lambda value: (
            [value[index]] if isinstance(value, list) and -len(value) <= index < len(value) else []
        )
    if match["left"] is not None:
        return _filter(match["left"], match["op"] == "==", _literal(match["right"]))
    name = re.sub(r"\\(.)", r"\1", match["quoted"] or match["field"] or "*")
    if match["all"] is not None or name == "*":
        return _all
    return lambda value: [value[name]] if isinstance(value, dict) and name in value else []


def _all(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return list(value.values()) if isinstance(value, dict) else []


def _filter(left: str, equal: bool, right: Any) -> Step:
    return lambda value: [
        item for item in (value if isinstance(value, list) else []) if (find(item, left) == [right]) is equal
    ]


def _literal(text: str) -> Any:
    if text[0] in "\"'":
        return text[1:-1]
    try:
        return json.loads(text)
    except ValueError:
        return text
