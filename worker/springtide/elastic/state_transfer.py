"""Move the state from members that hold it to those that lack it, while a generation forms.

Only the script's thread comes here, except that any thread may look at `progress`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from springtide import faults
from springtide.comm.process_group import Group
from springtide.comm.state_pieces import Incoming
from springtide.comm.state_transfer import Route, receive_state, route, send_state
from springtide.comm.transfer_progress import Progress, in_words
from springtide.coordination.metrics import Metrics
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import required_state
from springtide_protocol.names import StateName

log = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30
_STATE_PER_MODEL = 16
"""A state that is more than this many times the model plus 1 GiB is taken for a broken header."""


class StateTransfer:
    """Send or receive the state; what has come is kept when its sender is lost in the middle."""

    def __init__(self, state: TrainingState, trainers: TrainerAccess, metrics: Metrics) -> None:
        """Make it for one process.

        Args:
            state: of the process.
            trainers: where its trainer is found.
            metrics: in which transfers are counted.
        """
        self._state, self._trainers, self._metrics = state, trainers, metrics
        self.progress: Progress | None = None
        self._here: tuple[StateName | None, Incoming] | None = None

    def detach(self) -> None:
        """Move what has come to memory that the last group, which could not be freed, cannot reach."""
        if self._here is not None:
            self._here[1].move()

    def run(
        self, start: pb.Start, group: Group, transfers: Sequence[tuple[int, int]], read: Callable[[], Any]
    ) -> tuple[int, dict[str, Any] | None]:
        """Take part in the transfers of a generation.

        Args:
            start: of the generation.
            group: of the generation.
            transfers: (receiver, holder) ranks.
            read: returns this member's own tree.

        Returns:
            The bytes moved here, and the tree if this member lacked it.

        Raises:
            RuntimeError: the group failed.
            ValueError: what came is no state.
        """
        where = route(transfers, group.rank)
        if where is None or where.upstream is None:
            self._here = None
        if where is None:
            return 0, None
        other = where.downstream if where.upstream is None else where.upstream
        assert other is not None
        peer = start.members[other].pod_name or start.members[other].id
        self.progress = Progress(peer, sends=where.upstream is None)
        try:
            moved, tree = self._move(start, group, where, read, self.progress)
        finally:
            self.progress = None
        self._here = None
        return moved, tree

    def _move(
        self, start: pb.Start, group: Group, where: Route, read: Callable[[], Any], progress: Progress
    ) -> tuple[int, dict[str, Any] | None]:
        step = self._state.position.cursor.step + 1
        self._metrics.transfers.inc()

        def on_piece(order: int, count: int, size: int) -> None:
            faults.reach("transfer", step)
            if order == count // 2:
                faults.reach("sending" if progress.sends else "receiving", step)
            self._metrics.transfer_bytes.inc(size)

        if where.upstream is None:
            assert where.downstream is not None
            return send_state(group, where.downstream, read(), progress, on_piece), None
        # Initial states are as good as equal: the checksums tell which pieces are.
        name = None if start.fresh else required_state(start.state, "Start.state")
        if self._here is None or self._here[0] != name:
            self._here = name, Incoming()
        limit = _STATE_PER_MODEL * self._trainers.require("batches()").state.size_bytes() + _SPARE_BYTES
        tree, moved = receive_state(group, where, limit, self._here[1], progress, on_piece)
        if progress.kept:
            self._metrics.transfer_kept_bytes.inc(progress.kept)
            log.info("of the state, %s were here from a transfer before", in_words(progress.kept))
        return moved, tree
