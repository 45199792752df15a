"""What the coordinator remembers of one parameter server's process."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from springtide_coordinator.membership.messages import ServerInfo


@dataclass(slots=True)
class ServerRecord:
    """Times are unix seconds."""

    info: ServerInfo
    order: int  # of arrival: the youngest has the greatest
    session: int | None = None
    disconnected_at: float | None = None
    leaving: str = ""  # why it is to go; "" while it stays
    replaced: bool = False  # another process has its place
    dismissed: bool = False  # ServerLeave was said
    sent: set[Hashable] = field(default_factory=set)  # what was said once on this stream

    @property
    def connected(self) -> bool:
        return self.session is not None

    @property
    def usable(self) -> bool:
        """Whether a generation may be made with it."""
        return self.connected and not self.replaced and not self.dismissed

    @property
    def newness(self) -> tuple[bool, int, int]:
        """The greatest of a slot is taken: one that stays before one that leaves, then the newest."""
        return (not self.leaving, self.info.attempt, self.order)
