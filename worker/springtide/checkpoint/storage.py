"""Folders of checkpoints at any fsspec URI: a path or file:// (every write is whole or not there, and synced
to disk), s3:// and whatever else fsspec knows.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from springtide.checkpoint import names
from springtide.checkpoint.manifest import LIMIT_BYTES, CorruptError

_TIMES = re.compile(r" in [\d.]+ ?[mnµ]?s\b")  # a text that always changes is always news
_HINTS = {"s3": "obstore", "s3a": "obstore"}


def _check_regular(mode: int, path: str) -> None:
    if not stat.S_ISREG(mode):
        raise CorruptError(f"{path.rpartition('/')[2]} is no ordinary file")


class StorageError(Exception):
    """Storage cannot be read or written; the text names the URI, the file and the cause."""


class Storage:
    """The folder `folder` below `uri`; paths are relative to it. Thread-safe as far as fsspec is.

    Raise StorageError when nothing installed understands the URI, or when what it names is out of reach.
    """

    def __init__(self, uri: str, folder: str = "") -> None:
        protocol = uri.partition("://")[0] if "://" in uri else "file"
        try:
            self._fs, root = fsspec.core.url_to_fs(uri, **_options(protocol))
        except (ImportError, ValueError) as error:
            hint = f": pip install {_HINTS[protocol]}" if protocol in _HINTS else ""
            raise StorageError(f"checkpoints at {uri}: {error}{hint}") from None
        except Exception as error:  # some file systems connect at once, and each has its own
            raise StorageError(f"cannot reach {uri}: {_cause(error)}") from error
        self._local = isinstance(self._fs, LocalFileSystem)
        self.given = uri
        self._given_root = root.rstrip("/") or "/"
        self._root = f"{root.rstrip('/')}/{folder}" if folder else root.rstrip("/")
        self.uri = f"{uri.rstrip('/')}/{folder}" if folder else uri

    def make_folder(self, path: str) -> None:
        """Make a folder, where folders exist. The URI itself must be there: a volume that is not mounted is
        no place to write to."""
        with self._telling("write", path):
            if self._local:
                if not os.path.isdir(self._given_root):
                    raise FileNotFoundError(f"there is no folder {self._given_root}; is the volume mounted?")
                os.makedirs(self._at(path), exist_ok=True)

    def checkpoints(self) -> dict[str, bool]:
        """Name of each checkpoint's folder -> whether it has a manifest. Empty where there is no folder."""
        with self._telling("list", ""):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                if self._local and not os.path.isdir(self._given_root):
                    raise
                return {}
            found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries]
            return {
                name: bool(self._fs.exists(self._at(f"{name}/{names.MANIFEST}")))
                for name in found
                if names.parse(name) is not None
            }

    def read(self, path: str, limit: int = LIMIT_BYTES) -> bytes:
        """Return a small file's bytes.

        Args:
            path: relative to the folder.
            limit: in bytes.

        Raises:
            FileNotFoundError: it is not there.
            StorageError: storage does not answer.
            CorruptError: it has more bytes than `limit`.
        """
        what = f"{path.rpartition('/')[2]} is larger than {limit} bytes"
        size = self.size(path)
        if size > limit:
            raise CorruptError(what)
        with self._telling("read", path):
            if self._local:
                with self._open_regular(path) as file:
                    data = file.read(size + 1)
            else:
                data = self._fs.cat_file(self._at(path))
        if len(data) > limit:  # it grows while it is read
            raise CorruptError(what)
        return data

    def size(self, path: str) -> int:
        """Bytes of a file. Raise FileNotFoundError, StorageError; CorruptError for a link or a device."""
        with self._telling("read", path):
            if self._local:
                found = os.lstat(self._at(path))
                _check_regular(found.st_mode, path)
                return found.st_size
            return int(self._fs.info(self._at(path), refresh=True)["size"])

    def has(self, path: str) -> bool:
        """Whether there is this file. Raise StorageError."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        except CorruptError:
            return True  # something is there
        return True

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[IO[bytes]]:
        """A file to read in order. Raise FileNotFoundError, StorageError."""
        self.size(path)  # obstore complains on stderr of a file that is not there
        with self._telling("read", path):
            if self._local:
                with self._open_regular(path) as local:
                    yield local
                return
            with self._fs.open(self._at(path), "rb") as file:
                yield file

    def _open_regular(self, path: str) -> IO[bytes]:
        """An ordinary file of this computer: no link to elsewhere, nothing that blocks or never ends."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(self._at(path), flags)
        try:
            _check_regular(os.fstat(number).st_mode, path)
            return os.fdopen(number, "rb")
        except BaseException:
            os.close(number)
            raise

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[IO[bytes]]:
        """A new file; it is there, whole, when the block has ended well. Raise StorageError."""
        with self._telling("write", path):
            target = self._at(path)
            if not self._local:
                with self._fs.open(target, "wb") as file:
                    yield file
                return
            aside = f"{target}.{secrets.token_hex(4)}.new"
            try:
                with open(aside, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(aside, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(aside)
                raise
            _sync_folder(os.path.dirname(target))

    def put(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all.

        Args:
            path: relative to the folder.
            data: its bytes.

        Raises:
            StorageError: storage does not answer, or refuses.
        """
        if self._local:
            with self.create(path) as file:
                file.write(data)
            return
        with self._telling("write", path):
            self._fs.pipe_file(self._at(path), data)

    def sizes(self, folder: str) -> dict[str, int]:
        """Name of each ordinary file of a folder -> its bytes. Empty where there is no folder.

        Raise StorageError.
        """
        with self._telling("list", folder):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._at(folder), detail=True)
            except FileNotFoundError:
                return {}
            return {
                entry["name"].rpartition("/")[2]: int(entry["size"])
                for entry in entries
                if entry["type"] == "file" and not entry.get("islink")
            }

    def remove(self, path: str) -> None:
        """Remove a file, if it is there, but not by way of a link. Raise StorageError."""
        target = self._at(path)
        if self._local and os.path.islink(os.path.dirname(target)):
            return  # it leads to a folder that is none of ours
        with self._telling("delete", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(target)

    def delete(self, name: str) -> None:
        """Remove a checkpoint: first its manifest, so that no half of it is taken for whole."""
        if self._local and os.path.islink(self._at(name)):
            return  # it leads to a folder that is none of ours
        with self._telling("delete", name):
            for path, recursive in ((f"{name}/{names.MANIFEST}", False), (name, True)):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(self._at(path), recursive=recursive)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextlib.contextmanager
    def _telling(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except (StorageError, CorruptError):
            raise
        except FileNotFoundError as error:
            if what != "read":
                raise StorageError(f"cannot {what} {self._shown(path)}: {_cause(error)}") from None
            raise
        except Exception as error:  # each file system has its own
            raise StorageError(f"cannot {what} {self._shown(path)}: {_cause(error)}") from error

    def _shown(self, path: str) -> str:
        return f"{self.uri}/{path}" if path else self.uri


def _cause(error: BaseException) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or "no reason given"
    text = _TIMES.sub("", text.partition("\n")[0].partition(" <?xml")[0])
    return f"{type(error).__name__}: {text[:300]}"


def _sync_folder(path: str) -> None:
    """Make a rename durable, where the file system lets us."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _options(protocol: str) -> dict[str, Any]:
    """Return the options of fsspec's file system; obstore serves s3:// where s3fs is not installed."""
    if protocol == "file":
        return {}
    if protocol in ("s3", "s3a"):
        try:
            importlib.import_module("s3fs")  # fsspec takes it
        except ImportError:
            from obstore.fsspec import register

            register(protocol)
            return {"skip_instance_cache": True}
    return {"use_listings_cache": False, "skip_instance_cache": True}
