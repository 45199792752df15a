"""The worker container's command behind an init process, so that any command ends when its pod does.

Nobody needs an entry point of ours in his image: the program travels in the pod's `command`, as the startup
probe's does, and runs with the template's own Python, or else with the image's `python3`. An image without
any runs the command as it is. A container without `command` keeps its image's entry point, which cannot be
seen from here.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

from springtide_operator.api import names
from springtide_operator.manifests.errors import TemplateError

Object = dict[str, Any]

MARK = "# The init process of Springtide: docs/life.md\n"
NONE = "none"
_PROGRAM = Path(__file__).parents[1] / "init_program.py"
_FLAGS = ("-I", "-S", "-c")  # nothing of the user's folder, environment or site: it begins in milliseconds
_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh")
_FIND = (
    'for p in python3 python; do if command -v "$p" >/dev/null 2>&1; then exec "$p" -I -S -c "$0" "$@"; fi;'
    ' done; exec "$@"'
)


def with_init(container: Object, annotations: dict[str, str]) -> None:
    """Put the init process before a container's command, unless the template's annotation says `none`.

    Args:
        container: its `command` is a list of strings, or absent; `args` stay as they are.
        annotations: the pod template's.

    Raises:
        TemplateError: the annotation has another value.
    """
    wanted = annotations.get(names.ANNOTATION_INIT, "")
    if wanted not in ("", NONE):
        raise TemplateError(
            f"spec.workers.template.metadata.annotations: {names.ANNOTATION_INIT} is {wanted!r}:"
            f" say {NONE!r}, or leave it out"
        )
    command = container.get("command")
    if wanted == NONE or not command or not isinstance(command, list):
        return
    container["command"] = [*_prefix(str(command[0])), *command]


def _prefix(program: str) -> list[str]:
    name = program.rpartition("/")[2]
    if name.startswith("python") and not name.removeprefix("python").strip("0123456789."):
        return [program, *_FLAGS, text()]
    # Whoever names a shell has it; other programs are scripts, and images of scripts have one.
    return [program if name in _SHELLS else "sh", "-c", _FIND, text()]


@functools.cache
def text() -> str:
    """The program without its comments and docstrings, as one argument."""
    tree = ast.parse(_PROGRAM.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return MARK + ast.unparse(tree) + "\n"
