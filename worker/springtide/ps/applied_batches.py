"""Batches that are in each chunk's values, where a generation begins.

Copies that lag behind do not count, and chunks that no server holds are made again from what workers pulled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from springtide.ps.connections import Connections, ServerError
from springtide_ps.params.applied import AppliedBatches, BatchNumberError
from springtide_ps.wire.frames import Kind

Rescue = Callable[[list[str], dict[str, int]], dict[str, str]]
"""(chunks that no server holds, bytes by server that stays) -> server by chunk that is there again."""


@dataclass(frozen=True, slots=True)
class NewestPull:
    """Newest values of a chunk that a worker has pulled, with the batches in them.

    torn: newer values may have come in half.
    """

    applied: int
    intervals: list[int]
    torn: bool = False
    skipped: int = 0

    def rank(self) -> tuple[bool, int]:
        """Return a rank: the greater, the better."""
        return (not self.torn, self.applied)


def newest_copies(
    holders: Mapping[str, list[str]], applied_of: Mapping[str, Mapping[str, AppliedBatches]]
) -> dict[str, list[str]]:
    """Return the holders of each chunk that have everything any of them has. PURE.

    A copy gets each update from the chunk's first server before that is answered, so the one with the most
    has all.

    Args:
        holders: Servers by chunk.
        applied_of: Batches that are in each chunk, by server and chunk.
    """
    found = {}
    for key, names in holders.items():
        most = max((applied_of[name][key].applied for name in names), default=0)
        found[key] = [name for name in names if applied_of[name][key].applied == most]
    return found


def rescue(
    pulls: Mapping[int, Mapping[str, Any]], sizes: Mapping[str, int], loads: Mapping[str, int]
) -> dict[str, tuple[int, str]]:
    """Choose from which member, and onto which server, each chunk without a server is made again. PURE.

    Args:
        pulls: Ranks of `NewestPull` by member and chunk.
        sizes: Bytes by chunk.
        loads: Bytes by server.

    Returns:
        By chunk the member whose pull is the newest, and the server that gets it. Chunks of which no member
        has a pull are left out.
    """
    chosen, load = {}, dict(loads)
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        givers = {member: tuple(pull[key]) for member, pull in pulls.items() if key in pull}
        if not givers or not load:
            continue
        server = min(load, key=lambda name: (load[name], name))
        load[server] += sizes[key]
        chosen[key] = (max(givers, key=lambda member: (givers[member], -member)), server)
    return chosen


def ask_applied_batches(
    connections: Connections, server: str, token: tuple[int, int, int]
) -> dict[str, AppliedBatches]:
    """Ask a server which batches are in each of its chunks.

    Args:
        connections: Connections to the servers.
        server: Its id.
        token: The generation's.

    Raises:
        ServerError: It does not tell.
    """
    answer = connections.answer(
        connections.ask(server, Kind.APPLIED_BATCHES, token, {}, any_size=True), server, "its books"
    )
    payload = b"{}" if answer.payload is None else answer.payload.numpy().tobytes()
    try:
        return {
            key: AppliedBatches.from_json(applied_batches)
            for key, applied_batches in json.loads(payload).items()
        }
    except (BatchNumberError, ValueError, AttributeError) as error:
        raise ServerError(f"the books of parameter server {connections[server].address}: {error}") from None


def with_newest(
    holders: Mapping[str, list[str]], connections: Connections, token: tuple[int, int, int]
) -> dict[str, list[str]]:
    """Return by chunk the servers that hold everything any of them has.

    Args:
        holders: Servers by chunk.
        connections: Connections to them.
        token: The generation's.

    Returns:
        The servers that `newest_copies` chooses.

    Raises:
        ServerError: A server does not tell.
    """
    servers = {server for names in holders.values() for server in names}
    return newest_copies(
        holders, {server: ask_applied_batches(connections, server, token) for server in sorted(servers)}
    )


def applied_batches_of(
    connections: Connections, token: tuple[int, int, int], homes: Mapping[str, str]
) -> dict[str, AppliedBatches]:
    """Ask all servers which batches are in the chunks.

    Args:
        connections: Connections to the servers.
        token: The generation's.
        homes: Server by chunk.

    Returns:
        Batches by chunk.

    Raises:
        ServerError: A server does not tell, or does not hold its chunk.
    """
    applied_of = {
        server: ask_applied_batches(connections, server, token) for server in sorted(set(homes.values()))
    }
    try:
        return {key: applied_of[server][key] for key, server in homes.items()}
    except KeyError as error:
        raise ServerError(f"chunk {error} is not where it should be") from None
