"""The client of one parameter server: requests are pipelined, answers land in the caller's memory.

A thread sends and a thread receives, so that pushes leave while values arrive. Every request returns a
`Future`; the tensors that were given must not change before it is done.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from springtide_ps.params.chunk import StepSpec
from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.sparse_gradient import SparseGradient, pack
from springtide_ps.wire.auth import Tokens
from springtide_ps.wire.frames import DTYPE_NAMES, NO_REPLY, Frame, FrameError, Header, Kind, joined, memory
from springtide_ps.wire.keepalive import KEEPALIVE_SECONDS, SILENT_SECONDS
from springtide_ps.wire.keys import BACKWARD_PASS_KEY, STEP_SPEC_KEY
from springtide_ps.wire.options import SentOptions
from springtide_ps.wire.stream import PeerClosedError, Stream, connect

_QUEUED_LIMIT: Final = 4096
_EMPTY: Final = memoryview(b"")


class ServerLostError(ConnectionError):
    """The connection broke. A push without an answer may have been applied or not."""


class RefusedError(ValueError):
    """The server understood the request and cannot do it; the message says why.

    error: the class of the server's own error.
    """

    def __init__(self, message: str, error: str = "") -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True, slots=True)
class Answer:
    """Version of the key after the request, what else the server said, and (of `page` only) uint8 memory."""

    version: int
    meta: dict[str, Any]
    payload: torch.Tensor | None = None


@dataclass(slots=True)
class _Pending:
    future: Future[Answer]
    out: memoryview | None
    any_size: bool = False


class ServerClient:
    """One connection. Methods may be called from any thread; all raise ServerLostError once it is broken, and
    in a process that was forked from the one that made it.

    Raises OSError when the server cannot be reached within `timeout` seconds, RejectedError for a wrong
    token. patience: seconds after which a request ends with TimeoutError that finds no room among those that
    wait to be sent; None: it waits until the connection is broken. silent: seconds without a sign of life
    from a server that owes an answer, after which the connection counts as broken (`keepalive`).
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: Tokens,
        timeout: float = 10.0,
        tls: ssl.SSLContext | None = None,
        patience: float | None = None,
        silent: float = SILENT_SECONDS,
    ) -> None:
        self.address = f"{address[0]}:{address[1]}"
        self._stream, self.about = connect(address, token, timeout, tls)
        self._process, self._patience = os.getpid(), patience
        self._silent = silent
        self.heard_at = time.monotonic()
        """Time at which the newest message of the server began to arrive; at first, that of the connection.
        """
        if self._stream.keepalives:
            self._stream.tick(KEEPALIVE_SECONDS, self._look)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self._broken: str | None = None
        self._options = SentOptions()
        self._describing = threading.Lock()  # a request leaves after the options that it names
        self._unsent: set[Future[None]] = set()
        self.refusal = ""
        """Why the server refused what has no answer of its own; the request that counts it fails."""
        self._outbox: queue.Queue[tuple[Frame, memoryview, Future[None] | None, float] | None] = queue.Queue(
            _QUEUED_LIMIT
        )
        self._threads = [
            threading.Thread(target=target, name=f"springtide-ps-{what}-{self.address}", daemon=True)
            for what, target in (("send", self._send_for_ever), ("receive", self._receive_for_ever))
        ]
        for thread in self._threads:
            thread.start()

    # ---- requests

    def init(self, key: str, values: torch.Tensor, whole: Sequence[int] | None = None) -> Future[Answer]:
        """Make a key with these values, unless it is there; `meta["created"]` says which.

        Args:
            key: to be made.
            values: its first ones.
            whole: shape of the tensor that the values are a part of; all who make the key give the same.
                None: they are all of it.

        Returns:
            The answer to come.

        Raises:
            ValueError: a server holds no values of that dtype.
        """
        dtype = DTYPE_NAMES.get(values.dtype)
        if dtype is None:
            raise ValueError(
                f"{values.dtype} cannot be held by a server: {', '.join(DTYPE_NAMES.values())} can"
            )
        about = {"key": key, "shape": list(values.shape), "dtype": dtype}
        if whole is not None:
            about["whole"] = list(whole)
        return self._ask(Kind.INIT, about, values)

    def push(self, key: str, pushed: torch.Tensor) -> Future[Answer]:
        """Apply the server's update.

        Args:
            key: the values' key.
            pushed: of their shape and dtype.

        Returns:
            The answer to come.
        """
        return self._ask(Kind.PUSH, {"key": key}, pushed)

    def pull(self, key: str, out: torch.Tensor) -> Future[Answer]:
        """Receive values.

        Args:
            key: their key.
            out: memory that they come into, contiguous, of their shape and dtype.

        Returns:
            The answer to come.
        """
        return self._ask(Kind.PULL, {"key": key}, None, out)

    def push_pull(self, key: str, pushed: torch.Tensor, out: torch.Tensor) -> Future[Answer]:
        """Apply the server's update, and receive the values that this push made.

        Args:
            key: the values' key.
            pushed: of their shape and dtype.
            out: memory that they come into, which may be `pushed` itself.

        Returns:
            The answer to come.
        """
        return self._ask(Kind.PUSH_PULL, {"key": key}, pushed, out)

    def update(self, name: str, **options: Any) -> Future[Answer]:
        """Make every later push do the update of that name (`springtide_ps.params.optim`)."""
        return self._ask(Kind.UPDATE, {**options, "name": name})

    def table(self, key: str, spec: TableSpec) -> Future[Answer]:
        """Make an embedding table, unless it is there; `meta["created"]` says which.

        Args:
            key: to be made.
            spec: how the table is made and trained.

        Returns:
            The answer to come.
        """
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in spec.options.items()}
        return self._ask(Kind.TABLE, {**asdict(spec), "options": options, "key": key})

    def lookup(self, key: str, ids: torch.Tensor, out: torch.Tensor) -> Future[Answer]:
        """Receive rows of a table.

        Args:
            key: the table's.
            ids: int64 [n].
            out: float32 [n, dim], memory that they come into.

        Returns:
            The answer to come.
        """
        return self._ask(Kind.LOOKUP, {"key": key, "count": ids.numel()}, ids, out)

    def table_push(self, key: str, ids: torch.Tensor, gradients: torch.Tensor) -> Future[Answer]:
        """Make one step of a table's optimizer.

        Args:
            key: the table's.
            ids: int64 [n].
            gradients: float32 [n, dim], of these rows.

        Returns:
            The answer to come.
        """
        both = joined(ids, gradients)
        return self._ask(Kind.TABLE_PUSH, {"key": key, "count": ids.numel()}, both)

    def page(self, key: str, start: int, count: int) -> Future[Answer]:
        """Ask for rows of a table by their place in it: `meta["count"]` ids, then their rows, in `payload`.

        Args:
            key: the table's.
            start: number of the first row.
            count: rows at most.

        Returns:
            The answer to come.
        """
        return self._ask(Kind.PAGE, {"key": key, "start": start, "count": count}, any_size=True)

    def ask_step(
        self,
        kind: Kind,
        token: tuple[int, int, int],
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        typed: bool = False,
        any_size: bool = False,
    ) -> Future[Answer]:
        """Make a request of training for a job (`server.sync_handler`).

        Args:
            kind: of the request.
            token: the generation's.
            meta: its JSON; under STEP_SPEC_KEY it may have a `StepSpec`, whose options are sent when they are
                not known there yet.
            payload: that it brings.
            out: memory that the answer's payload comes into.
            typed: the payload's dtype is said.
            any_size: the answer's payload may have any size.

        Returns:
            The answer to come.
        """
        about = {**meta, "t": list(token)}
        if typed and payload is not None:
            about["d"] = DTYPE_NAMES[payload.dtype]
        if not isinstance(spec := about.get(STEP_SPEC_KEY), StepSpec):
            return self._ask(kind, about, payload, out, any_size)
        with self._describing:
            about[STEP_SPEC_KEY], options = self._options.describe(spec)
            for said, text in options:
                block = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                self._send_unanswered(Kind.OPTIONS, said, block)
            return self._ask(kind, about, payload, out, any_size)

    def stage(
        self,
        token: tuple[int, int, int],
        step: int,
        member: str,
        key: str,
        gradient: torch.Tensor | SparseGradient,
        number: int = 0,
    ) -> None:
        """Send a gradient that has no answer of its own; it must not change before PREPARE is answered.

        Args:
            token: the generation's.
            step: the step that it counts for.
            member: the sender.
            key: the chunk's.
            gradient: flat, or some of its elements.
            number: of the step's backward pass.
        """
        about, payload = _staged(token, step, member, key, gradient)
        kind = Kind.STAGE_SPARSE if isinstance(gradient, SparseGradient) else Kind.STAGE
        self._send_unanswered(kind, about | in_backward_pass(number), payload)

    def stage_speculative(
        self,
        token: tuple[int, int, int],
        step: int,
        member: str,
        key: str,
        gradient: torch.Tensor | SparseGradient,
        out: torch.Tensor,
        rank: int,
    ) -> Future[Answer]:
        """Send a gradient whose answer is the chunk's values after the step as it is expected to be made.

        Args:
            token: the generation.
            step: the step to be made.
            member: who sends the gradient.
            key: the chunk.
            gradient: flat, of the chunk's size, or some of its elements.
            out: where the values land.
            rank: how many values are needed before these.

        Returns:
            The answer; the values may never be made before the step (see the server's `speculation`).
        """
        about, payload = _staged(token, step, member, key, gradient)
        if isinstance(gradient, SparseGradient):
            about["sel"] = True
        return self._ask(Kind.STAGE_SPECULATIVE, about | {"rank": rank}, payload, out)

    def push_early(
        self,
        token: tuple[int, int, int],
        member: str,
        key: str,
        number: int,
        form: Mapping[str, Any],
        gradient: torch.Tensor,
    ) -> None:
        """Send a gradient that a later PUSH_BATCH names (`gradient_stash`); it must not change until then.

        Args:
            token: the generation's.
            member: the sender.
            key: the chunk's.
            number: that names it.
            form: how it travels, in JSON's types.
            gradient: as it travels.
        """
        about = {"t": list(token), "me": member, "k": key, "o": number, **form}
        self._send_unanswered(Kind.EARLY_PUSH, about, gradient)

    def stage_rows(
        self,
        token: tuple[int, int, int],
        step: int,
        member: str,
        table: str,
        slices: Sequence[tuple[int, int]],
        records: torch.Tensor,
        dtype: torch.dtype = torch.float32,
        number: int = 0,
    ) -> Future[None]:
        """Send gradients for rows of a table without an answer; the records must not change before PREPARE is
        answered.

        Args:
            token: the generation's.
            step: the step that they count for.
            member: the sender.
            table: its name.
            slices: (number, how many of the records).
            records: the rows' records one after another, by slice.
            dtype: of the gradients in them.
            number: of the step's backward pass.

        Returns:
            Done once the records have left.
        """
        numbers, counts = ([part[i] for part in slices] for i in (0, 1))
        about = {"t": list(token), "s": step, "me": member, "k": table, "p": numbers, "n": counts}
        about |= in_backward_pass(number)
        if dtype is not torch.float32:
            about["d"] = DTYPE_NAMES[dtype]
        return self._send_unanswered(Kind.STAGE_ROWS, about, records)

    def _send_unanswered(self, kind: Kind, about: dict[str, Any], gradient: torch.Tensor) -> Future[None]:
        payload = memory(gradient)
        sent: Future[None] = Future()
        self._check_process()
        with self._lock:
            if self._broken is not None:
                raise ServerLostError(f"parameter server {self.address}: {self._broken}")
            self._begin_to_wait()
            self._unsent.add(sent)
        frame = Frame(kind, NO_REPLY, about, len(payload))
        self._outbox.put((frame, payload, sent, time.monotonic()))
        return sent

    def status(self) -> Future[Answer]:
        return self._ask(Kind.STATUS, {})

    def close(self, timeout: float = 5.0) -> None:
        """End the connection; what has no answer yet fails. Raise TimeoutError when a thread does not end.

        In a forked process that of the other one goes on.
        """
        if os.getpid() != self._process:
            self._stream.socket.close()
            return
        self._break("closed by this process")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
                if thread.is_alive():
                    raise TimeoutError(f"thread {thread.name} has not ended within {timeout:g} s")
        self._stream.close()

    @property
    def broken(self) -> str | None:
        """Why no request can be made any more; None while all is well."""
        return self._broken

    def _ask(
        self,
        kind: Kind,
        meta: dict[str, Any],
        payload: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        any_size: bool = False,
    ) -> Future[Answer]:
        # A tensor that cannot travel is refused here, where the caller sees it.
        sent = _EMPTY if payload is None else memory(payload)
        target = None if out is None else memory(out)
        future: Future[Answer] = Future()
        number = next(self._numbers)
        self._check_process()
        with self._lock:
            if self._broken is not None:
                raise ServerLostError(f"parameter server {self.address}: {self._broken}")
            self._begin_to_wait()
            self._pending[number] = _Pending(future, target, any_size)
        frame = Frame(kind, number, meta, len(sent))
        try:
            self._outbox.put((frame, sent, None, time.monotonic()), timeout=self._patience)
        except queue.Full:
            with self._lock:
                self._pending.pop(number, None)
            raise TimeoutError(
                f"parameter server {self.address}: {_QUEUED_LIMIT} requests wait to be sent there, and none "
                f"has left for {self._patience:g} s"
            ) from None
        return future

    def _check_process(self) -> None:
        # Before any lock: another thread may have held it when the process was forked.
        if os.getpid() != self._process:
            raise ServerLostError(
                f"parameter server {self.address}: process {self._process} is connected, and this one was "
                "forked from it: connect anew in each process"
            )

    # ---- threads

    def _send_for_ever(self) -> None:
        while self._broken is None and (item := self._outbox.get()) is not None:
            frame, payload, sent, since = item
            try:
                self._stream.send(frame, payload, since)
                if sent is not None:
                    self._has_left(sent)
            except OSError as error:
                self._break(f"the connection broke: {error}")
            except FrameError as error:
                self._settle(frame.request, error)
        self._make_room()

    def _make_room(self) -> None:
        """Let all go on that wait for room: their requests have failed."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()

    def _has_left(self, sent: Future[None]) -> None:
        with self._lock:
            known = sent in self._unsent
            self._unsent.discard(sent)
        if known:
            sent.set_result(None)

    def _begin_to_wait(self) -> None:
        if not self._pending and not self._unsent:
            self._stream.silence = 0

    def _look(self) -> None:
        """No byte has come for another PULSE_SECONDS."""
        waits, silence = len(self._pending) + len(self._unsent), self._stream.silence * KEEPALIVE_SECONDS
        if waits and silence >= self._silent:
            raise ConnectionError(f"no sign of life for {silence:.0f} s, while {waits} requests wait")

    def _receive_for_ever(self) -> None:
        try:
            while True:
                header, meta = self._stream.receive()
                self.heard_at = time.monotonic()
                self._take(self._stream, header, meta)
        except PeerClosedError as error:
            self._break(str(error))
        except (OSError, FrameError) as error:
            self._break(f"the connection broke: {error}")

    def _take(self, stream: Stream, header: Header, meta: dict[str, Any]) -> None:
        if header.kind is Kind.KEEPALIVE:
            return
        if header.kind is Kind.UNKNOWN:  # of a server of a later release
            stream.skip(header.payload_bytes)
            error = RefusedError(f"parameter server {self.address}: its answer is of a kind not known here")
            self._settle(header.request, error)
            return
        if header.request == NO_REPLY and header.kind is Kind.REFUSED:
            self.refusal = str(meta.get("message", "refused"))
            return
        with self._lock:
            pending = self._pending.pop(header.request, None)
        if pending is None:
            if self._broken is not None:
                raise PeerClosedError(self._broken)
            raise FrameError(f"an answer to request {header.request}, which was never made")
        if header.kind is Kind.REFUSED:
            message = f"parameter server {self.address}: {meta.get('message', 'refused')}"
            error = RefusedError(message, str(meta.get("error", "")))
            pending.future.set_exception(error)
            return
        payload = None
        if header.kind is Kind.VALUES:
            out = pending.out
            if pending.any_size:
                payload = torch.empty(header.payload_bytes, dtype=torch.uint8)
                out = memory(payload)
            if out is None or len(out) != header.payload_bytes:
                stream.skip(header.payload_bytes)
                size = "nowhere to put them" if out is None else f"room for {len(out)}"
                pending.future.set_exception(
                    ValueError(f"the server sent {header.payload_bytes} bytes, and there is {size}")
                )
                return
            try:
                stream.receive_into(out)
            except (OSError, PeerClosedError) as error:
                # The caller's memory holds half of the values now: this future must not be lost.
                pending.future.set_exception(ServerLostError(f"parameter server {self.address}: {error}"))
                raise
        version = meta.get("version", 0)
        pending.future.set_result(Answer(version if isinstance(version, int) else 0, meta, payload))

    def _settle(self, number: int, error: Exception) -> None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            pending.future.set_exception(error)

    def _break(self, reason: str) -> None:
        with self._lock:
            if self._broken is not None:
                return
            self._broken = reason
            lost, self._pending = list(self._pending.values()), {}
            unsent, self._unsent = self._unsent, set()
        self._stream.abort()
        # First of all: who is told below may need a lock of one that waits for room.
        self._make_room()
        with contextlib.suppress(queue.Full):  # who sends looks before it takes the next one
            self._outbox.put_nowait(None)
        for pending in lost:
            pending.future.set_exception(ServerLostError(f"parameter server {self.address}: {reason}"))
        for sent in unsent:
            sent.set_exception(ServerLostError(f"parameter server {self.address}: {reason}"))


def _staged(
    token: tuple[int, int, int], step: int, member: str, key: str, gradient: torch.Tensor | SparseGradient
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the JSON and the payload of a gradient's frame."""
    dense = gradient.values if isinstance(gradient, SparseGradient) else gradient
    about = {"t": list(token), "s": step, "me": member, "k": key, "d": DTYPE_NAMES[dense.dtype]}
    return about, pack(gradient) if isinstance(gradient, SparseGradient) else gradient


def in_backward_pass(number: int) -> dict[str, Any]:
    """Return how a request names backward pass `number` of a step: not at all if it is the first."""
    return {BACKWARD_PASS_KEY: number} if number else {}
