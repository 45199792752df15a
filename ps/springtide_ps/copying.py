"""Chunks on their way to other servers and to those who read them, whole or in parts.

A large slice of a table goes in parts, so that neither side needs memory for all of it at once, and steps are
made in between. Its parts are of the moment at which the copy began (`readings`). Updates from then on follow
on the same connection; where the slice is to be, they wait until it is whole: sums of steps beside the chunk
that does not exist yet, ranges in `Coming`. So a copy makes the updates in the order of the first server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from springtide_ps.chunk import ChunkError
from springtide_ps.frames import PART_BYTES
from springtide_ps.frozen import Part
from springtide_ps.held import Fill, Forward, Held
from springtide_ps.readings import part_of
from springtide_ps.rounds import RoundError, Token
from springtide_ps.shards import Shards
from springtide_ps.slices import Slice

log = logging.getLogger("springtide.ps")

_ANSWER_SECONDS: Final = 60.0
_NO_ANSWER: Final = f"no answer for {_ANSWER_SECONDS:g} s"
_LOOK_SECONDS: Final = 1.0
_IN_FLIGHT: Final = 2  # parts

Later = Callable[[Slice], None]


@dataclass(slots=True, eq=False)
class Sending:
    """A chunk on its way to another server. reading: of the bytes of a large slice, of which `at` of `total`
    have left; 0: it goes whole. open: parts that have no answer yet. end: when one is waited for no more.
    """

    key: str
    address: str
    version: int
    reading: int = 0
    total: int = 0
    at: int = 0
    open: int = 0
    end: float = 0.0


@dataclass(slots=True, eq=False)
class Coming:
    """A slice of which `at` of `total` bytes are here. later: updates that wait for the others."""

    token: Token
    version: int
    piece: Slice
    total: int
    at: int = 0
    later: list[Later] = field(default_factory=list)


class CopyingShards(Shards):
    """As `Shards`. part_bytes: a slice of more goes to another server in parts of so many."""

    def __init__(self, forward: Forward, fill: Fill, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._coming: dict[str, Coming] = {}
        self._sending: Sending | None = None
        super().__init__(forward, fill)

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return super().held_bytes + sum(coming.piece.nbytes for coming in self._coming.values())

    @property
    def unlocked_bytes(self) -> int:
        coming = list(self._coming.values())
        return super().unlocked_bytes + sum(one.piece.nbytes for one in coming)

    # ---- for who reads

    def dump(
        self, token: Token, key: str, at: int = 0, most: int | None = None, reading: int = 0
    ) -> tuple[int, Part, int]:
        """(version, at most so many bytes of a chunk from `at` on, the reading's number if there are more).

        reading: which one goes on; 0: one begins. Raise RoundError.
        """
        with self._lock:
            self._rounds.check_token(token)
            self._settle()
            held = self._held[key] if self._chunk(key) else Held()
            with held.lock:
                assert held.chunk is not None
                if most is None:
                    return held.version, part_of(held.chunk, at, most), 0
                if not reading and at:
                    raise RoundError(f"{key!r} is read in order: byte 0 is next, not {at}")
                if not reading:
                    reading = self.cuts.readings.begin(key)
                part = self.cuts.readings.take(reading, key, held.chunk, at, most)
                more = at + part[1].nbytes < part[2]
                return held.version, part, reading if more else 0

    # ---- to another server

    def arrange(
        self,
        token: Token,
        forward: Mapping[str, list[str]],
        fill: Mapping[str, list[str]],
        drop: Iterable[str],
    ) -> None:
        """From now on: whom the sums of a chunk go to, whom a copy of the chunk is sent to, what goes."""
        with self._lock:
            self._rounds.check_token(token)
            drop = [key for key in drop if key in self._held]
            self._before_change(drop)
            for key in drop:
                del self._held[key]
            for key in {*forward, *fill}:
                self._chunk(key)
            for key, addresses in forward.items():
                self._held[key].forward = list(addresses)
            self._fills += [(key, address) for key, addresses in fill.items() for address in addresses]
            self._wake.notify_all()

    def _fills_now(self) -> list[tuple[str, str]]:
        if self._sending is not None and self._sending.open and time.monotonic() > self._sending.end:
            self._end_sending(_NO_ANSWER)
        # A copy is made of what stays, when nothing is left to be made that a new server knows nothing of;
        # one at a time.
        stays = self._rounds.ready and not self._rounds.tried
        return self._fills if stays and self._sending is None else []

    @property
    def _patience(self) -> float | None:
        return None if self._sending is None else _LOOK_SECONDS

    def _copy(self, key: str, address: str) -> None:
        """Send a chunk to another server, which gets its sums from now on."""
        with self._lock:
            held = self._held.get(key)
            if held is None or held.chunk is None or self._todo:
                if held is not None and held.chunk is not None:
                    self._fills.append((key, address))
                return
            with held.lock:
                # Within the lock: no update comes between the copy and those that follow it.
                chunk, sending = held.chunk, Sending(key, address, held.version)
                if isinstance(chunk, Slice) and chunk.dumped_bytes > self._part_bytes:
                    sending.reading, sending.total = self.cuts.readings.begin(key), chunk.dumped_bytes
                self._sending, held.forward = sending, [*held.forward, address]
                self._try_part(sending, chunk)
                if self._sending is sending and sending.reading:
                    self._asides += [partial(self._send_more, sending)] * (_IN_FLIGHT - 1)
            if address in held.forward:
                for which, total in held.closed_sums(self._rounds.version + 1).items():
                    # Nobody waits for it any more who has prepared: the step may use the sum up meanwhile.
                    self._send_sum(address, which, key, total.clone())

    def _try_part(self, sending: Sending, chunk: Any) -> None:
        """As `_send_part`; the copy is over when that fails."""
        try:
            self._send_part(sending, chunk)
        except Exception as error:
            self._end_sending(repr(error))

    def _send_part(self, sending: Sending, chunk: Any) -> None:
        """Send the next part, or all of it (in both locks)."""
        key, at = sending.key, sending.at
        if sending.reading:
            about, block, _ = self.cuts.readings.take(sending.reading, key, chunk, at, self._part_bytes)
            meta = {**({} if at else about), "at": at, "of": sending.total}
        else:
            meta, block = chunk.dump()
        sent = self._fill(sending.address, key, sending.version, meta, block)
        sending.at += block.nbytes
        sending.open += 1
        sending.end = time.monotonic() + _ANSWER_SECONDS
        # Nobody waits for the answer: the other server may hang, and steps and generations go on.
        sent.add_done_callback(partial(self._is_there, sending))

    def _is_there(self, sending: Sending, sent: Future[Any]) -> None:
        """A part of a copy has its answer. Any thread."""
        with self._lock:
            if self._sending is not sending:
                return
            sending.open -= 1
            if (error := sent.exception()) is not None:
                self._end_sending(str(error))
            elif sending.at < sending.total:
                self._asides.append(partial(self._send_more, sending))
            elif not sending.open:
                self._end_sending()
            self._wake.notify_all()

    def _send_more(self, sending: Sending) -> None:
        with self._lock:
            if self._sending is not sending or sending.at >= sending.total:
                return
            held = self._held.get(sending.key, Held())
            with held.lock:
                self._try_part(sending, held.chunk)

    def _end_sending(self, why: str = "") -> None:
        """The copy is there, or will not be (in the lock)."""
        sending, self._sending = self._sending, None
        assert sending is not None
        self.cuts.readings.end(sending.reading)
        if why:
            log.warning("the copy of %s on server %s is not made: %s", sending.key, sending.address, why)
            if held := self._held.get(sending.key):
                held.forward = [address for address in held.forward if address != sending.address]

    # ---- from another server, or from a worker

    def load_part(
        self,
        token: Token,
        key: str,
        version: int,
        begin: Callable[[], Slice],
        at: int,
        total: int,
        memory: torch.Tensor,
    ) -> None:
        """Bytes `at` and the following of a slice of `total`; with the last one it is held, as `load`.

        begin: makes the slice that they are written into. Raise RoundError for a part out of order.
        """
        piece = None if at else begin()
        with self._lock:
            self._rounds.check_token(token)
            coming = self._coming.get(key)
            if piece is not None:
                if key in self._held:
                    self._before_change([key])
                    with (held := self._held[key]).lock:
                        held.chunk = None
                coming = self._coming[key] = Coming(token, version, piece, total)
            if coming is None or (coming.at, coming.total) != (at, total):
                there = "none" if coming is None else f"{coming.at} of {coming.total}"
                raise RoundError(f"a part of {key!r} from byte {at} of {total} on, and {there} are here")
        try:
            coming.piece.write(at, memory)
            coming.at += len(memory)
            if coming.at == total:
                self._finish(key, coming)
        except Exception as error:
            with self._lock:
                if self._coming.get(key) is coming:
                    del self._coming[key]
            if isinstance(error, RoundError | ChunkError):
                raise
            raise RoundError(f"a copy of {key!r} cannot be made: {error!r}") from error

    def _finish(self, key: str, coming: Coming) -> None:
        coming.piece.finish()
        while True:
            with self._lock:
                self._rounds.check_token(coming.token)
                if self._coming.get(key) is not coming:
                    raise RoundError(f"{key!r} comes anew from its beginning")
                updates, coming.later = coming.later, []
                if not updates:
                    del self._coming[key]
                    self._behind.add(key)
                    self.load(coming.token, key, coming.version, coming.piece)
                    return
            self._make_late(coming.piece, updates)

    def _make_late(self, piece: Slice, updates: Iterable[Later]) -> None:
        """Updates that came while the slice was on its way."""
        for update in updates:
            update(piece)

    def is_coming(self, key: str) -> bool:
        """Whether parts of it are here, and not all."""
        return key in self._coming

    def postpone(self, token: Token, key: str, update: Later) -> bool:
        """Make this update when the slice has come whole. False: it is not on its way."""
        with self._lock:
            coming = self._coming.get(key)
            if coming is None or coming.token != token:
                return False
            coming.later.append(update)
            return True

    @property
    def _needs_recipes(self) -> bool:
        return bool(self._coming or self._behind)

    def _fence(self, error: Exception) -> None:
        super()._fence(error)
        # Copies that were not made are made anew, by who is told to.
        self._coming, self._behind, self._sending = {}, set(), None
        self._held = {key: held for key, held in self._held.items() if held.chunk is not None}
