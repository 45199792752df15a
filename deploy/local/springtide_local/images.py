"""Images the kubelet knows. An image here is a Python environment and a root folder, not an archive.

`springtide/operator`, `springtide/ps` and `springtide/worker` (any tag) are this Python and the folder that
holds `examples/`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

WORKING_DIRECTORY = "/springtide"
BUILT_IN = ("springtide/operator", "springtide/ps", "springtide/worker")
_REFERENCE = re.compile(r"^[a-z0-9]+(?:[._:/@-]+[A-Za-z0-9_]+)*$")


class ImageError(Exception):
    """An image that cannot be used. `reason` is the kubelet's waiting reason, `retry` says whether pulling
    again may help.
    """

    def __init__(self, reason: str, message: str, retry: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry = retry


@dataclass(frozen=True)
class Image:
    """`bin` comes first on PATH; `root` is what the image's working directory `/springtide` stands for."""

    name: str
    bin: Path
    root: Path

    @property
    def id(self) -> str:
        return f"process://{self.bin}"


def split_reference(reference: str) -> tuple[str, str]:
    """(repository, tag) without Docker Hub's default registry. Raise ImageError InvalidImageName."""
    if not _REFERENCE.match(reference):
        raise ImageError(
            "InvalidImageName",
            f'Failed to apply default image tag "{reference}": couldn\'t parse image name '
            f'"{reference}": invalid reference format',
            retry=False,
        )
    repository = reference.split("@", 1)[0]
    tag = "latest"
    head, colon, tail = repository.rpartition(":")
    if colon and "/" not in tail:
        repository, tag = head, tail
    for prefix in ("docker.io/library/", "docker.io/"):
        repository = repository.removeprefix(prefix)
    return repository, tag


def source_root() -> Path | None:
    """The folder with `examples/`: the checkout this package runs from, or the data folder of the
    installation.
    """
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file() and (checkout / "examples").is_dir():
        return checkout
    installed = Path(sys.prefix) / "share" / "springtide"
    return installed if (installed / "examples").is_dir() else None


class Images:
    """The built-in images and those registered in `file` (read again when it changes)."""

    def __init__(self, file: Path, empty_root: Path) -> None:
        self._file = file
        self._empty_root = empty_root
        self._stamp: tuple[int, int] | None = None
        self._added: dict[str, Image] = {}

    def find(self, reference: str, pull_policy: str = "IfNotPresent") -> Image:
        """Return an image.

        Args:
            reference: as a pod has it.
            pull_policy: of the container; nothing is ever pulled, so that it only changes the refusal.

        Raises:
            ImageError: no image of that name is known.
        """
        repository, tag = split_reference(reference)
        self._read()
        added = self._added.get(f"{repository}:{tag}") or self._added.get(repository)
        if added is not None:
            return added
        if repository in BUILT_IN:
            return Image(reference, Path(sys.executable).parent, source_root() or self._empty_root)
        if pull_policy == "Never":
            raise ImageError(
                "ErrImageNeverPull",
                f'Container image "{reference}" is not present with pull policy of Never',
                retry=True,
            )
        full = (
            reference
            if "." in repository.split("/")[0]
            else f"docker.io/{'' if '/' in repository else 'library/'}{repository}:{tag}"
        )
        known = ", ".join([*BUILT_IN, *sorted(self._added)])
        raise ImageError(
            "ErrImagePull",
            f'failed to pull and unpack image "{full}": failed to resolve reference "{full}": pull '
            "access denied, repository does not "
            "exist or may require authorization (the embedded cluster runs processes and knows only "
            f"{known}; "
            f"add one with: springtide local image add NAME --python PATH --root DIR)",
            retry=True,
        )

    def names(self) -> list[str]:
        """Every image that `find` knows."""
        self._read()
        return [*BUILT_IN, *sorted(self._added)]

    def _read(self) -> None:
        try:
            status = self._file.stat()
        except FileNotFoundError:
            self._stamp, self._added = None, {}
            return
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp != self._stamp:
            self._added = {
                name: Image(name, Path(i["bin"]), Path(i["root"])) for name, i in _load(self._file).items()
            }
            self._stamp = stamp


def add_image(file: Path, name: str, python: Path, root: Path) -> None:
    """Register an image for a cluster.

    Args:
        file: the cluster's images; it is made when it is missing.
        name: as manifests spell it; without a tag it stands for every tag.
        python: the interpreter of its environment.
        root: its working directory.

    Raises:
        ValueError: one of them cannot be; the text says what to give instead.
    """
    try:
        split_reference(name)
    except ImageError as error:
        raise ValueError(
            f"{name!r} is no image name (such as example/trainer:1.0): {error.message}"
        ) from None
    python = Path(os.path.abspath(python))
    if python.is_dir() or not os.access(python, os.X_OK):
        raise ValueError(
            f"--python {python} is not an executable file: give the path of a Python interpreter, "
            "such as .venv/bin/python"
        )
    root = root.resolve()
    if not root.is_dir():
        raise ValueError(
            f"--root {root} is not a folder: give the folder that shall be the image's working directory"
        )
    for prefix in ("docker.io/library/", "docker.io/"):
        name = name.removeprefix(prefix)
    images = _load(file) if file.exists() else {}
    images[name] = {"bin": str(python.parent), "root": str(root)}
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps(images, indent=1))
    os.replace(fresh, file)


def _load(file: Path) -> dict[str, dict[str, str]]:
    loaded: dict[str, dict[str, str]] = json.loads(file.read_text())
    return loaded
