"""Say what a process waits for when that takes a while: gradients of others, or the state as it moves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from springtide.comm.transfer_progress import Progress
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import generation_to_proto
from springtide_protocol.names import GenerationName

log = logging.getLogger(__name__)

_REDUCTION_LOG_SECONDS = 10.0
_TRANSFER_REPORT_SECONDS = 1.0
_TRANSFER_LOG_SECONDS = 5.0


class Transfers(Protocol):
    """Show the transfer of the state that this process takes part in."""

    progress: Progress | None


class ReductionWarnings:
    """Name the members a step waits for, every ten seconds. One thread uses it."""

    def __init__(self, waiting_since: Callable[[], float | None], others: Callable[[], list[str]]) -> None:
        """Make it for one process.

        Args:
            waiting_since: monotonic time since when a reduction is being waited for; None without one.
            others: names of the other members.
        """
        self._waiting_since, self._others = waiting_since, others
        self._logged = 0.0

    def look(self, now: float) -> None:
        """Warn if the wait has lasted long enough at this monotonic time."""
        since = self._waiting_since()
        if since is None:
            return
        if now - max(since, self._logged) >= _REDUCTION_LOG_SECONDS:
            self._logged = now
            names = ", ".join(self._others())
            log.warning(
                "a step has waited %.0f s for the gradients of the other members: %s", now - since, names
            )


class TransferReports:
    """Report how far a transfer of the state has come: to the coordinator, and every five seconds in the log.

    One thread uses it.
    """

    def __init__(
        self,
        transfers: Transfers,
        generation: Callable[[], GenerationName | None],
        send: Callable[[pb.WorkerMessage], None],
    ) -> None:
        """Make it for one process.

        Args:
            transfers: shows the running transfer.
            generation: returns the present generation; None before the first one.
            send: queues a message to the coordinator.
        """
        self._transfers, self._generation, self._send = transfers, generation, send
        self._reported = self._logged = 0.0

    def look(self, now: float, connected: bool) -> None:
        """Report if the transfer has lasted long enough.

        Args:
            now: monotonic time.
            connected: the coordinator can be told.
        """
        progress = self._transfers.progress
        if progress is None or now - max(progress.began, self._reported) < _TRANSFER_REPORT_SECONDS:
            return
        self._reported = now
        if now - max(progress.began, self._logged) >= _TRANSFER_LOG_SECONDS:
            self._logged = now
            log.info("%s", progress.text(now))
        generation = self._generation()
        if not progress.sends and generation is not None and connected:
            report = pb.Transferring(
                generation=generation_to_proto(generation),
                holder=progress.peer,
                bytes_done=progress.done,
                bytes_total=progress.total,
            )
            self._send(pb.WorkerMessage(transferring=report))
