"""Names of generations and of committed states, ordered, and their form on the wire."""

from __future__ import annotations

from typing import NamedTuple

from springtide_coordinator import coordinator_pb2 as pb


class Generation(NamedTuple):
    """(incarnation's number, incarnation's restart, generation's number); greater is newer."""

    incarnation: int
    restart: int
    number: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.restart}/{self.number}"

    def to_proto(self) -> pb.GenerationName:
        return pb.GenerationName(
            incarnation=pb.Incarnation(number=self.incarnation, restart=self.restart), number=self.number
        )

    @classmethod
    def from_proto(cls, message: pb.GenerationName) -> Generation:
        return cls(message.incarnation.number, message.incarnation.restart, message.number)


class StateName(NamedTuple):
    """Of a committed state: the generation of its last commit, and the commits since the job began."""

    generation: Generation
    step: int

    def __str__(self) -> str:
        return f"{self.generation}@{self.step}"

    def to_proto(self) -> pb.StateName:
        return pb.StateName(generation=self.generation.to_proto(), step=self.step)

    @classmethod
    def from_proto(cls, message: pb.StateName) -> StateName:
        return cls(Generation.from_proto(message.generation), message.step)


ALONE = Generation(0, 0, 0)
"""The generation of a script that trains without a job."""


def label_of(member: pb.Member) -> str:
    """The name that people know a process by."""
    name = member.pod_name or member.id
    return f"{name}/{member.local_rank}" if member.local_rank else name
