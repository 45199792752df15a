"""Copies of shards on their way to other servers, and from them.

A large slice of a table goes in parts, so that neither side needs memory for all of it at once, and steps are
made in between. Its parts are of the moment at which the copy began (`snapshot_reader`). Updates from then on
follow on the same connection; where the slice is to be, they wait until it is whole: sums of steps beside the
chunk that does not exist yet, batches in `Incoming`. So a copy makes the updates in the order of the first
server.

One copy is sent at a time. The answers of the other server come on any thread, which takes the store's lock
for them; all other methods are called in that lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from springtide_ps.params.embedding_shard import Slice
from springtide_ps.server.shard import Fill, Shard
from springtide_ps.server.snapshot_reader import SnapshotReader
from springtide_ps.server.step_protocol import StepProtocolError, Token

log = logging.getLogger("springtide.ps")

ANSWER_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 1.0
_IN_FLIGHT: Final = 2  # parts

Later = Callable[[Slice], None]


@dataclass(slots=True, eq=False)
class CopyUnderWay:
    """A shard on its way to another server.

    Attributes:
        reading: of the bytes of a large slice, of which `at` of `total` have left; 0: it goes whole.
        open: parts that have no answer yet.
        began: when the first part left, on the monotonic clock in seconds.
        since: when the last part left, on the same clock.
    """

    key: str
    shard: Shard
    address: str
    version: int
    reading: int = 0
    total: int = 0
    at: int = 0
    open: int = 0
    began: float = 0.0
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Incoming:
    """A slice of which `at` of `total` bytes are here.

    Attributes:
        token: the generation in which it comes.
        version: the step after which it is.
        piece: the slice that the bytes are written into.
        later: updates that wait for the other bytes.
    """

    token: Token
    version: int
    piece: Slice
    total: int
    at: int = 0
    later: list[Later] = field(default_factory=list)

    def write(self, memory: torch.Tensor) -> bool:
        """Take in the next bytes, in no lock: one part comes at a time. Return whether it is whole."""
        self.piece.write(self.at, memory)
        self.at += len(memory)
        return self.at == self.total


class Replicator:
    """Copy shards to other servers, one at a time, and take in those that come from there in parts.

    Args:
        changed: the store's lock; its condition is notified when there is something to do.
        fill: sends a shard, or a part of one.
        chunk_reads: of bytes that stay as they were at one moment.
        part_bytes: a slice of more is sent in parts of so many.
        on_steps_thread: has something done on the thread that makes the steps.

    Attributes:
        copied: called in the store's lock when a copy is over: seconds that it took, bytes, why it is not
            there ("" if it is), and whether it was the last one.
    """

    def __init__(
        self,
        changed: threading.Condition,
        fill: Fill,
        chunk_reads: SnapshotReader,
        part_bytes: int,
        on_steps_thread: Callable[[Callable[[], None]], None],
    ) -> None:
        self.fill = fill
        self.copied: Callable[[float, int, str, bool], None] = lambda seconds, size, error, last: None
        self._changed = changed
        self._chunk_reads = chunk_reads
        self._part_bytes = part_bytes
        self._on_steps_thread = on_steps_thread
        # On their way to other servers.
        self._wanted: list[tuple[str, str]] = []  # (key, address)
        self._under_way: CopyUnderWay | None = None
        # On their way here.
        self._incoming: dict[str, Incoming] = {}
        self._behind: set[str] = set()  # came, and have steps to make

    @property
    def incoming_bytes(self) -> int:
        """Return the memory of slices of which parts are here; without a lock it may be of a moment ago."""
        return sum(incoming.piece.nbytes for incoming in list(self._incoming.values()))

    @property
    def is_sending(self) -> bool:
        """Return whether a copy is on its way to another server."""
        return self._under_way is not None

    @property
    def is_idle(self) -> bool:
        """Return whether no copy is on its way to another server, nor wanted there."""
        return self._under_way is None and not self._wanted

    @property
    def patience(self) -> float | None:
        """Return the seconds after which an answer may be overdue; None: none is waited for."""
        return None if self._under_way is None else LOOK_SECONDS

    @property
    def needs_specs(self) -> bool:
        """Return whether shards are to come, or have come, that have older steps to make."""
        return bool(self._incoming or self._behind)

    def fence(self) -> None:
        """Forget everything, since a generation has begun: who is told to makes unfinished copies anew."""
        self._wanted, self._under_way, self._incoming, self._behind = [], None, {}, set()

    # ---- to another server

    def want(self, key: str, address: str) -> None:
        """Have a shard copied when its turn comes.

        Args:
            key: the shard's.
            address: of the server that gets the copy.
        """
        self._wanted.append((key, address))

    def take_next(self) -> tuple[str, str] | None:
        """Take the (key, address) that is to be sent now off the list; None while another one is sent."""
        return self._wanted.pop(0) if self.has_next() else None

    def has_next(self) -> bool:
        """Return whether a copy is wanted and none is being sent."""
        return bool(self._wanted) and self._under_way is None

    def end_overdue(self) -> None:
        """Give up the copy that is being sent if it has had no answer for long."""
        sending = self._under_way
        if sending is not None and sending.open and time.monotonic() > sending.since + ANSWER_SECONDS:
            self._end(f"no answer for {ANSWER_SECONDS:g} s")

    def begin(self, key: str, shard: Shard, address: str) -> bool:
        """Send a shard, which gets its sums from now on; in the shard's lock, so that no update is between.

        Args:
            key: the shard's.
            shard: its chunk is here.
            address: of the server that gets the copy.

        Returns:
            Whether the other server counts as one that holds a copy, or will: it got the first part.
        """
        assert shard.chunk is not None
        sending = CopyUnderWay(key, shard, address, shard.version, began=time.monotonic())
        if isinstance(shard.chunk, Slice) and shard.chunk.dumped_bytes > self._part_bytes:
            sending.reading, sending.total = self._chunk_reads.begin(key), shard.chunk.dumped_bytes
        self._under_way, shard.forward = sending, [*shard.forward, address]
        self._try_part(sending)
        if self._under_way is sending and sending.reading:
            for _ in range(_IN_FLIGHT - 1):
                self._on_steps_thread(partial(self._send_more, sending))
        return address in shard.forward

    def _try_part(self, sending: CopyUnderWay) -> None:
        """Send the next part; the copy is over when that fails."""
        try:
            self._send_part(sending)
        except Exception as error:
            self._end(repr(error))

    def _send_part(self, sending: CopyUnderWay) -> None:
        """Send the next part, or all of it (in both locks)."""
        key, at, chunk = sending.key, sending.at, sending.shard.chunk
        if sending.reading:
            about, block, _ = self._chunk_reads.take(sending.reading, key, chunk, at, self._part_bytes)
            meta = {**({} if at else about), "at": at, "of": sending.total}
        else:
            assert chunk is not None
            meta, block = chunk.dump()
        sent = self.fill(sending.address, key, sending.version, meta, block)
        sending.at += block.nbytes
        sending.open += 1
        sending.since = time.monotonic()
        # Nobody waits for the answer: the other server may hang, and steps and generations go on.
        sent.add_done_callback(partial(self._answered, sending))

    def _answered(self, sending: CopyUnderWay, sent: Future[Any]) -> None:
        """Take in the answer to a part of a copy. Any thread."""
        with self._changed:
            if self._under_way is not sending:
                return
            sending.open -= 1
            if (error := sent.exception()) is not None:
                self._end(str(error))
            elif sending.at < sending.total:
                self._on_steps_thread(partial(self._send_more, sending))
            elif not sending.open:
                self._end()
            self._changed.notify_all()

    def _send_more(self, sending: CopyUnderWay) -> None:
        with self._changed:
            if self._under_way is not sending or sending.at >= sending.total:
                return
            with sending.shard.lock:
                self._try_part(sending)

    def _end(self, why: str = "") -> None:
        """End the copy: it is there, or (with a reason) will not be."""
        sending, self._under_way = self._under_way, None
        assert sending is not None
        self._chunk_reads.end(sending.reading)
        if why:
            log.warning("the copy of %s on server %s is not made: %s", sending.key, sending.address, why)
            sending.shard.forward = [a for a in sending.shard.forward if a != sending.address]
        self.copied(time.monotonic() - sending.began, sending.at, why, self.is_idle)

    # ---- from another server, or from a worker

    def is_coming(self, key: str) -> bool:
        """Return whether parts of the slice are here, and not all."""
        return key in self._incoming

    def incoming(self, key: str) -> Incoming | None:
        """Return the slice of which parts are here, if there is one."""
        return self._incoming.get(key)

    def begin_incoming(self, key: str, incoming: Incoming) -> None:
        """Expect a slice from its beginning, also where some of it was here.

        Args:
            key: the slice's.
            incoming: the slice that is to come.
        """
        self._incoming[key] = incoming

    def expect_part(self, key: str, at: int, total: int) -> Incoming:
        """Return the slice whose next part comes.

        Args:
            key: the slice's.
            at: number of the part's first byte.
            total: bytes of the slice.

        Raises:
            StepProtocolError: another byte is next, or nothing of the slice is here.
        """
        incoming = self._incoming.get(key)
        if incoming is None or (incoming.at, incoming.total) != (at, total):
            there = "none" if incoming is None else f"{incoming.at} of {incoming.total}"
            raise StepProtocolError(f"a part of {key!r} from byte {at} of {total} on, and {there} are here")
        return incoming

    def take_updates(self, key: str, incoming: Incoming) -> list[Later]:
        """Take the updates that waited for a slice.

        Args:
            key: the slice's.
            incoming: the slice as far as it has come.

        Returns:
            None are left: it is complete, and expected no more.

        Raises:
            StepProtocolError: the slice comes anew from its beginning.
        """
        if self._incoming.get(key) is not incoming:
            raise StepProtocolError(f"{key!r} comes anew from its beginning")
        updates, incoming.later = incoming.later, []
        if not updates:
            del self._incoming[key]
            self._behind.add(key)
        return updates

    def give_up(self, key: str, incoming: Incoming) -> None:
        """Expect a slice no more, since a part of it could not be taken in.

        Args:
            key: the slice's.
            incoming: the slice as far as it has come.
        """
        if self._incoming.get(key) is incoming:
            del self._incoming[key]

    def postpone(self, token: Token, key: str, update: Later) -> bool:
        """Have an update made when a slice has come whole.

        Args:
            token: the generation's.
            key: the slice's.
            update: makes it.

        Returns:
            Whether the slice is on its way; if not, the update is not kept.
        """
        incoming = self._incoming.get(key)
        if incoming is None or incoming.token != token:
            return False
        incoming.later.append(update)
        return True

    def caught_up(self, key: str) -> None:
        """Note that a shard has made the steps that were decided before it came."""
        self._behind.discard(key)
