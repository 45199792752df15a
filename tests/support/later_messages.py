"""Messages of a release that is not written yet."""

from __future__ import annotations


def later(number: int) -> bytes:
    """Return a message of a kind that has this number in its `oneof`, from 16 to 2047, and one field."""
    tag = number << 3 | 2
    return bytes((tag & 0x7F | 0x80, tag >> 7, 2, 0x08, 0x01))
