"""Store entries in messages: many at once and compressed, since what members write is much alike.

torch's gloo writes 154 + 8 N bytes for each of N members, of which all but some twenty are equal: at 512
members 2.2 MB, of which some tens of KiB are left.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from google.protobuf.message import DecodeError

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError
from springtide_protocol.limits import MAX_STORE_VALUE_BYTES

MAX_UNPACKED_BYTES = 2 * MAX_STORE_VALUE_BYTES
"""Of one message: what cannot be compressed stays below the limit of a message, too."""
_LEVEL = 3  # at level 1 ten times as much is left of 512 values of gloo


def pack(entries: Mapping[str, bytes]) -> list[bytes]:
    """Return entries as the fewest parts that are messages each.

    Args:
        entries: values by key, each within the store's limits.
    """
    parts: list[bytes] = []
    listed, size = pb.EntryList(), 0
    for key, value in entries.items():
        grown = len(key.encode()) + len(value) + 16
        if size and size + grown > MAX_UNPACKED_BYTES:
            parts.append(zlib.compress(listed.SerializeToString(), _LEVEL))
            listed, size = pb.EntryList(), 0
        listed.entries.add(key=key, value=value)
        size += grown
    if size:
        parts.append(zlib.compress(listed.SerializeToString(), _LEVEL))
    return parts


def unpack(packed: bytes) -> Iterator[tuple[str, bytes]]:
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
    return ((entry.key, entry.value) for entry in listed.entries)
