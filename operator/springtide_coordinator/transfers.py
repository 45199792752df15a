"""How far the state has come that members of a forming generation receive, in words for status."""

from __future__ import annotations

from springtide_coordinator.membership import Membership
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import GenerationName

_SHOWN = 3
_NAME_LIMIT = 253  # characters
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Transfers:
    """Last reports of receivers of a state, in the newest generation alone."""

    def __init__(self) -> None:
        self._generation: GenerationName | None = None
        self._reports: dict[str, pb.Transferring] = {}  # by member id

    def note_report(self, member: str, message: pb.Transferring, m: Membership) -> None:
        """Take in how much of the state a member has received.

        Args:
            member: its id.
            message: the member's word; one about another generation than the newest is left out.
            m: facts of the membership.

        Raises:
            MalformedError: it names no generation.
        """
        generation = codec.generation_from_proto(message.generation)
        if generation is None:
            raise codec.MalformedError("Transferring.generation is not set")
        current = m.current
        if current is None or generation != current.name or member not in current.ids:
            return
        if generation != self._generation:
            self._generation, self._reports = generation, {}
        self._reports[member] = message

    def text(self, m: Membership) -> str:
        """Describe how far the members' transfers are that have not formed yet, in rank order; "" without
        one.
        """
        current = m.current
        if current is None or current.name != self._generation:
            return ""
        said = [
            _line(info.label, self._reports[info.id])
            for info in current.members
            if info.id in self._reports and info.id not in current.formed
        ]
        more = f", and {len(said) - _SHOWN} more receive it" if len(said) > _SHOWN else ""
        return ", ".join(said[:_SHOWN]) + more


def _line(receiver: str, message: pb.Transferring) -> str:
    holder = message.holder[:_NAME_LIMIT]
    if not message.bytes_total:
        return f"{receiver} waits for the state from {holder}"
    percent = min(100, 100 * message.bytes_done // message.bytes_total)
    return f"{receiver} has {percent} % of {_size(message.bytes_total)} of state from {holder}"


def _size(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
