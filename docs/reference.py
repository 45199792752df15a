"""Generate docs/reference.md from the docstrings of the public names: `python docs/reference.py > FILE`.

The public names are `__all__` of the modules in `_MODULES`, or those in `_NAMES`, and the classes that their
functions return. Raises ValueError for a public name without a docstring.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

_HEAD = """\
# The library

Generated from the docstrings by `python docs/reference.py`; `help(springtide)` says the same. How they are
used together stands in the [guide](guide.md), each field of the manifest in [api.md](api.md).
"""
# Module, title, and what is not in `__all__` because nobody makes it by hand.
_MODULES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "springtide",
        "springtide",
        (
            "springtide.data.batch:Batch",
            "springtide.elastic.evaluation:Evaluation",
            "springtide.elastic.retry:RetryAttempt",
        ),
    ),
    ("springtide.data", "springtide.data", ()),
    ("springtide.integrations.mds", "springtide.integrations.mds", ()),
    ("springtide.integrations.sources", "springtide.integrations.sources", ()),
    ("springtide.loggers", "springtide.loggers", ()),
    ("springtide.kv", "springtide.kv", ("springtide.kv.table:Lookup", "springtide.kv.table:Push")),
)
# Of these modules, the public names: their `__all__` is also for the library's own parts.
_NAMES = {"springtide.data": ("ShardedDataset", "Shards", "pack_tokens")}
# Called by the library and by torch, not by scripts.
_INNER = {"Evaluation.report", "shut", "extra_repr", "get_extra_state", "set_extra_state"}
# Made by calls of the library, so that how they are constructed is no promise.
_MADE = {
    "RetryAttempt",
    "Batch",
    "Evaluation",
    "Handle",
    "KVStore",
    "Lookup",
    "Push",
    "ShardedDataset",
    "Table",
}
# Sections of a docstring whose lines are `name: text`.
_LISTS = {"Args:": "Arguments:", "Raises:": "Raises:"}


def markdown() -> str:
    """The text of docs/reference.md. Raise ValueError for a public name without a docstring."""
    parts = [_HEAD]
    for module_name, title, more in _MODULES:
        module = importlib.import_module(module_name)
        parts.append(f"## {title}\n\n{as_markdown(module.__doc__, module_name)}\n")
        names = _NAMES.get(module_name, module.__all__)
        found = [getattr(module, name) for name in sorted(names, key=str.lower) if name[0] != "_"]
        functions = [one for one in found if not inspect.isclass(one)]
        classes = [one for one in found if inspect.isclass(one) and not issubclass(one, BaseException)]
        for place in more:
            home, _, name = place.partition(":")
            classes.append(getattr(importlib.import_module(home), name))
        errors = [one for one in found if inspect.isclass(one) and issubclass(one, BaseException)]
        for one in functions:
            parts.append(_entry(f"{title}.{one.__name__}", one, "###"))
        for one in classes:
            parts.extend(_class(one, title if one.__name__ in module.__all__ else ""))
        if errors:
            parts.append(f"### Errors of {title}\n\n| error | when |\n|---|---|")
            parts[-1] += "".join(f"\n| {_bases(one)} | {_cell(one)} |" for one in errors) + "\n"
    return "\n".join(parts)


def members(one: type) -> Iterator[tuple[str, Any]]:
    """(name, function or property) of the public methods that belong to our own classes, in their order."""
    seen = set()
    for owner in one.__mro__:
        if not owner.__module__.startswith("springtide"):
            continue
        for name, value in vars(owner).items():
            if (
                name.startswith("_")
                or name in seen
                or not _INNER.isdisjoint((name, f"{one.__name__}.{name}"))
            ):
                continue
            if inspect.isfunction(value) or isinstance(value, property):
                seen.add(name)
                yield name, value


def _class(one: type, home: str) -> Iterator[str]:
    title = f"{home}.{one.__name__}" if home else one.__name__
    signature = "" if one.__name__ in _MADE or "__init__" not in vars(one) else _signature(one)
    made = _code(one.__name__ + signature) if signature else ""
    yield f"### `{title}`\n\n{made}{as_markdown(one.__doc__, title)}\n"
    for name, value in members(one):
        yield _entry(f"{one.__name__}.{name}", value, "####")


def _entry(title: str, value: Any, level: str) -> str:
    name = title.rpartition(".")[2]
    if isinstance(value, property):
        assert value.fget is not None
        shown = f"{name}: {_annotation(inspect.signature(value.fget).return_annotation)}"
    else:
        shown = name + _signature(value)
    return f"{level} `{title}`\n\n{_code(shown)}{as_markdown(value.__doc__, title)}\n"


def _signature(value: Any) -> str:
    """Return a signature as it is written, one argument a line when it is long."""
    signature = inspect.signature(value)
    arguments, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            star = True
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            arguments.append("*")
            star = True
        arguments.append(_parameter(parameter))
    result = ""
    if not inspect.isclass(value) and signature.return_annotation is not inspect.Signature.empty:
        result = f" -> {_annotation(signature.return_annotation)}"
    line = f"({', '.join(arguments)}){result}"
    if len(line) <= 90:
        return line
    return "(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){result}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {parameter.default!r}" if parameter.annotation is not parameter.empty else "=..."
    return text


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n\n"


def as_markdown(doc: str | None, where: str) -> str:
    """Return the docstring as Markdown: its indented blocks are code, arguments and errors are lists.

    Args:
        doc: as it stands in the source; None: there is none.
        where: name of what it is of, for the error.

    Raises:
        ValueError: there is none.
    """
    if not doc or not doc.strip():
        raise ValueError(f"{where} is public and has no docstring")
    blocks = []
    for block in inspect.cleandoc(doc).split("\n\n"):
        title, _, rest = block.partition("\n")
        if title in _LISTS and rest:
            blocks.append(f"{_LISTS[title]}\n\n{_items(rest)}")
        elif block.startswith("    "):
            blocks.append(f"```python\n{textwrap.dedent(block)}\n```")
        else:
            blocks.append(re.sub(r"\s*\n\s*", " ", block))
    return "\n\n".join(blocks)


def _items(lines: str) -> str:
    """Return one item for each `name: text` of a section; lines that are indented further go on with it."""
    found = [re.sub(r"\s*\n\s*", " ", one) for one in re.split(r"\n(?=\S)", textwrap.dedent(lines))]
    return "\n".join(f"- `{name}`: {text}" for name, _, text in (one.partition(": ") for one in found))


def _cell(one: type) -> str:
    return as_markdown(one.__doc__, one.__name__).replace("\n", " ").replace("|", "\\|")


def _bases(one: type) -> str:
    return f"`{one.__name__}`({', '.join(f'`{base.__name__}`' for base in one.__bases__)})"


if __name__ == "__main__":
    sys.stdout.write(markdown())
