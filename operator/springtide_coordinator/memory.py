"""Memory that members' models take: what each has told, and who has least room."""

from __future__ import annotations

from collections.abc import Collection

from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.memory import ModelMemory, need


class Memories:
    """The last word of each member about the memory that its model takes."""

    def __init__(self) -> None:
        self._reported: dict[str, ModelMemory] = {}  # by member id

    def note_report(self, member: str, told: pb.Memory) -> None:
        """Take in a member's word.

        Args:
            member: its id.
            told: the member's word.

        Raises:
            MalformedError: it has no parameters, or numbers beyond all.
        """
        model = codec.memory_from_proto(told)
        if model is None:
            raise codec.MalformedError("Memory.parameter_bytes is not set")
        self._reported[member] = model

    def keep(self, members: Collection[str]) -> None:
        """Forget all but these members; where none of them has told anything, what is known stays."""
        kept = {member: model for member, model in self._reported.items() if member in members}
        self._reported = kept or self._reported

    def tightest(self) -> ModelMemory | None:
        """Return the model of the member that would have least room alone; None where none has told.

        Those whose limit is known come first, and of equal ones the one that came first.
        """
        return min(self._reported.values(), key=_room, default=None)


def _room(model: ModelMemory) -> tuple[bool, int]:
    alone = need(model, 1).total
    return not model.limit, (model.limit - alone if model.limit else -alone)
