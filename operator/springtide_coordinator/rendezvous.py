"""The store entries of the current generation: gathered, so that a member gets all of them in few messages.

Members tell each other their addresses in families of keys, one entry of each member: `listener/0`,
`listener/1` and so on. One of them alone is of no use to anybody. So entries wait until their families are
whole. Some families have fewer entries than there are members (a leader tells something, or a group of some
members forms); those wait for a moment that grows with the members, as the cost of sending does.

All entries are kept until the next generation, for a member whose stream broke.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from springtide_protocol.limits import MAX_STORE_BYTES, MAX_STORE_VALUE_BYTES
from springtide_protocol.names import GenerationName
from springtide_protocol.store_entries import pack

MAX_KEY_BYTES = 1024
PAUSE_SECONDS_PER_MEMBER = 0.0005
"""Entries of a family that is not whole wait for so long, times the members."""


class TooMuchError(ValueError):
    """An entry is beyond the limits of the store; the text says which."""


@dataclass(slots=True)
class Rendezvous:
    """Entries of a generation; `members`: of it. Times are unix seconds."""

    generation: GenerationName | None = None
    members: int = 1
    entries: dict[str, bytes] = field(default_factory=dict)
    size: int = 0  # bytes of keys and values
    _families: Counter[str] = field(default_factory=Counter)  # entries by family
    _waiting: dict[str, str] = field(default_factory=dict)  # key -> member that set it, not sent yet
    _open: set[str] = field(default_factory=set)  # families of waiting entries that are not whole
    _waiting_since: float = 0.0
    _packed: list[bytes] | None = None  # all entries; None: not made since the last one

    def begin(self, generation: GenerationName, members: int) -> None:
        """Forget the entries of other generations.

        Args:
            generation: the current one.
            members: of it.
        """
        if generation != self.generation:
            self.generation, self.members, self.size = generation, members, 0
            self.entries, self._packed = {}, None
            self._families, self._waiting, self._open = Counter(), {}, set()

    def put(self, key: str, value: bytes, member: str, now: float) -> bool:
        """Keep an entry.

        Args:
            key: its name.
            value: its bytes.
            member: that has set it.
            now: in unix seconds.

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
        name = family(key)
        if before is None:
            self._families[name] += 1
        if self._families[name] < self.members:
            self._open.add(name)
        else:
            self._open.discard(name)
        if not self._waiting:
            self._waiting_since = now
        self.entries[key] = value
        self.size += grown
        self._waiting[key] = member
        self._packed = None
        return True

    def pause(self, now: float) -> float | None:
        """Return in how many seconds the entries that wait are to be sent; None when none does.

        Args:
            now: in unix seconds.
        """
        if not self._waiting:
            return None
        if not self._open:
            return 0.0
        return max(0.0, self._waiting_since + PAUSE_SECONDS_PER_MEMBER * self.members - now)

    def take(self) -> tuple[list[bytes], str]:
        """Return the entries that wait, packed, and the member that has set them all; "" for several."""
        packed = pack({key: self.entries[key] for key in self._waiting})
        members = set(self._waiting.values())
        self._waiting, self._open = {}, set()
        return packed, members.pop() if len(members) == 1 else ""

    def all_packed(self) -> list[bytes]:
        """Return all entries, packed."""
        if self._packed is None:
            self._packed = pack(self.entries)
        return self._packed


def family(key: str) -> str:
    """Return what the entries of one kind have in common: the key without the rank."""
    return key.rpartition("/")[0]
