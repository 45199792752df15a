"""Move the state from members that hold it to those that lack it, while a generation forms.

Only the script's thread comes here, except that any thread may look at `progress`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from springtide import faults
from springtide.comm import codec
from springtide.comm.process_group import Group
from springtide.comm.state_transfer import (
    Destination,
    Landing,
    Reception,
    Roles,
    receive_state,
    roles,
    send_state,
)
from springtide.comm.store import StreamStore
from springtide.comm.transfer_progress import Progress, in_words
from springtide.coordination.metrics import Metrics
from springtide.coordination.park_reply import Start
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import SpringtideError
from springtide.train_step.state import TensorPlace

log = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30
_STATE_PER_MODEL = 16
"""A state that is more than this many times the model plus 1 GiB is taken for a broken header."""
_DISCONNECT_SECONDS = 5.0
_SPREAD = ("parameters", "optimizer.state")
"""Parts of the tree that are bit for bit the same at all holders, so that any may send them. Buffers may be
each worker's own, and tracked objects keep what they like: these come whole from the first holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSides:
    """Say what is sent from here, or how it is taken in.

    read: returns this member's own tree.
    prepare: looks whether an outline of a tree fits this process; returns where its tensors go, and the step
        that the state is of.
    has_state: this process holds a committed state, if an older one.
    forget: notes that it does not hold it any more.
    """

    has_state: bool
    forget: Callable[[], None]
    read: Callable[[], Any]
    prepare: Callable[[Any], tuple[dict[int, TensorPlace], int]]


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """Say who of a group sends the state to whom.

    names: of the group's members, by rank. lacking: ranks of those that lack it. store: of the generation,
    for entries of this group alone. fresh: the state is the initial one of the first member.
    """

    names: tuple[str, ...]
    lacking: tuple[int, ...]
    store: StreamStore
    fresh: bool


def transfer_order(start: Start) -> TransferOrder:
    """Return what Start says of all members of its generation."""
    members = list(start.message.members)
    ids = [member.id for member in members]
    assert isinstance(start.store, StreamStore)
    return TransferOrder(
        tuple(member.pod_name or member.id for member in members),
        tuple(ids.index(transfer.receiver) for transfer in start.message.transfers),
        start.store,
        start.message.fresh,
    )


def order_in_row(whole: TransferOrder, row: Sequence[int], prefix: str) -> TransferOrder:
    """Return the part of a transfer that some members make among themselves.

    Args:
        whole: of all members of the generation.
        row: their ranks in the generation, in the order of their ranks among themselves.
        prefix: for their entries in the store.

    Raises:
        RuntimeError: none of them holds the state.
    """
    lacking = tuple(index for index, rank in enumerate(row) if rank in whole.lacking)
    if whole.fresh:
        lacking = tuple(range(1, len(row)))
    if len(lacking) == len(row):
        names = ", ".join(whole.names[rank] for rank in row)
        raise RuntimeError(f"none of {names} holds this local rank's part of the state")
    return TransferOrder(
        tuple(whole.names[rank] for rank in row), lacking, whole.store.with_prefix(prefix), whole.fresh
    )


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
        self._landing: Landing | None = None
        self._torn = False

    @property
    def torn(self) -> bool:
        """Whether the live state is a mixture: a transfer into it has begun and never ended."""
        return self._torn

    def overwritten(self) -> None:
        """Note that the live state is about to become a mixture. Any thread."""
        self._torn = True

    def installed(self) -> None:
        """Note that the live state is whole again."""
        self._torn, self._landing = False, None

    def detach(self, group: Group) -> None:
        """Make sure that a group which was shut, and could not be freed, writes nothing into this process.

        Raise SpringtideError when it may, and something has been received into memory that is in use.
        """
        if self._landing is not None and not group.is_disconnected(_DISCONNECT_SECONDS):
            raise SpringtideError(
                f"the connections of the last generation are still open {_DISCONNECT_SECONDS:g} s after they "
                "were shut, and what comes from them would be written into the model: this worker ends; "
                "the others go on"
            )

    def announce(self, order: TransferOrder, rank: int, read: Callable[[], Any]) -> None:
        """Tell the others how this member's state is made, before the group is formed: they then wait for
        nothing when the state is sent. `run` does it where there was no announcement.

        Args:
            order: who sends the state to whom.
            rank: of this member.
            read: returns this member's own tree.
        """
        who = roles(order.lacking, len(order.names))
        if who.receivers and rank in who.senders and len(who.senders) > 1 and not order.fresh:
            order.store.set(f"tree/{rank}", _form(codec.flatten_in_place(read())))

    def run(
        self, order: TransferOrder, group: Group, sides: TransferSides
    ) -> tuple[int, dict[str, Any] | None]:
        """Take part in the transfer of a generation.

        Args:
            order: who sends the state to whom.
            group: of those.
            sides: of this process.

        Returns:
            The bytes moved here, and the tree if this member lacked it. Tell `installed` when it is written.

        Raises:
            RuntimeError: the group failed.
            ValueError: what came is no state.
            SpringtideError: the state does not fit this process.
        """
        who = roles(order.lacking, len(order.names))
        if group.rank not in who.receivers:
            self._landing = None
        if not who.receivers or group.rank not in (*who.senders, *who.receivers):
            return 0, None
        sends = group.rank in who.senders
        flat = codec.flatten_in_place(sides.read()) if sends else None
        who = self._alike(order, group, who, flat)
        if sends and group.rank not in who.senders:
            return 0, None
        others = who.receivers if sends else who.senders
        peer = order.names[others[0]]
        if len(others) > 1:
            peer += f" and {len(others) - 1} more"
        progress = self.progress = Progress(peer, sends=sends)
        self._metrics.transfer.transfers.inc()
        try:
            if flat is not None:
                tree = None
                moved = send_state(group, who, flat, _is_spread, progress, self._on_piece(progress))
            else:
                reception = self._reception(order, who, sides)
                tree, moved = receive_state(group, who, reception, progress, self._on_piece(progress))
            if progress.done == progress.reused:  # no piece has come to this point
                faults.reach("transfer", self._state.position.cursor.step + 1)
        finally:
            self.progress = None
        if tree is not None and progress.reused:
            self._metrics.transfer.kept_bytes.inc(progress.reused)
            log.info("of the state, %s were here", in_words(progress.reused))
        return moved, tree

    def _alike(self, order: TransferOrder, group: Group, who: Roles, flat: codec.Flattened | None) -> Roles:
        """Leave out senders whose tree is made otherwise than the first one's.

        Equal names mean equal state, but not that every process keeps it in the same order, or that what is
        one tensor here is one there.
        """
        if len(who.senders) == 1:
            return who
        own = f"tree/{group.rank}"
        if flat is not None and not order.store.check([own]):
            order.store.set(own, _form(flat))
        forms = {rank: order.store.get(f"tree/{rank}") for rank in who.senders}
        first = forms[who.senders[0]]
        return Roles(tuple(rank for rank in who.senders if forms[rank] == first), who.receivers)

    def _reception(self, order: TransferOrder, who: Roles, sides: TransferSides) -> Reception:
        if self._landing is None:
            self._landing = Landing()
        holders = len(order.names) - len(who.receivers)

        def prepare(outline: Any) -> Destination:
            places, step = sides.prepare(outline)
            # If the only holder is lost meanwhile, a survivor's older state is the newest that there is. And
            # a mixture of the initial states of two processes is none that training could begin from.
            last_of_its_kind = holders == 1 and sides.has_state
            initial = order.fresh and step == 0
            return Destination(places, in_place=not (last_of_its_kind or initial))

        def overwrite() -> None:
            self._torn = True
            sides.forget()

        size = self._trainers.require("batches()").state.size_bytes()
        return Reception(prepare, _STATE_PER_MODEL * size + _SPARE_BYTES, overwrite, self._landing)

    def _on_piece(self, progress: Progress) -> Callable[[int, int, int], None]:
        step = self._state.position.cursor.step + 1

        def on_piece(order: int, count: int, size: int) -> None:
            faults.reach("transfer", step)
            if order == count // 2:
                faults.reach("sending" if progress.sends else "receiving", step)
            self._metrics.transfer.sent_bytes.inc(size)

        return on_piece


def copied(tree: Any) -> Any:
    """Return a state's tree with tensors in memory of their own, on the host."""
    header, tensors = codec.flatten(tree)
    return codec.unflatten(header, [tensor.clone() for tensor in tensors])


def _is_spread(path: str) -> bool:
    return path.startswith(_SPREAD)


def _form(flat: codec.Flattened) -> bytes:
    """Return a hash of where the tensors stand in a tree, and of their types and shapes."""
    described = [
        (path, str(tensor.dtype), list(tensor.shape))
        for path, tensor in zip(flat.paths, flat.tensors, strict=True)
    ]
    return hashlib.blake2b(json.dumps(described).encode(), digest_size=16).hexdigest().encode()
