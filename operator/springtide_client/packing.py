"""Packs scripts, folders and arguments into the data of one ConfigMap, and says what to do when they are too
large for it.
"""

from __future__ import annotations

import base64
import gzip
import inspect
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from springtide_client import boot
from springtide_client.errors import SourceError
from springtide_client.source import check, script_of

Object = dict[str, Any]
Arguments = Mapping[str, Any] | Sequence[str]

# The API server takes 1 MiB of data in a ConfigMap; the names and the rest of the object are counted apart.
MAX_BYTES = 1024 * 1024
_NOT_CODE = {"__pycache__", "node_modules", "venv", "build", "dist"}
_LARGEST = 3  # files named in the message


@dataclass(frozen=True)
class Payload:
    """The files that a job's pods find in the mounted ConfigMap.

    Attributes:
        name: of the function or script, from which the job's name is made.
        data: text by file name.
        binary: bytes by file name.
    """

    name: str
    data: Mapping[str, str]
    binary: Mapping[str, bytes]

    def fields(self) -> Object:
        """Return `data` and `binaryData` of the ConfigMap."""
        encoded = {name: base64.b64encode(content).decode() for name, content in self.binary.items()}
        return {"data": dict(self.data), **({"binaryData": encoded} if encoded else {})}


def pack(
    train: Callable[..., object] | str | os.PathLike[str],
    arguments: Arguments | None = None,
    packages: Sequence[str] = (),
    code: str | os.PathLike[str] | None = None,
) -> Payload:
    """Pack what is to be trained.

    Args:
        train: a function, or the path of a script; with `code` the script may be in that folder.
        arguments: keywords of the function; for a script flags by name, or a list as on a command line.
        packages: requirements as pip takes them.
        code: a folder that is sent too, and is the working directory.

    Raises:
        SourceError: it cannot be sent, or is too large.
    """
    folder = None if code is None else Path(code)
    if isinstance(packages, str):
        raise SourceError(f'packages is a list of requirements: write packages=["{packages}"]')
    if folder is not None and not folder.is_dir():
        raise SourceError(f"code={str(folder)!r} is no folder")
    plan: Object = {"packages": [str(package) for package in packages], "script": "", "flags": None}
    data: dict[str, str] = {
        "boot.py": resources.files("springtide_client").joinpath("boot.py").read_text("utf-8")
    }
    if callable(train):
        name = check(train).__name__
        data[boot.SCRIPT] = script_of(train, folder)
        data[boot.ARGUMENTS] = keywords(train, {} if arguments is None else arguments)
    else:
        path = Path(train)
        name = path.stem
        plan["flags"] = flags({} if arguments is None else arguments)
        if (inside := _inside(path, folder)) is not None:
            plan["script"] = inside
        else:
            data[boot.SCRIPT] = _read(path)
    data[boot.PLAN] = json.dumps(plan)
    binary: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    if folder is not None:
        binary[boot.CODE], sizes = pack_folder(folder)
    _check_size(sum(len(text.encode()) for text in data.values()) + sum(map(len, binary.values())), sizes)
    return Payload(name, data, binary)


def keywords(train: Callable[..., object], arguments: Arguments) -> str:
    """Return a function's arguments as JSON.

    Args:
        train: the function.
        arguments: its keywords.

    Raises:
        SourceError: the function does not take them, or one is no plain value.
    """
    name = getattr(train, "__name__", "the function")
    if not isinstance(arguments, Mapping):
        raise SourceError(f"the arguments of {name} are a dictionary of its keywords, not {arguments!r}")
    try:
        inspect.signature(train).bind(**arguments)
    except TypeError as error:
        raise SourceError(f"{name} cannot be called with these arguments: {error}") from error
    for key, value in arguments.items():
        _check_json(value, f"{name}'s argument {key!r}")
    return json.dumps(dict(arguments))


def flags(arguments: Arguments) -> list[str]:
    """Return a script's command line: {"lr": 0.1, "amp": True} is `--lr 0.1 --amp`.

    Args:
        arguments: flags by name (False and None: left out; a list: each value after the flag), or a list of
            words that is taken as it is.

    Raises:
        SourceError: a value is neither text nor number.
    """
    if isinstance(arguments, str):
        raise SourceError(f"arguments is a dictionary or a list: write arguments={arguments.split()!r}")
    if not isinstance(arguments, Mapping):
        return [str(word) for word in arguments]
    words: list[str] = []
    for key, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        for one in values:
            if not isinstance(one, str | int | float | None):
                raise SourceError(
                    f"the argument {key!r} is a {type(one).__name__}, which is no word of a command line"
                )
        flag = f"--{key}"
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, *(str(one) for one in values)]
    return words


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if not isinstance(key, str):
                raise SourceError(f"{where} has the key {key!r}, and keys of JSON are text")
            _check_json(one, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check_json(one, f"{where}[{number}]")
    elif isinstance(value, float):
        if value - value != 0:
            raise SourceError(f"{where} is {value}, which JSON does not have")
    elif not (value is None or isinstance(value, str | int)):
        raise SourceError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}: arguments travel as JSON, so"
            " give a path or plain values, and make it inside of the function"
        )


def _inside(path: Path, folder: Path | None) -> str | None:
    """Return the path of a script within the folder that is sent; None if it is not in there."""
    if folder is None:
        return None
    if not path.is_absolute() and (folder / path).is_file():
        return path.as_posix()
    try:
        return path.resolve().relative_to(folder.resolve()).as_posix() if path.is_file() else None
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SourceError(f"the script {path} cannot be read: {words}") from error


def pack_folder(folder: Path) -> tuple[bytes, dict[str, int]]:
    """Pack the files of a folder: equal files give equal bytes.

    Hidden files and folders, caches and virtual environments are left out.

    Args:
        folder: to pack.

    Returns:
        The archive (tar.gz), and the size of each file in bytes.

    Raises:
        SourceError: a file cannot be read, or a link leads out of the folder.
    """
    buffer = io.BytesIO()
    sizes: dict[str, int] = {}
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(_files(folder)):
            name = path.relative_to(folder).as_posix()
            try:
                path.resolve().relative_to(folder.resolve())
                content = path.read_bytes()
            except ValueError:
                raise SourceError(f"{path} is a link that leads out of the folder {folder}") from None
            except OSError as error:
                raise SourceError(f"{path} cannot be read: {error.strerror}") from error
            entry = tarfile.TarInfo(name)
            entry.size = sizes[name] = len(content)
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0), sizes


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_CODE
            and not (Path(root) / name / "pyvenv.cfg").exists()
        ]
        for name in folders:
            if (Path(root) / name).is_symlink():
                raise SourceError(f"{Path(root) / name} is a link to a folder: send the folder itself")
        for name in files:
            path = Path(root) / name
            if not name.startswith(".") and not name.endswith(".pyc") and path.is_file():
                yield path


def _check_size(size: int, sizes: Mapping[str, int]) -> None:
    if size <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    named = ", ".join(f"{name} ({sizes[name]:,} bytes)" for name in largest)
    raise SourceError(
        f"what is to be sent has {size:,} bytes packed, and a ConfigMap holds {MAX_BYTES:,}"
        + (f"; its largest files are {named}" if named else "")
        + ": keep data out of the code, or put the code into the image (image=...) or on a volume (pod=...)"
    )
