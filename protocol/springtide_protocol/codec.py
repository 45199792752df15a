"""Conversion of names between their protobuf messages and their values."""

from __future__ import annotations

from typing import overload

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.limits import MAX_CAPABILITIES, MAX_CAPABILITY_CHARACTERS, MAX_COUNT
from springtide_protocol.memory import CONTAINER, DEVICE, SHARDS, ModelMemory
from springtide_protocol.names import GenerationName, Incarnation, StateName
from springtide_protocol.versions import Speaks


class MalformedError(ValueError):
    """A message lacks something it must have, or counts beyond every limit; the text says what."""


def check_count(value: int, most: int, what: str) -> int:
    """Return the value if it is within its limit.

    Args:
        value: of a message.
        most: the limit.
        what: its name, with which the error begins.

    Raises:
        MalformedError: it is above `most`.
    """
    if value > most:
        raise MalformedError(f"{what} is {value}, and {most} is the limit")
    return value


def incarnation_to_proto(name: Incarnation) -> pb.Incarnation:
    return pb.Incarnation(number=name.number, restart=name.restart)


def incarnation_from_proto(name: pb.Incarnation) -> Incarnation:
    """Return the value of the message.

    Raises:
        MalformedError: a number beyond all; a process that made one up would fence every later coordinator.
    """
    check_count(max(name.number, name.restart), MAX_COUNT, "an incarnation's number")
    return Incarnation(name.number, name.restart)


def generation_to_proto(name: GenerationName) -> pb.GenerationName:
    return pb.GenerationName(incarnation=incarnation_to_proto(name.incarnation), number=name.number)


def generation_from_proto(name: pb.GenerationName) -> GenerationName | None:
    """Return the value of the message, None when it is unset: generation numbers begin at 1.

    Raises:
        MalformedError: a number beyond all.
    """
    check_count(name.number, MAX_COUNT, "a generation's number")
    return GenerationName(incarnation_from_proto(name.incarnation), name.number) if name.number else None


def required_generation(name: pb.GenerationName, what: str) -> GenerationName:
    """Return the generation name of a message.

    Args:
        name: the field.
        what: its name, for the error.

    Raises:
        MalformedError: it is unset, or has a number beyond all.
    """
    if (found := generation_from_proto(name)) is None:
        raise MalformedError(f"{what} is not set")
    return found


@overload
def state_to_proto(name: StateName) -> pb.StateName: ...


@overload
def state_to_proto(name: None) -> None: ...


@overload
def state_to_proto(name: StateName | None) -> pb.StateName | None: ...


def state_to_proto(name: StateName | None) -> pb.StateName | None:
    """Return the message of a name; None, which leaves a field unset, of None."""
    if name is None:
        return None
    return pb.StateName(generation=generation_to_proto(name.generation), step=name.step)


def state_from_proto(name: pb.StateName) -> StateName | None:
    """Return the value of the message, None when it is unset.

    Raises:
        MalformedError: a number beyond all.
    """
    generation = generation_from_proto(name.generation)
    check_count(name.step, MAX_COUNT, "a step")
    return StateName(generation, name.step) if generation is not None else None


def required_state(name: pb.StateName, what: str) -> StateName:
    """Return the state name of a message.

    Args:
        name: the field.
        what: its name, for the error.

    Raises:
        MalformedError: it is unset, or has a number beyond all.
    """
    if (found := state_from_proto(name)) is None:
        raise MalformedError(f"{what} is not set")
    return found


def speaks_to_proto(speaks: Speaks) -> pb.Speaks:
    """Return what a process tells of the versions that it speaks."""
    return pb.Speaks(
        oldest_version=speaks.oldest, newest_version=speaks.newest, capabilities=sorted(speaks.capabilities)
    )


def speaks_from_proto(told: pb.Speaks, version: int) -> Speaks:
    """Return the versions that a process speaks; what is beyond all limits is left out.

    Args:
        told: unset by a process of the time before there was this.
        version: the one that such a process speaks.
    """
    if not told.newest_version:
        return Speaks(version, version)
    capabilities = [name for name in told.capabilities if len(name) <= MAX_CAPABILITY_CHARACTERS]
    return Speaks(told.oldest_version, told.newest_version, frozenset(capabilities[:MAX_CAPABILITIES]))


def memory_to_proto(model: ModelMemory) -> pb.Memory:
    """Return what a process tells of the memory that its model takes."""
    return pb.Memory(
        parameter_bytes=model.parameters,
        gradient_bytes=model.gradients,
        bucket_bytes=model.bucket,
        state_bytes=model.state,
        shard=model.shard,
        limit_bytes=model.limit,
        limited_by=model.limited_by,
    )


def memory_from_proto(told: pb.Memory) -> ModelMemory | None:
    """Return what a process has told of its model's memory, None when the message is unset.

    A way to share out that only a later release knows counts as none.

    Raises:
        MalformedError: a number beyond all.
    """
    if not told.parameter_bytes:
        return None
    found = (told.parameter_bytes, told.gradient_bytes, told.bucket_bytes, told.state_bytes)
    check_count(max(*found, told.limit_bytes), MAX_COUNT, "a number of bytes of Memory")
    return ModelMemory(
        *found,
        shard=told.shard if told.shard in SHARDS else SHARDS[0],
        limit=told.limit_bytes,
        limited_by=DEVICE if told.limited_by == DEVICE else CONTAINER,
    )
