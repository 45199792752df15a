"""A share's file: safetensors, written and read in one pass, without a second copy in memory.

The format is safetensors' own (8 bytes of header size, a JSON header, the tensors' memory), so that any
safetensors library reads it. Types that not every such library knows are stored as their bytes (U8).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import IO, Any

import torch

from springtide.checkpoint.manifest import CorruptError, File
from springtide.checkpoint.shares import Piece, parse_key
from springtide.comm.codec import TensorSpec

CHUNK_BYTES = 16 << 20
_HEADER_LIMIT_BYTES = 100 << 20
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(pieces: Sequence[Piece], specs: Sequence[TensorSpec]) -> bytes:
    """Return the header of a safetensors file of pieces, whose memory follows without gaps.

    Args:
        pieces: in the order in which their memory follows.
        specs: shape and dtype of the state's tensors, by their numbers.

    Returns:
        8 bytes of size, then JSON that is padded to a multiple of 8 bytes.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        dtype = specs[piece.tensor].dtype
        size = (piece.stop - piece.start) * dtype.itemsize
        name = _NAMES.get(dtype, "U8")
        entries[piece.key] = {
            "dtype": name,
            "shape": [size if dtype not in _NAMES else piece.stop - piece.start],
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def described(path: Callable[[str], str], head: bytes, memory: torch.Tensor, folder: str) -> File:
    """Return the file that `write` would make.

    Args:
        path: its name, by the hash of its bytes.
        head: of `header`.
        memory: the pieces', uint8.
        folder: of the file.
    """
    digest = hashlib.sha256(head)
    digest.update(memory.numpy().data)
    return File(path(digest.hexdigest()), len(head) + memory.numel(), digest.hexdigest(), folder)


def write(stream: IO[bytes], path: str, head: bytes, memory: torch.Tensor, half: Callable[[], None]) -> File:
    """Write a share's file, and say what was written.

    Args:
        stream: takes the bytes.
        path: of the file, for the manifest; nothing is opened here.
        head: what `header` made.
        memory: the pieces' memory: uint8, one-dimensional, on the CPU.
        half: called once in the middle of the memory.

    Returns:
        The file with its size in bytes and its SHA-256.
    """
    digest = hashlib.sha256(head)
    stream.write(head)
    raw = memory.numpy()
    middle = len(raw) // 2
    for begin, end in ((0, middle), (middle, len(raw))):
        for at in range(begin, end, CHUNK_BYTES):
            chunk = raw[at : min(at + CHUNK_BYTES, end)].data
            digest.update(chunk)
            stream.write(chunk)
        if begin == 0:
            half()
    return File(path, len(head) + len(raw), digest.hexdigest())


def read(
    stream: IO[bytes],
    file: File,
    specs: Sequence[TensorSpec],
    place: Callable[[Piece], torch.Tensor | None] | None,
) -> list[Piece]:
    """Read a share's file.

    Args:
        stream: gives the file's bytes.
        file: its size and checksum, from the manifest.
        specs: shape and dtype of the state's tensors, by their numbers.
        place: gives the memory of each piece (uint8, one-dimensional), which is filled, or None for one that
            is only checked; None: check all only.

    Returns:
        The pieces, in the order of the file.

    Raises:
        CorruptError: size, checksum or content are not what was written.
    """
    digest = hashlib.sha256()

    def take(size: int) -> bytes:
        data = stream.read(size)
        if len(data) != size:
            raise CorruptError(f"{file.path} is cut short")
        digest.update(data)
        return data

    size = int.from_bytes(take(8), "little")
    if size > min(_HEADER_LIMIT_BYTES, file.bytes - 8):
        raise CorruptError(f"{file.path} has an impossible header size")
    pieces = _pieces(file, take(size), specs)
    at = 8 + size
    scratch = torch.empty(0, dtype=torch.uint8)
    for piece in pieces:
        count = (piece.stop - piece.start) * specs[piece.tensor].dtype.itemsize
        at += count
        target = None if place is None else place(piece)
        if target is None:
            if scratch.numel() < min(count, CHUNK_BYTES):
                scratch = torch.empty(min(count, CHUNK_BYTES), dtype=torch.uint8)
            for left in range(count, 0, -CHUNK_BYTES):
                _fill(stream, scratch[: min(left, CHUNK_BYTES)], digest, file)
        else:
            for start in range(0, count, CHUNK_BYTES):
                _fill(stream, target[start : start + CHUNK_BYTES], digest, file)
    if at != file.bytes or stream.read(1):
        raise CorruptError(f"{file.path} has not the {file.bytes} bytes that were written")
    if digest.hexdigest() != file.sha256:
        raise CorruptError(f"{file.path} has not the checksum that was written")
    return pieces


def _fill(stream: IO[bytes], target: torch.Tensor, digest: Any, file: File) -> None:
    view = target.numpy().data
    done = 0
    into = getattr(stream, "readinto", None)
    while done < len(view):
        if into is not None:
            count = into(view[done:])
        else:
            data = stream.read(len(view) - done)
            count = len(data)
            view[done : done + count] = data
        if not count:
            raise CorruptError(f"{file.path} is cut short")
        done += count
    digest.update(view)


def _pieces(file: File, text: bytes, specs: Sequence[TensorSpec]) -> list[Piece]:
    """The pieces that a header announces, in the order of their memory. Raise CorruptError."""
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        pieces, end = [], 0
        for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
            number, start = parse_key(key)
            dtype = specs[number].dtype
            begin, stop = entry["data_offsets"]
            count = (stop - begin) // dtype.itemsize
            if begin != end or stop < begin or count * dtype.itemsize != stop - begin:
                raise ValueError(f"piece {key} does not follow the one before")
            if entry["dtype"] != _NAMES.get(dtype, "U8"):
                raise ValueError(f"piece {key} is {entry['dtype']}, not {dtype}")
            if start + count > specs[number].nbytes // dtype.itemsize:
                raise ValueError(f"piece {key} is longer than its tensor")
            pieces.append(Piece(number, start, start + count))
            end = stop
        return pieces
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CorruptError(f"{file.path}: its header is malformed: {error}") from None
