"""The table of the chart's values, from the comments in values.yaml and the types in values.schema.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_KEY = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z][A-Za-z0-9_]*):")
_COMMENT = re.compile(r"^ *# ?(?P<text>.*)$")


@dataclass(frozen=True)
class Value:
    """One value: its path, its type and default as written in the table, and what it means."""

    path: str
    type: str
    default: str
    description: str


def descriptions(text: str) -> dict[str, str]:
    """{path: description} from the comments that begin with `# --`. Lines of one comment are joined."""
    result: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    comment: list[str] | None = None
    for line in text.splitlines():
        found = _COMMENT.match(line)
        if found:
            words = found["text"]
            if words.startswith("-- "):
                comment = [words[3:]]
            elif comment is not None:
                comment.append(words.strip())
            continue
        key = _KEY.match(line)
        if key:
            indent = len(key["indent"])
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, key["name"]))
            if comment is not None:
                result[".".join(name for _, name in stack)] = " ".join(comment)
        comment = None
    return result


def table(values_text: str, schema_text: str) -> list[Value]:
    """Every value in the file's order. Raises ValueError for one without description or type."""
    values, schema = yaml.safe_load(values_text), json.loads(schema_text)
    told = descriptions(values_text)
    described = [_value(path, text, values, schema) for path, text in told.items()]
    missing = [path for path in _leaves(values) if not any(_covers(known, path) for known in told)]
    if missing:
        raise ValueError(f"values.yaml: no comment beginning with `# --` above {', '.join(missing)}")
    return described


def markdown(rows: list[Value]) -> str:
    """The table as Markdown."""
    lines = ["| value | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.path}`", row.type, f"`{row.default}`", row.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def load(chart: Path) -> list[Value]:
    """The table of a chart's folder."""
    return table((chart / "values.yaml").read_text(), (chart / "values.schema.json").read_text())


def _value(path: str, description: str, values: Any, schema: Any) -> Value:
    node = schema
    for key in path.split("."):
        values = values[key]
        node = node.get("properties", {}).get(key)
        if node is None:
            raise ValueError(f"values.schema.json does not know {path}")
    return Value(path, _type(node), json.dumps(values), description)


def _type(node: dict[str, Any]) -> str:
    if "enum" in node:
        return "one of " + ", ".join(str(option) for option in node["enum"])
    kind = node["type"]
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _leaves(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [leaf for key, child in values.items() for leaf in _leaves(child, f"{prefix}.{key}".lstrip("."))]


def _covers(known: str, path: str) -> bool:
    return path == known or path.startswith(known + ".")
