"""Find the protocol version and the capabilities that processes of two releases have in common. PURE.

`PROTOCOL_VERSION` is raised with a minor release in which a message has another meaning than before; a
release understands the version before it, too. An addition has a capability instead of a version, be it a
kind of message, or a field without which its message would be wrong. It is used towards a peer that has told
that capability, and left out towards others. A field that may be missed needs neither.

A process that tells no range speaks the one version that its Hello names, without capabilities: version 1, of
the time before ranges. Such a process refuses kinds of messages that it does not know, others ignore them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

PROTOCOL_VERSION: Final = 2
"""The newest version that this release speaks: kinds of messages that are not known are ignored."""
OLDEST_PROTOCOL_VERSION: Final = 1
"""Hello's `protocol_version`, too: a process of version 1 lets no other number in."""
STORE_ENTRIES: Final = "store-entries"
MEMORY: Final = "memory"
HEARTBEAT: Final = "heartbeat"
FOLLOW: Final = "follow"
RUNNING_LOOP: Final = "running-loop"
STANDBY: Final = "standby"
"""A coordinator that has it lets no more than `SyncRequest.target` processes train while some stand by."""
PEERS: Final = "peers-3"
"""The way in which workers exchange sums, votes, entries and the state with each other.

Its number is raised with each change of that, and all workers of a job have the same one.
"""
_PEERS: Final = "peers-"
CAPABILITY_OF: Final[Mapping[str, str]] = {
    "store_entries": STORE_ENTRIES,
    "memory": MEMORY,
    "heartbeat": HEARTBEAT,
    "follow": FOLLOW,
    "feed": FOLLOW,
    "feeding": FOLLOW,
    "running_loop": RUNNING_LOOP,
}
"""Kinds of messages (their names in a `oneof`) that version 1 does not have, and the capability of each."""


@dataclass(frozen=True, slots=True)
class Speaks:
    """The versions that a process speaks, from the oldest to the newest, and its capabilities."""

    oldest: int
    newest: int
    capabilities: frozenset[str] = frozenset()

    def __str__(self) -> str:
        if self.oldest == self.newest:
            return f"protocol version {self.newest}"
        return f"protocol versions {self.oldest} to {self.newest}"

    @property
    def peers(self) -> str:
        """Return what a worker exchanges with others, as PEERS; "" where its release does not tell."""
        return min((name for name in self.capabilities if name.startswith(_PEERS)), default="")


OWN: Final = Speaks(
    OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, frozenset({*CAPABILITY_OF.values(), STANDBY, PEERS})
)


@dataclass(frozen=True, slots=True)
class Party:
    """One of two that meet: its name in a sentence, what to upgrade if it is too old, and what it speaks."""

    name: str
    image: str
    speaks: Speaks


class IncompatibleError(ValueError):
    """Two processes have no version in common; the text says which side to upgrade."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """The version that two processes speak with each other, and the capabilities that both have."""

    version: int
    capabilities: frozenset[str] = frozenset()


def agree(one: Party, other: Party) -> Agreement | str:
    """Find the newest version that both speak.

    Args:
        one: of the two.
        other: of the two.

    Returns:
        The agreement; or one sentence that says why there is none, and which side to upgrade.
    """
    version = min(one.speaks.newest, other.speaks.newest)
    if version >= max(one.speaks.oldest, other.speaks.oldest) and version > 0:
        return Agreement(version, one.speaks.capabilities & other.speaks.capabilities)
    older = one if one.speaks.newest < other.speaks.newest else other
    return f"{one.name} speaks {one.speaks}, {other.name} {other.speaks}: upgrade {older.image}"


def agreed(one: Party, other: Party) -> Agreement:
    """Return what `agree` finds.

    Args:
        one: of the two.
        other: of the two.

    Raises:
        IncompatibleError: they have no version in common.
    """
    found = agree(one, other)
    if isinstance(found, str):
        raise IncompatibleError(found)
    return found


def as_worker(speaks: Speaks) -> Party:
    """Return a worker's process as one of two that meet."""
    return Party("the worker", "springtide in the workers' image", speaks)


def as_server(speaks: Speaks) -> Party:
    """Return a parameter server's process as one of two that meet."""
    return Party("the parameter server", "springtide in the parameter servers' image", speaks)


def as_coordinator(speaks: Speaks) -> Party:
    """Return a job's coordinator as one of two that meet."""
    return Party("the coordinator", "the coordinator (the operator, or spec.coordinator.image)", speaks)


def as_operator(speaks: Speaks) -> Party:
    """Return the operator as one of two that meet."""
    return Party("the operator", "the operator", speaks)


def may_send(
    kind: str | None, capabilities: Collection[str], needs: Mapping[str, str] = CAPABILITY_OF
) -> bool:
    """Return whether a peer understands a kind of message.

    Args:
        kind: name of the field in the `oneof`.
        capabilities: that both have.
        needs: capabilities by kind.
    """
    need = needs.get(kind or "")
    return need is None or need in capabilities
