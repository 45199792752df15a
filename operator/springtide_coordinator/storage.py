"""What the coordinator tells of checkpoints, which members write: the newest, what was restored, failures."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from . import coordinator_pb2 as pb
from . import wire

log = logging.getLogger("springtide.coordinator")

SHOWN_CHARACTERS = 900


@dataclass(slots=True)
class Storage:
    """newest: the checkpoint that is whole. errors: by member, since that one was completed.

    The sums are those of this process.
    """

    newest: pb.Checkpoint | None = None
    restored: pb.Restored | None = None
    errors: dict[str, str] = field(default_factory=dict)
    completed: int = 0
    failures: int = 0
    written_bytes: int = 0
    seconds: float = 0.0
    stall_seconds: float = 0.0

    def heard(self, member: str, told: pb.Checkpoint) -> None:
        """A member completed a checkpoint, or failed; one that is told again counts once."""
        state = wire.to_state(told.state)
        if state is None:
            return
        if told.error:
            if self.errors.get(member) != told.error:
                log.warning("checkpoint %s: %s", told.name, told.error)
            self.errors[member] = told.error
            self.failures += 1
            return
        known = wire.to_state(self.newest.state) if self.newest is not None else None
        if known is not None and state <= known:
            return
        self.newest = told
        self.errors.clear()
        self.completed += 1
        self.written_bytes += told.bytes
        self.seconds += _seconds(told.seconds)
        self.stall_seconds += _seconds(told.stall_seconds)

    def formed(self, told: pb.Formed) -> None:
        """A member began a generation, perhaps with what it restored."""
        if not told.HasField("restored"):
            return
        self.restored = told.restored
        if told.restored.name:
            log.info("went on from checkpoint %s/%s", told.restored.uri, told.restored.name)
        for text in told.restored.skipped:
            log.warning("checkpoint %s", text)

    @property
    def error(self) -> str:
        """Why checkpoints fail; "" when the last one did not."""
        return "; ".join(dict.fromkeys(self.errors.values()))[:SHOWN_CHARACTERS]

    def age(self, now: float) -> float:
        """Seconds since the newest one was completed; 0 without one."""
        return max(0.0, now - self.newest.written_unix) if self.newest is not None else 0.0


def _seconds(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0
