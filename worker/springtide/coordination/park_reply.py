"""What a parked process is told."""

from __future__ import annotations

from dataclasses import dataclass

from springtide.checkpoint.shares import Share
from springtide.exchange.entries import Entries
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import GenerationName, StateName


@dataclass(frozen=True, slots=True)
class Begin:
    """A Start that was accepted, with the store through which its group is formed."""

    message: pb.Start
    generation: GenerationName
    store: Entries


@dataclass(frozen=True, slots=True)
class SaveAsked:
    """This parked process is to write its share of a checkpoint of the state that it holds."""

    state: StateName
    share: Share


@dataclass(frozen=True, slots=True)
class Depart:
    """The coordinator lets this parked process go. finished: the job has, without it."""

    reason: str
    finished: bool = False
