"""A job with parameter servers in a coordinator's room, and what tests say for all of its members."""

from __future__ import annotations

from typing import Any

from coordinator_room import Room

from springtide_coordinator.membership import messages as say


def trains(servers: int = 2, workers: int = 2, **options: object) -> Room:
    """A job whose first generation trains at step 0, with its servers listed by the operator."""
    room = Room(servers=servers, target=workers, **options)  # type: ignore[arg-type]
    room.serve(*(f"s{slot}" for slot in range(servers)))
    room.train(*(f"w{slot}" for slot in range(workers)))
    everybody(room)
    return room


def everybody(room: Room, *servers: str, **more: object) -> None:
    """The operator's word: the members live, and these servers (by default those of the generation)."""
    room.sync(*room.members, serving=servers or room.servers, **more)  # type: ignore[arg-type]


def dropped(room: Room, *members: str, at: object = None, reached: tuple[str, ...] = ()) -> None:
    for member in members or room.members:
        stands_at: Any = at or room.m.members[member].state
        room.park(member, say.ParkReason.DROPPED, at=stands_at, reached=reached)
