"""The store entries of the current generation, kept so that a member whose stream broke gets them again."""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_protocol.limits import MAX_STORE_BYTES, MAX_STORE_VALUE_BYTES
from springtide_protocol.names import GenerationName

MAX_KEY_BYTES = 1024


class TooMuchError(ValueError):
    """An entry is beyond the limits of the store; the text says which."""


@dataclass(slots=True)
class Rendezvous:
    generation: GenerationName | None = None
    entries: dict[str, bytes] = field(default_factory=dict)
    size: int = 0  # bytes of keys and values

    def begin(self, generation: GenerationName) -> None:
        """Forget the entries of other generations."""
        if generation != self.generation:
            self.generation, self.entries, self.size = generation, {}, 0

    def put(self, key: str, value: bytes) -> bool:
        """Keep an entry.

        Args:
            key: its name.
            value: its bytes.

        Returns:
            False when it is there already with the same value.

        Raises:
            TooMuchError: the key, the value or the sum of all is too large.
        """
        if len(value) > MAX_STORE_VALUE_BYTES or len(key.encode()) > MAX_KEY_BYTES:
            raise TooMuchError(
                f"StoreEntry {key[:64]!r} has {len(value)} bytes; a value may have {MAX_STORE_VALUE_BYTES}"
                f" and a key {MAX_KEY_BYTES}"
            )
        before = self.entries.get(key)
        if before == value:
            return False
        grown = len(value) - len(before) if before is not None else len(value) + len(key)
        if self.size + grown > MAX_STORE_BYTES:
            raise TooMuchError(f"the store of generation {self.generation} is full ({MAX_STORE_BYTES} bytes)")
        self.entries[key] = value
        self.size += grown
        return True
