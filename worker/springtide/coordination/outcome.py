"""How a worker process ended, for the operator and for people: the container's termination message.

One JSON object of at most 4096 bytes (the kubelet keeps no more), with `outcome` Finished, Left or Failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import sysconfig
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_BYTES = 4096
PATH_VARIABLE = "SPRINGTIDE_TERMINATION_LOG"


@dataclass(frozen=True, slots=True)
class Finished:
    """The script ended without an exception after its last training loop was committed by all.

    incarnation: (number, restart) of the coordinator. data: `Ledger.audit()`. values: last reported ones.
    taken: what the steps have taken of shards (`data.taken.Taken`); left out when there is nothing.
    """

    incarnation: tuple[int, int]
    generation: int
    step: int
    epochs: int
    data: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    report: Mapping[str, float] = field(default_factory=dict)
    taken: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Left:
    """The process was asked to leave, and the others hold the state. finished: since the job has, without
    it; left out when False.
    """

    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The script raised, or ended without a word. frame: the last frame of the user's own code, `file:line in
    function`, or "". reason: OOMKilled or NotFinished, where the launcher says why one of several processes
    ended; left out when empty.
    """

    exception: str
    message: str = ""
    frame: str = ""
    reason: str = ""


Outcome = Finished | Left | Failed


# ---- from an exception


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(__file__).parents[1]))  # all of this library
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _is_users(filename: str, libraries: tuple[str, ...]) -> bool:
    if filename.startswith("<"):
        return False  # <frozen importlib._bootstrap>, <string>
    path = os.path.realpath(filename)
    parts = Path(path).parts
    return not (path.startswith(libraries) or "site-packages" in parts or "dist-packages" in parts)


def _short(filename: str, root: str) -> str:
    path = os.path.realpath(filename)
    inside = path.startswith(os.path.realpath(root) + os.sep)
    return os.path.relpath(path, os.path.realpath(root)) if inside else os.path.basename(path)


def _script_folder() -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.dirname(os.path.abspath(script)) if script else os.getcwd()


def failed(error: BaseException, root: str | None = None) -> Failed:
    """Describe an exception: class, text, and the last frame that is neither Python's, a package's nor ours.

    A SyntaxError is described at the place of the error; an exception without any frame of the user's gets
    its very last frame.

    Args:
        error: with its traceback.
        root: folder that file names are relative to; the script's by default.
    """
    root = _script_folder() if root is None else root
    kind = type(error)
    name = (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        message = f"exit code {error.code!r}" if isinstance(error, SystemExit) else str(error)
    except Exception as broken:
        message = f"(its text cannot be shown: str() raised {type(broken).__name__})"
    notes = [note for note in getattr(error, "__notes__", []) if isinstance(note, str)]
    message = "\n".join([message, *notes])
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Failed(name, message, f"{_short(error.filename, root)}:{error.lineno}")
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return Failed(name, message)
    return Failed(name, message, users_frame(frames, root))


def users_frame(frames: Sequence[tuple[types.CodeType, int]], root: str | None = None) -> str:
    """Return `file:line in function` of the last frame that is the user's own, or of the very last one.

    Args:
        frames: code and line, the innermost last; not empty.
        root: folder that file names are relative to; the script's by default.
    """
    root = _script_folder() if root is None else root
    libraries = _library_folders()
    code, line = next((f for f in reversed(frames) if _is_users(f[0].co_filename, libraries)), frames[-1])
    where = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{_short(code.co_filename, root)}:{line}{where}"


# ---- to and from JSON


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has neither; `parse` reads them back
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def _dump(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode("utf-8")


def _shorten(text: str, spare: int) -> str:
    """The longest beginning of text, with an ellipsis, that is `spare` bytes shorter as JSON."""
    budget = len(_dump({"": text})) - spare
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(_dump({"": text[:middle] + "…"})) <= budget else (low, middle - 1)
    return text[:low] + "…"


def to_json(outcome: Outcome, limit: int = LIMIT_BYTES) -> bytes:
    """Return UTF-8 JSON of at most `limit` bytes.

    Texts are shortened first (message, then frame, exception or reason), then whole mappings are left out
    (taken, report, then values; `data` stays).

    Args:
        outcome: of the process.
        limit: in bytes.
    """
    fields = {"outcome": type(outcome).__name__} | _plain(
        {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome)}
    )
    if isinstance(outcome, Left) and not outcome.finished:
        del fields["finished"]
    if isinstance(outcome, Finished) and not outcome.taken:
        del fields["taken"]
    if isinstance(outcome, Failed) and not outcome.reason:
        del fields["reason"]
    for name in ("message", "frame", "exception", "reason"):
        excess = len(_dump(fields)) - limit
        if excess > 0 and name in fields:
            fields[name] = _shorten(fields[name], excess)
    for name in ("taken", "report", "values", "data"):
        if len(_dump(fields)) > limit and name in fields:
            fields[name] = {}
    return _dump(fields)


def _numbers(value: dict[str, Any]) -> dict[str, Any]:
    return {key: float(item) if isinstance(item, str) else item for key, item in value.items()}


def parse(text: str | bytes | None) -> Outcome | None:
    """Read a termination message; None for anything that is not one (a log's end, an empty message)."""
    try:
        fields = json.loads(text or "")
        match fields.pop("outcome"):
            case "Finished":
                number, restart = fields.pop("incarnation")
                generation, step, epochs = (int(fields[name]) for name in ("generation", "step", "epochs"))
                data, values, report = (
                    _numbers(fields.get(name, {})) for name in ("data", "values", "report")
                )
                begin = (int(number), int(restart)), generation, step, epochs
                return Finished(*begin, data, values, report, dict(fields.get("taken", {})))
            case "Left":
                return Left(str(fields.get("reason", "")), fields.get("finished") is True)
            case "Failed":
                texts = (str(fields.get(name, "")) for name in ("exception", "message", "frame", "reason"))
                return Failed(*texts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return None


# ---- to the termination log


def write(outcome: Outcome, path: str | os.PathLike[str] | None = None) -> bool:
    """Write the termination message, all of it or nothing.

    In a pod the file is a mount of its own that no rename can replace; then it is written in place, in one
    call.

    Args:
        outcome: of the process.
        path: by default the one that SPRINGTIDE_TERMINATION_LOG names; without it (no pod) nothing is
            written.

    Returns:
        True if there was a place to write it to.

    Raises:
        OSError: neither way of writing is possible.
    """
    target = os.environ.get(PATH_VARIABLE, "") if path is None else os.fspath(path)
    if not target:
        return False
    data = to_json(outcome)
    beside = f"{target}.{os.getpid()}.tmp"
    try:
        Path(beside).write_bytes(data)
        os.replace(beside, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, data)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)
    return True
