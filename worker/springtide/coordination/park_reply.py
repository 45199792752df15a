"""Name what ends the wait of a process that is parked, by the coordinator's word."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.checkpoint.shares import Share
from springtide.comm.store_entries import Entries
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import GenerationName, StateName


@dataclass(frozen=True, slots=True)
class Start:
    """Start a generation with this process: the message that was accepted, and where its group meets."""

    message: pb.Start
    generation: GenerationName
    store: Entries


@dataclass(frozen=True, slots=True)
class Save:
    """Write this process's share of a checkpoint of the state that it holds."""

    state: StateName
    share: Share


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave the job. finished: the job has, without this process."""

    reason: str
    finished: bool = False


@dataclass(frozen=True, slots=True)
class MoveOn:
    """Go through the loop in which this process waits: the job is in a later one, `running_loop`. Its wish to
    be admitted stands."""

    running_loop: int


ParkReply = Start | Save | Leave | MoveOn
