"""The manifest of a checkpoint: written last, it makes a checkpoint of files. One format for the state of
workers and for the snapshots of parameter servers.

The version is raised with each change of what a checkpoint holds, in whichever of its files. A release reads
the versions before its own; one that is newer is an error, since an older checkpoint would lose steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from springtide.checkpoint import names
from springtide_protocol.names import GenerationName, StateName

FORMAT = "springtide-checkpoint"
VERSION = 1
VERSION_WITH_FROZEN = 2
"""Version of a manifest that refers to files beside its folder."""
LIMIT_BYTES = 64 << 20
MAX_FILES = 80_000
"""Most files of a checkpoint: one for each process of the largest job, and blocks of what does not train."""
_SHA256 = re.compile("[0-9a-f]{64}")
_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


RECEIPT_VERSION = 1


class CorruptError(Exception):
    """A checkpoint cannot be used; the text says what is wrong with which file."""


class NewerError(CorruptError):
    """A checkpoint was written by a release that is too new for this one; nothing is wrong with it."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a checkpoint; path: its name in its folder.

    folder: beside the checkpoint's, or "" for the checkpoint's own.
    """

    path: str
    bytes: int
    sha256: str
    folder: str = ""

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        if not self.folder:
            del value["folder"]  # as builds wrote it that know no other
        return value


@dataclass(frozen=True, slots=True)
class Part:
    """The files that one kind of process saved: "workers" (header: the tree's description; files: its
    tensors).
    """

    header: File
    files: tuple[File, ...]

    def to_json(self) -> dict[str, Any]:
        return {"header": self.header.to_json(), "files": [file.to_json() for file in self.files]}


@dataclass(frozen=True, slots=True)
class Manifest:
    """written: unix seconds. reason: why it was taken (interval, end, leaving).

    parts: by kind of process, "workers" or "servers".
    """

    state: StateName
    job: Mapping[str, str]
    written: float
    reason: str
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return names.folder(self.state)

    @property
    def files(self) -> list[File]:
        return [file for part in self.parts.values() for file in (part.header, *part.files)]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> bytes:
        value = {
            "format": FORMAT,
            "version": VERSION_WITH_FROZEN if any(file.folder for file in self.files) else VERSION,
            "state": {
                "incarnation": self.state.generation.incarnation.number,
                "restart": self.state.generation.incarnation.restart,
                "number": self.state.generation.number,
                "step": self.state.step,
            },
            "job": dict(self.job),
            "written": self.written,
            "reason": self.reason,
            "parts": {kind: part.to_json() for kind, part in self.parts.items()},
        }
        return json.dumps(value, indent=1).encode()


def parse(raw: bytes, name: str) -> Manifest:
    """Read a manifest.

    Args:
        raw: the file's bytes.
        name: of the checkpoint's folder, which the manifest must have too.

    Raises:
        CorruptError: it is no manifest, or that of another checkpoint.
        NewerError: a later release has written it.
    """
    try:
        value = json.loads(raw)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, not {FORMAT}")
        _check_version(value["version"], VERSION_WITH_FROZEN, f"its {names.MANIFEST}")
        if sum(len(part.get("files", ())) for part in value["parts"].values()) > MAX_FILES:
            raise ValueError(f"more than {MAX_FILES} files")
        state = dict(value["state"])
        step = _whole(state.pop("step"))
        manifest = Manifest(
            StateName(GenerationName.of(**{key: _whole(number) for key, number in state.items()}), step),
            {str(key): str(text) for key, text in value["job"].items()},
            float(value["written"]),
            str(value["reason"]),
            {
                str(kind): Part(_file(part["header"]), tuple(_file(file) for file in part["files"]))
                for kind, part in value["parts"].items()
            },
        )
    except (
        ArithmeticError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise CorruptError(
            f"{names.MANIFEST} is malformed: {type(error).__name__}: {str(error)[:200]}"
        ) from None
    if manifest.name != name:
        raise CorruptError(f"{names.MANIFEST} is that of {manifest.name}")
    return manifest


def _file(value: Any) -> File:
    path, digest, folder = value["path"], value["sha256"], value.get("folder", "")
    if folder not in ("", names.FROZEN):
        raise ValueError(f"impossible folder {folder!r}")
    if not (isinstance(path, str) and _PATH.fullmatch(path)):
        raise ValueError(f"impossible file name {path!r}")
    if not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise ValueError(f"impossible checksum of {path}")
    return File(path, _whole(value["bytes"]), digest, folder)


def _check_version(version: Any, newest: int, what: str) -> None:
    if _whole(version) > newest:
        raise NewerError(
            f"{what} has version {version}, and this release reads {VERSION} to {newest}: upgrade springtide"
            " in the workers' image"
        )
    if version < VERSION:
        raise ValueError(f"version {version}")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a whole number, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class Receipt:
    """Says that a share's file is whole. layout: what its writer takes the state for (`shares.layout`).

    frozen: files with its writer's blocks of what does not train.
    """

    file: File
    layout: str
    frozen: tuple[File, ...] = ()

    def to_json(self) -> bytes:
        frozen = [file.to_json() for file in self.frozen]
        value = {
            "version": RECEIPT_VERSION,
            "file": self.file.to_json(),
            "layout": self.layout,
            "frozen": frozen,
        }
        return json.dumps(value).encode()


def refusal(why: str) -> bytes:
    """Return the bytes that stand in a receipt's place when the share was not written."""
    return json.dumps({"error": why[:1000]}).encode()


def parse_receipt(raw: bytes) -> Receipt:
    """Raise CorruptError, also when the share was not written."""
    try:
        value = json.loads(raw)
        if "error" in value:
            raise CorruptError(str(value["error"]))
        _check_version(value.get("version", 1), RECEIPT_VERSION, "the receipt of a share")
        frozen = tuple(_file(file) for file in value.get("frozen", ()))
        return Receipt(_file(value["file"]), str(value["layout"]), frozen)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"a receipt is malformed: {error}") from None
