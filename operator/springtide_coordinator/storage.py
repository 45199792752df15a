"""Reports about checkpoints, which members write: the newest, the restored one, and failures."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb

log = logging.getLogger("springtide.coordinator")

SHOWN_CHARACTERS = 900


@dataclass(slots=True)
class Storage:
    """newest: the checkpoint that is whole. errors: by member, since that one was completed.

    interval: seconds wanted between two, 0: none are made. began: unix seconds of the first generation that
    was formed. The counts are those of this process.
    """

    interval: float = 0.0
    began: float = 0.0
    newest: pb.Checkpoint | None = None
    restored: pb.Restored | None = None
    errors: dict[str, str] = field(default_factory=dict)
    completed: int = 0
    failures: int = 0

    def note_report(self, member: str, reported: pb.Checkpoint) -> None:
        """Take in that a member completed a checkpoint, or failed; one that is told again counts once.

        Args:
            member: its id.
            reported: with the state's name, and the error if there was one.
        """
        state = codec.state_from_proto(reported.state)
        if state is None:
            return
        if reported.error:
            # Without the checkpoint's own name, so that the text stays the same as long as the cause does.
            error = reported.error.replace(f"/{reported.name}", "")
            if self.errors.get(member) != error:
                log.warning("checkpoint %s: %s", reported.name, reported.error)
            self.errors[member] = error
            self.failures += 1
            return
        known = codec.state_from_proto(self.newest.state) if self.newest is not None else None
        if known is not None and state <= known:
            return
        self.newest = reported
        self.errors.clear()
        self.completed += 1

    def formed(self, reported: pb.Formed, now: float) -> None:
        """Take in that a member began a generation, perhaps with what it restored.

        Args:
            reported: the member's word.
            now: in unix seconds.
        """
        self.began = self.began or now
        if not reported.HasField("restored"):
            return
        self.restored = reported.restored
        if reported.restored.name:
            log.info("went on from checkpoint %s/%s", reported.restored.uri, reported.restored.name)
        for text in reported.restored.skipped:
            log.warning("checkpoint %s", text)

    @property
    def error(self) -> str:
        """Why checkpoints fail; "" when the last one did not."""
        return "; ".join(dict.fromkeys(self.errors.values()))[:SHOWN_CHARACTERS]

    def age(self, now: float) -> float:
        """Seconds since the newest one was completed, or since training began; 0 where none are made."""
        since = self.newest.written_unix if self.newest is not None else self.began
        return max(0.0, now - since) if self.interval and since else 0.0
