"""Store entries in messages: many at once and compressed, since what members write is much alike.

torch's gloo writes 154 + 8 N bytes for each of N members, of which all but some twenty are equal: at 512
members 2.2 MB, of which some 10 KiB are left. Bytes that a value shares with the one before it are left out
first: zlib's matches have 258 bytes at most, so that it alone would leave the more of each value the more
members there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError
from springtide_protocol.limits import MAX_STORE_BYTES, MAX_STORE_VALUE_BYTES

MAX_UNPACKED_BYTES = 2 * MAX_STORE_VALUE_BYTES
"""Limit of one part before it is compressed: one that cannot be compressed still fits in a message."""
_LEVEL = 1  # what is alike was left out before


def pack(entries: Mapping[str, bytes]) -> list[bytes]:
    """Return entries as the fewest parts that are messages each.

    Args:
        entries: values by key, each within the store's limits.
    """
    parts: list[bytes] = []
    listed, size, last = pb.EntryList(), 0, b""
    for key, value in entries.items():
        before, after = shared(last, value)
        grown = len(key.encode()) + len(value) - before - after + 24
        if size and size + grown > MAX_UNPACKED_BYTES:
            parts.append(zlib.compress(listed.SerializeToString(), _LEVEL))
            listed, size = pb.EntryList(), 0
            before, after = 0, 0
            grown = len(key.encode()) + len(value) + 24
        rest = value[before : len(value) - after]
        listed.entries.add(key=key, value=rest, before=before, after=after)
        size += grown
        last = value
    if size:
        parts.append(zlib.compress(listed.SerializeToString(), _LEVEL))
    return parts


def shared(one: bytes, other: bytes) -> tuple[int, int]:
    """Return how many bytes two values share at their beginning, and then at their end.

    Args:
        one: value; of another length than the other one it counts as having nothing in common with it.
        other: value.
    """
    if len(one) != len(other):
        return 0, 0
    different = int.from_bytes(one, "big") ^ int.from_bytes(other, "big")
    if not different:
        return len(other), 0
    before = len(other) - (different.bit_length() + 7) // 8
    return before, ((different & -different).bit_length() - 1) // 8


def unpack(packed: bytes) -> list[tuple[str, bytes]]:
    """Return keys and values of one part.

    Raises:
        MalformedError: it is none, or larger than one may be.
    """
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(packed, MAX_UNPACKED_BYTES)
        if not inflater.eof:
            raise MalformedError(
                f"StoreEntries.packed is cut off, or has more than {MAX_UNPACKED_BYTES} bytes"
            )
        listed = pb.EntryList.FromString(data)
    except (zlib.error, DecodeError) as error:
        raise MalformedError(f"StoreEntries.packed is no list of entries: {error}") from error
    entries: list[tuple[str, bytes]] = []
    size, last = 0, b""
    for entry in listed.entries:
        if entry.before + entry.after > len(last):
            raise MalformedError(
                f"StoreEntries.packed: {entry.key[:64]!r} shares more than there was before it"
            )
        size += len(entry.key) + len(entry.value) + entry.before + entry.after
        if size > MAX_STORE_BYTES:
            raise MalformedError(f"StoreEntries.packed has more than {MAX_STORE_BYTES} bytes of entries")
        last = last[: entry.before] + entry.value + last[len(last) - entry.after :]
        entries.append((entry.key, last))
    return entries
