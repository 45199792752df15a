"""Read MDS shards (the format of MosaicML's streaming library, version 2) as data in shards.

    springtide.batches(MDS("s3://bucket/train"), batch_size=256)

A folder has `index.json`, which names the shards with their columns and numbers of samples. A shard begins
with its number of samples n and n + 1 offsets, all uint32; a sample is the sizes (uint32) of its columns that
have no fixed one, and then the columns. So any sample is found at once: a worker that takes a shard over
begins where it is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from springtide.errors import SpringtideError

__all__ = ["MDS"]

_VERSION = 2
_NUMBERS = {
    "int": "int64",
    **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    **{name: name for name in ("float16", "float32", "float64")},
}
_AT_ONCE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class MdsShard:
    """Name one shard.

    Attributes:
        name: of its file in the folder.
        samples: that it has.
        columns: (name, encoding, size in bytes or None) of each column, in order.
    """

    name: str
    samples: int
    columns: tuple[tuple[str, str, int | None], ...]

    def __str__(self) -> str:
        """Return the file's name."""
        return self.name


class MDS:
    """Have the shards of an MDS folder; samples are dicts by column."""

    def __init__(self, folder: str, *, allow_pickle: bool = False, **storage_options: Any) -> None:
        """Read the folder's index.

        Args:
            folder: a local path, or a URL that fsspec opens.
            allow_pickle: whether columns encoded as `pkl` are read, which runs code that is in them.
            storage_options: for fsspec: credentials and the like.

        Raises:
            SpringtideError: there is no index, or it is of a kind that is not read here; the text names it.
        """
        import fsspec

        self._folder = folder.rstrip("/")
        self._options = storage_options
        self._open: Callable[..., Any] = fsspec.open
        try:
            with self._opened("index.json") as file:
                index = json.loads(file.read())
        except FileNotFoundError as error:
            raise SpringtideError(
                f"MDS: there is no index.json in {folder}: name the folder of one split"
            ) from error
        except ValueError as error:
            raise SpringtideError(f"MDS: {folder}/index.json is no JSON: {error}") from error
        self._allow_pickle = allow_pickle
        self.shards = [self._shard(value) for value in index.get("shards", [])]
        """The shards, in the order of the index."""

    def read_shard(self, shard: MdsShard, start: int) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard, from a number on.

        Args:
            shard: one of `shards`.
            start: number of the first sample.
        """
        with self._opened(shard.name) as file:
            head = np.frombuffer(_exactly(file, 4 * (shard.samples + 2), shard), np.uint32)
            if int(head[0]) != shard.samples:
                raise SpringtideError(f"MDS: {shard} has {head[0]} samples, and {shard.samples} in the index")
            offsets = head[1:].astype(np.int64)
            file.seek(int(offsets[start]))
            number = start
            while number < shard.samples:
                last = int(np.searchsorted(offsets, offsets[number] + _AT_ONCE_BYTES, side="right")) - 1
                stop = min(max(last, number + 1), shard.samples)
                data = _exactly(file, int(offsets[stop] - offsets[number]), shard)
                for one in range(number, stop):
                    begin = int(offsets[one] - offsets[number])
                    yield self._sample(shard, data[begin : int(offsets[one + 1] - offsets[number])])
                number = stop

    def _shard(self, value: Mapping[str, Any]) -> MdsShard:
        if value.get("format") != "mds" or value.get("version") != _VERSION:
            raise SpringtideError(
                f"MDS: {self._folder} has shards of format {value.get('format')!r}, version "
                f"{value.get('version')!r}; mds, version {_VERSION}, is read"
            )
        if value.get("compression") is not None:
            raise SpringtideError(
                f"MDS: shards compressed with {value['compression']} are not read: decompress them, or write "
                "them with compression=None"
            )
        names, kinds, sizes = (value[f"column_{part}"] for part in ("names", "encodings", "sizes"))
        for name, kind in zip(names, kinds, strict=True):
            self._check(name, kind)
        columns = tuple(zip(names, kinds, sizes, strict=True))
        return MdsShard(value["raw_data"]["basename"], int(value["samples"]), columns)

    def _check(self, name: str, kind: str) -> None:
        if kind == "pkl" and not self._allow_pickle:
            raise SpringtideError(
                f"MDS: column {name} is pickled, and reading it runs code that is in it: say "
                "allow_pickle=True where you trust the files"
            )
        known = kind in _NUMBERS or kind in ("bytes", "str", "json", "pkl", "jpeg", "png", "str_int")
        if not known and not (kind.startswith("ndarray:") and kind.count(":") == 2):
            raise SpringtideError(f"MDS: column {name} has the encoding {kind!r}, which is not read")

    def _sample(self, shard: MdsShard, data: bytes) -> dict[str, Any]:
        place, sizes = 0, list[int]()
        for _, _, size in shard.columns:
            if size is None:
                sizes.append(int.from_bytes(data[place : place + 4], "little"))
                place += 4
            else:
                sizes.append(size)
        found: dict[str, Any] = {}
        for (name, kind, _), size in zip(shard.columns, sizes, strict=True):
            found[name] = _decoded(kind, data[place : place + size])
            place += size
        return found

    def _opened(self, name: str) -> Any:
        return self._open(f"{self._folder}/{name}", "rb", **self._options).open()


def _exactly(file: Any, size: int, shard: MdsShard) -> bytes:
    parts, left = list[bytes](), size
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    if left:
        raise SpringtideError(f"MDS: {shard} ends {left} bytes too early")
    return b"".join(parts)


def _decoded(kind: str, data: bytes) -> Any:
    if kind in _NUMBERS:
        return np.frombuffer(data, _NUMBERS[kind])[0].item()
    if kind.startswith("ndarray:"):
        _, dtype, shape = kind.split(":")
        return np.frombuffer(data, dtype).reshape([int(size) for size in shape.split(",")]).copy()
    if kind in ("jpeg", "png"):
        from PIL import Image

        return Image.open(io.BytesIO(data)).copy()
    if kind == "pkl":
        import pickle

        return pickle.loads(data)
    if kind == "bytes":
        return data
    text = data.decode()
    return json.loads(text) if kind == "json" else int(text) if kind == "str_int" else text
