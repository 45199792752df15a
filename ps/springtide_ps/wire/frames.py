"""The form of the tensor stream: a fixed header, a little JSON, raw numbers. PURE.

Some keys of the JSON have another name in the code than here: `keys` has them.

The version is raised with a release in which a frame has another form or meaning, and the one before is read,
too. A connection begins with frames of OLDEST_VERSION, in which each side tells its newest ("newest"); the
lower of the two is theirs from then on (`Stream.version`). A kind of frame that is new with a version is sent
only on connections of that version. From version 3 on a frame of an unknown kind is refused alone; before, it
ended the connection.

Every frame is HEADER_BYTES of header, then `meta_bytes` of JSON, then `payload_bytes` of tensor memory in the
machine's order (little endian). Sizes are checked against limits before any memory is taken. There is no
pickle anywhere.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import torch

MAGIC: Final = b"STPS"
VERSION: Final = 3
OLDEST_VERSION: Final = 2
_HEADER: Final = struct.Struct("<4sBBHQIQQ")  # magic, version, kind, -, request, meta bytes, payload bytes, -
HEADER_BYTES: Final = _HEADER.size
META_LIMIT: Final = 64 * 1024
HANDSHAKE_META_LIMIT: Final = 1024
"""Limit of the frames that come before both sides have proven that they know the token."""
PAYLOAD_LIMIT: Final = 256 * 1024 * 1024
PART_BYTES: Final = 32 * 1024 * 1024
"""Bytes that are on their way at a time of a slice of a table that is larger."""
NO_REPLY: Final = 0  # request number of frames that answer nothing and want no answer

_encode: Final = json.JSONEncoder(separators=(",", ":")).encode
_decode: Final = json.JSONDecoder().raw_decode
DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32")
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Kind(IntEnum):
    """The kind of a frame: a request or an answer, with its JSON and its payload."""

    UNKNOWN = 0  # received only: of a later release

    CHALLENGE = 1  # server -> client: {"nonce"}
    PROOF = 2  # client -> server: {"nonce", "proof", "pulse"}
    ACCEPTED = 3  # server -> client: {"proof", "server", "pulse"}

    INIT = 10  # {"key", "shape", "dtype", "whole"} + values; the first one wins
    PUSH = 11  # {"key"} + gradient
    PULL = 12  # {"key"}
    PUSH_PULL = 13  # {"key"} + gradient; answered with the values after the update
    UPDATE = 14  # {"name", ...options}: which update every later push makes
    STATUS = 15  # {}
    TABLE = 16  # {"key", ...what `embedding.TableSpec` has}: make an embedding table; the first one wins
    LOOKUP = 17  # {"key", "count"} + ids; answered with rows
    TABLE_PUSH = 18  # {"key", "count"} + ids, then gradients
    PAGE = 19  # {"key", "start", "count"}; answered with {"count"} + ids, then rows

    # {"n", "base", "drop"} + JSON: the options of all parameter groups, which a "recipe" names as "n" from
    # then on; with "base" what differs from those. Without an answer (`options`).
    OPTIONS = 20

    # The steps of a job (`step_protocol`); "t" is the generation, "s" the step to be made, "k" a chunk.
    # "rank" in any request: its answer goes after tensors of a lower rank (`send_queue`); 0 without.
    # A generation begins; answered with {"version"}. "books": its members do not step together, "s" is 0.
    # With "trace", where somebody records it: the traceparent of the change of members.
    ENTER = 40  # {"t", "me", "members", "s", "lineage"}, with "books" also "skipped"
    # {"t", "k", "s", ...what a chunk is} + its memory: this server holds it from now on. A slice may come in
    # parts, in order: with "at", "of": which byte a part begins at, of how many; the first one brings the
    # slice's description.
    LOAD = 41
    # {"t"}; answered with the names of the chunks that it holds, by lines; "lost": why not others, by name
    INVENTORY = 42
    ARRANGE = 43  # {"t", "forward", "fill", "drop"}: who gets copies of what
    STAGE = 44  # {"t", "s", "k", "me"} + gradient; "round" in it, and in others: the backward pass, if not 0
    PREPARE = 45  # {"t", "s", "me", "count", "norm"}; answered with {"square_norms"} when all have
    COMMIT = 46  # {"t", "s", "me", "recipe"}
    TRY = 51  # {"t", "s", "me"}: it has committed step s and needs the values, though not all have
    FETCH = 47  # {"t", "s", "k"}; answered with the values after step s
    # As STAGE, with "sel" as STAGE_SPARSE; answered as FETCH, before the step is decided: with the values
    # after it if it is made as expected.
    STAGE_SPECULATIVE = 57
    EXPECT = 52  # {"t", "s", "me", "recipe"}: how the member expects the step to be made
    FETCH_INTERMEDIATE = 53  # {"t", "s", "k", "parts"}; answered with the values after so many substeps of s
    REPORT_SUBSTEPS = 63  # {"t", "s", "me", "recipe"}: the substeps that the member has made so far
    SUM = 48  # {"t", "s", "k"} + sum of all gradients, from the chunk's first server to the others
    RESOLVE = 50  # {"t", "recipe"}: all members hold the state that the generation begins from
    # {"t", "k"}; answered with what LOAD brings, and "of". With "at", "most": so many bytes from there on, in
    # order; where more is to come the answer has "reading", which the next questions name: what is read is
    # of one moment, whatever changes.
    DUMP = 49
    # A snapshot: the chunks as they are after step s, while training goes on; read in any generation.
    SNAPSHOT = 67  # {"t", "s", "name", "readers"}: before the member's own word on the next step
    # {"t", "name", "me"}: JSON about each chunk; with "k" what DUMP answers of that, once; "at" and
    # "most" as there.
    READ_SNAPSHOT = 68
    RELEASE_SNAPSHOT = 69  # {"t", "name", "me"}: the member needs the snapshot no more

    # Embedding tables in steps: table "k", slices "p" with so many ids "n" each.
    # Answered with their rows after step s; with "parts" as FETCH_INTERMEDIATE.
    ROWS = 60  # {"t", "s", "k", "p", "n"} + ids
    STAGE_SPARSE = 62  # as STAGE: numbers of elements, then the gradient there (`sparse_gradient`)
    STAGE_ROWS = 61  # {"t", "s", "k", "p", "n", "me", "d"} + records (`embedding_shard`)

    # Training without common steps (`async_handler`); "r" is a batch, "recipe" how it is applied.
    # Answered with {"applied", "ranges", "already", "before"} + the newest values; of a slice without them.
    # PUSH_BATCH and COPY_BATCH may name an early push "o" instead of "d", "sel" and the gradient; if that is
    # not here, the answer to the former is {"whole": True}.
    # The gradient of a slice is records (`embedding_shard`), of as many of its rows as were used.
    PUSH_BATCH = 70  # {"t", "k", "r", "d", "recipe"} + gradient; with "sel" as in STAGE_SPARSE
    PULL_CHUNK = 71  # {"t", "k"}; answered with {"applied", "ranges"} + the newest values
    APPLIED_BATCHES = 72  # {"t"}; answered with JSON: {"applied", "ranges"} by chunk
    COPY_BATCH = 73  # as PUSH_BATCH with "me", from the chunk's first server to the others
    OPEN = 74  # {"t", "ranges", "clocks", "bound"}: these are finished, the others may be given out
    LEASE = 75  # {"t", "me", "first", "stop", "sent"}; answered with {"range"} if any, "finished", "waited"
    EARLY_PUSH = (
        55  # {"t", "me", "k", "o", "d"} + gradient, with "sel" as in STAGE_SPARSE: set it aside as "o"
    )
    # As EARLY_PUSH with "r" and "recipe" of its push; answered with {"applied", "ranges"} + what the
    # values are with it then, or {"late": True}. A push with "bare" is answered without values.
    SPECULATIVE_PUSH = 80
    COPY_EARLY_PUSH = 56  # as EARLY_PUSH, from the chunk's first server to the others
    FINISHED = 54  # {"t", "me", "done"}: every chunk has these batches, which the member worked on

    DONE = 30  # the answer when there is nothing to say; {"version"} or {"created"}
    VALUES = 31  # {"version"} + values
    REFUSED = 32  # {"error", "message"}: this request failed, the connection is fine
    KEEPALIVE = 33  # the server lives: unasked, to clients that said "pulse" and wait for it (`keepalive`)


_KINDS: Final = {int(kind): kind for kind in Kind}


class FrameError(ValueError):
    """The peer does not speak this protocol, or breaks a limit; the connection cannot go on."""


@dataclass(frozen=True, slots=True)
class Header:
    """Sizes in bytes. `request` is chosen by the client and stands in the answer."""

    kind: Kind
    request: int
    meta_bytes: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame without its payload, which is sent from and received into memory of the caller's."""

    kind: Kind
    request: int = NO_REPLY
    meta: dict[str, Any] = field(default_factory=dict)
    payload_bytes: int = 0


def version_in(meta: Mapping[str, Any]) -> int:
    """Return the version of a connection whose other side has told this in the handshake."""
    newest = meta.get("newest", OLDEST_VERSION)
    if type(newest) is not int or newest < OLDEST_VERSION:
        raise FrameError(f"{newest!r} is no version of frames that this release reads")
    return min(newest, VERSION)


def pack(frame: Frame, version: int = VERSION) -> bytes:
    """Return header and JSON of a frame.

    Args:
        frame: to be sent.
        version: of the connection.

    Raises:
        FrameError: they are over the limits, or cannot be JSON.
    """
    try:
        meta = _encode(frame.meta).encode() if frame.meta else b""
    except (TypeError, ValueError) as error:
        raise FrameError(f"{frame.kind.name} says what cannot be sent: {error}") from None
    if len(meta) > META_LIMIT:
        raise FrameError(
            f"{frame.kind.name} has {len(meta)} bytes beside its tensor, {META_LIMIT} are the limit"
        )
    if not 0 <= frame.payload_bytes <= PAYLOAD_LIMIT:
        raise FrameError(
            f"{frame.kind.name} has a tensor of {frame.payload_bytes} bytes, {PAYLOAD_LIMIT} are the limit: "
            "send it in chunks"
        )
    return (
        _HEADER.pack(MAGIC, version, frame.kind, 0, frame.request, len(meta), frame.payload_bytes, 0) + meta
    )


def unpack_header(
    raw: bytes | bytearray | memoryview, meta_limit: int = META_LIMIT, payload_limit: int = PAYLOAD_LIMIT
) -> Header:
    """Take a header apart.

    Args:
        raw: its bytes.
        meta_limit: bytes of JSON at most.
        payload_limit: bytes of the payload at most.

    Raises:
        FrameError: it is no header of a version that is read, or announces more than the limits.
    """
    magic, version, number, _, request, meta_bytes, payload_bytes, _ = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise FrameError("the peer does not speak the parameter servers' protocol")
    if not OLDEST_VERSION <= version <= VERSION:
        side = "this side" if version > VERSION else "the peer"
        raise FrameError(
            f"the peer sends frames of version {version}, this side reads {OLDEST_VERSION} to {VERSION}: "
            f"upgrade springtide in the image of {side}"
        )
    kind = _KINDS.get(number, Kind.UNKNOWN)
    if meta_bytes > meta_limit or payload_bytes > payload_limit:
        raise FrameError(
            f"{kind.name} announces {meta_bytes} + {payload_bytes} bytes, which is over the limits"
        )
    return Header(kind, request, meta_bytes, payload_bytes)


def unpack_meta(raw: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Raise FrameError for what is no JSON object."""
    if not len(raw):
        return {}
    try:
        text = str(raw, "utf-8")
        meta, end = _decode(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's JSON cannot be read: {error}") from None
    if end != len(text):
        raise FrameError(f"{len(text) - end} characters follow a frame's JSON")
    if not isinstance(meta, dict):
        raise FrameError("a frame's JSON is no object")
    return meta


def memory(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as bytes: contiguous, on the CPU, dense. Raise ValueError for another."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError("a tensor on the wire must be contiguous, dense and on the CPU")
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:  # numpy has none
        tensor = tensor.view(torch.int16)
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]


def joined(*tensors: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: a copy of the tensors' memory, one after another."""
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
