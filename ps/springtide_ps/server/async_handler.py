"""Requests of training without common steps: a push is applied when it comes, once per batch and chunk.

Every server answers pushes and pulls of its chunks. One of them, which all workers know alike, also gives out
the batches; what it knows of them lives as long as a generation (`lease_table` says why that is enough).

Threads and locks: the thread that reads a client's requests calls `check` and `answer`, and applies a push in
the shard's lock (`ShardStore.locked`); the answer is given by it, by the reading thread of another client
that has made a lease possible, by a thread of the store's, or by one that receives other servers' answers.
`_lock` guards the leases and the questions that wait for one, and no answer is given in it.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from springtide_ps.params.applied import AppliedBatches, BatchNumberError, IntervalSet
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.sparse_gradient import unpack
from springtide_ps.server import speculative_batches
from springtide_ps.server.gradient_stash import GradientStash, StashedGradient
from springtide_ps.server.kv_handler import Answer, Counters
from springtide_ps.server.lease_table import LeaseError, Leases, Over, Wait
from springtide_ps.server.replication_acks import ReplicationAcks
from springtide_ps.server.step_protocol import MEMBERS_LIMIT, StaleError, StepProtocolError, Token
from springtide_ps.server.sync_handler import Reply, SyncHandler, dtype_in, key_in, number_in, token_in
from springtide_ps.wire.frames import NO_REPLY, Frame, FrameError, Header, Kind, memory
from springtide_ps.wire.keys import BATCH_KEY, INTERVALS_KEY, STEP_SPEC_KEY
from springtide_ps.wire.options import spec_in

log = logging.getLogger("springtide.ps")

_EARLY_PUSHES: Final = (Kind.EARLY_PUSH, Kind.SPECULATIVE_PUSH, Kind.COPY_EARLY_PUSH)
KINDS: Final = frozenset(
    {*(kind for kind in Kind if Kind.PUSH_BATCH <= kind <= Kind.LEASE), *_EARLY_PUSHES, Kind.FINISHED}
)
_FORM: Final = ("d", "sel")
_NAMED_LIMIT: Final = 1024
_NONE: Final = torch.empty(0)
_CLOCK_LIMIT: Final = 1 << 53


@dataclass(slots=True)
class _Asked:
    """A question for a batch that could not be answered at once."""

    token: Token
    member: str
    first: int
    stop: int
    sent: list[int]
    number: int
    reply: Reply


class AsyncHandler:
    """Lease batches to members that do not step together, and apply their gradients as they come.

    Its methods raise StepProtocolError, BatchNumberError, LeaseError or ChunkError for requests that cannot
    be answered, FrameError for those that no client of ours sends. `stash_used` returns the bytes that all
    clients have pushed early.
    """

    def __init__(self, steps: SyncHandler, counters: Counters, stash_used: Callable[[], int]) -> None:
        self._steps, self._store, self._counters = steps, steps.store, counters
        self._stash_used = stash_used
        self._early_numbers = itertools.count(1)
        self._acks = ReplicationAcks()
        steps.entered = self._acks.enter
        self._lock = threading.Lock()
        self._token: Token | None = None
        self._leases: Leases | None = None
        self._waiting: list[_Asked] = []

    @property
    def waiting(self) -> int:
        """How many questions for a lease wait for others to go on."""
        with self._lock:
            return len(self._waiting)

    def check(self, header: Header, meta: dict[str, Any]) -> None:
        """Refuse a payload of another size than it must have, before memory is allocated.

        Args:
            header: of the request.
            meta: its JSON.

        Raises:
            FrameError: the request says what cannot be.
            StepProtocolError: the generation, member or shard does not fit.
            ChunkError: the gradient does not fit the shard.
            NoRoomError: there is no memory to set it aside.
        """
        pushes = header.kind in (Kind.PUSH_BATCH, Kind.COPY_BATCH) and "o" not in meta
        if not pushes and header.kind not in _EARLY_PUSHES:
            if header.payload_bytes:
                raise FrameError(f"{header.kind.name} brings no tensor")
            return
        key = key_in(meta)
        if header.kind in _EARLY_PUSHES:
            self._store.check_member(token_in(meta), str(meta.get("me")))
            self._steps.check_room(f"the early push of {key!r}", header.payload_bytes, self._stash_used())
        self._store.check_pushed(key, header.payload_bytes, dtype_in(meta), bool(meta.get("sel")))

    def answer(
        self, header: Header, meta: dict[str, Any], payload: torch.Tensor, reply: Reply, stash: GradientStash
    ) -> None:
        """Carry a checked request out.

        Args:
            header: of the request.
            meta: its JSON.
            payload: uint8; used no longer than this call.
            reply: gets the answer now or later, from any thread.
            stash: gradients set aside for the connection.
        """
        token, number = token_in(meta), header.request
        match header.kind:
            case Kind.EARLY_PUSH | Kind.COPY_EARLY_PUSH:
                self._push_early(header.kind, token, meta, payload.clone(), stash)
                if number != NO_REPLY:
                    reply(Answer(Frame(Kind.DONE, number)))
            case Kind.SPECULATIVE_PUSH:
                if number == NO_REPLY:
                    raise FrameError("an early push whose values are wanted early has a number")
                made = self._push_early(header.kind, token, meta, payload.clone(), stash)
                if made is None:
                    reply(Answer(Frame(Kind.DONE, number, {"late": True})))
                else:
                    frame = Frame(Kind.VALUES, number, _about(made[0]), made[1].nbytes)
                    reply(Answer(frame, memory(made[1])))
            case Kind.PUSH_BATCH | Kind.COPY_BATCH:
                self._push(header.kind, token, number, meta, payload, reply, stash)
            case Kind.PULL_CHUNK:
                self._store.dense(key_in(meta))
                with self._store.locked(token, key_in(meta)) as shard:
                    about, values = _about(shard.chunk.applied_batches), _values(shard.chunk).clone()
                self._counters.pulls += 1
                reply(Answer(Frame(Kind.VALUES, number, about, values.nbytes), memory(values)))
            case Kind.APPLIED_BATCHES:
                applied_of = {
                    key: _about(applied_batches)
                    for key, applied_batches in self._store.applied_batches(token).items()
                }
                block = torch.frombuffer(bytearray(json.dumps(applied_of).encode()), dtype=torch.uint8)
                reply(Answer(Frame(Kind.VALUES, number, {}, block.nbytes), memory(block)))
            case Kind.OPEN:
                self._open(token, meta)
                reply(Answer(Frame(Kind.DONE, number)))
            case Kind.LEASE:
                self._lease(token, number, meta, reply)
            case Kind.FINISHED:
                self._finished(token, meta)
                reply(Answer(Frame(Kind.DONE, number)))
            case _:
                raise FrameError(f"{header.kind.name} is no request of asynchronous training")

    # ---- values

    def _push_early(
        self, kind: Kind, token: Token, meta: dict[str, Any], payload: torch.Tensor, stash: GradientStash
    ) -> tuple[AppliedBatches, torch.Tensor] | None:
        """Set a gradient aside until a push names it.

        Where it may count at once, the values that follow from it are made speculatively, and returned to be
        sent early.
        """
        key, early, made = key_in(meta), kind is Kind.SPECULATIVE_PUSH, None
        form: dict[str, Any] = {name: meta[name] for name in _FORM if name in meta}
        stashed = StashedGradient(
            number_in(meta, "o"), form, payload, next(self._early_numbers) if early else 0
        )
        # Before the chunk's lock: to count what there is takes the one in which others wait for that.
        makes = early and self._steps.has_room_twice(self._stash_used())
        if kind is not Kind.COPY_EARLY_PUSH:
            with self._store.locked(token, key) as shard:
                # In the lock, which a copy in the making is sent in as well: that comes there first.
                for address in shard.forward:
                    about = {"k": key, "o": stashed.number, "me": meta["me"], **stashed.form}
                    stashed.passed[address] = self._announce(
                        address, Kind.COPY_EARLY_PUSH, token, about, payload
                    )
                if makes:
                    step_spec, of_batch = spec_in(meta), number_in(meta, "r")
                    made = speculative_batches.speculate(
                        shard,
                        stashed.speculative,
                        of_batch,
                        step_spec,
                        lambda chunk: _gradient(chunk, meta, payload),
                    )
        stash.put(token, _owner(kind, meta), key, stashed)
        return made

    def _push(
        self,
        kind: Kind,
        token: Token,
        number: int,
        meta: dict[str, Any],
        payload: torch.Tensor,
        reply: Reply,
        stash: GradientStash,
    ) -> None:
        key, step_spec, of_batch = key_in(meta), spec_in(meta), number_in(meta, "r")
        copies: list[Future[Any]] = []
        fresh, stashed = False, None
        self._store.check_token(token, in_batches=True)
        if "o" in meta:
            stashed = stash.take(token, _owner(kind, meta), key, number_in(meta, "o"))
            if stashed is None and kind is Kind.COPY_BATCH:
                raise StepProtocolError(f"what was pushed early for a copy of {key!r} is not here")
            if stashed is None:
                reply(Answer(Frame(Kind.DONE, number, {"whole": True})))
                return
            meta = {**meta, **stashed.form}
            # The update uses it up, though it may still be on its way to a copy: that one gets it again.
            payload = stashed.payload
        if kind is Kind.COPY_BATCH and self._store.replicator.is_coming(key):
            kept = payload.clone() if stashed is None else payload
            if self._store.postpone(
                token, key, partial(_apply_postponed, of_batch, step_spec, kept, dtype_in(meta))
            ):
                reply(Answer(Frame(Kind.DONE, number)))
                return
        try:
            with self._store.locked(token, key) as shard:
                chunk = shard.chunk
                chunk.check(step_spec)
                gradient = _gradient(chunk, meta, payload)
                self._store.before_push(key, chunk)
                chunk.applied_batches = chunk.applied_batches or AppliedBatches()
                before = chunk.applied_batches.applied
                fresh = chunk.applied_batches.enter(of_batch, step_spec.skip)
                if fresh:
                    # Before the update, which uses the gradient up; in the lock, for copies keep the order.
                    copies = self._copies(shard.forward, token, meta, payload, stashed)
                    number_early = 0 if stashed is None else stashed.speculative
                    speculative_batches.apply(shard, number_early, before, step_spec, gradient)
                    chunk = shard.chunk
                about = {**_about(chunk.applied_batches), "already": not fresh, "before": before}
                bare = kind is Kind.COPY_BATCH or bool(meta.get("bare")) or isinstance(chunk, Slice)
                values = _NONE if bare else _values(chunk).clone()
        except Exception as error:
            if not fresh:
                raise
            log.exception("a chunk is given up: %s, batch %d", key, of_batch)
            raise self._store.give_up(key, error) from None  # half an update may be in it
        if fresh:
            self._counters.batches += 1
        else:
            self._counters.repeated += 1
        if kind is Kind.PUSH_BATCH:
            self._counters.pushes += 1
            if fresh and isinstance(chunk, Slice):
                rows = gradient.numel() // chunk.record_words
                self._counters.row_updates += rows
        if meta.get("bare"):
            about["bare"] = True
        frame = Frame(Kind.DONE if bare else Kind.VALUES, number, about, values.nbytes)
        self._acks.when_all(token, copies, lambda error: reply(_answered(frame, values, error)))

    def _copies(
        self,
        addresses: list[str],
        token: Token,
        meta: dict[str, Any],
        payload: torch.Tensor,
        stashed: StashedGradient | None,
    ) -> list[Future[Any]]:
        """Have the chunk's copies make the same update."""
        there = set[str]() if stashed is None else stashed.at(addresses)
        about: dict[str, Any] = {name: meta[name] for name in ("k", "r", STEP_SPEC_KEY)}
        named = {**about, "o": meta.get("o"), "me": meta.get("me")}
        about |= {name: meta[name] for name in _FORM if name in meta}
        return [
            self._announce(address, Kind.COPY_BATCH, token, named, payload[:0])
            if address in there
            else self._announce(address, Kind.COPY_BATCH, token, about, payload.clone())
            for address in addresses
        ]

    def _announce(
        self, address: str, kind: Kind, token: Token, about: dict[str, Any], payload: torch.Tensor
    ) -> Future[Any]:
        try:
            return self._steps.ask_for_copy(address, kind, token, about, payload)
        except (KeyError, ConnectionError) as error:
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    # ---- batches

    def _open(self, token: Token, meta: dict[str, Any]) -> None:
        clocks, bound = meta.get("clocks"), meta.get("bound")
        if (
            not isinstance(clocks, dict)
            or not 0 < len(clocks) <= MEMBERS_LIMIT
            or not all(type(clock) is int and 0 <= clock < _CLOCK_LIMIT for clock in clocks.values())
        ):
            raise FrameError("clocks gives the steps of at least one member")
        if bound is not None and not (type(bound) is int and bound >= 1):
            raise FrameError("bound is a number of steps, at least 1")
        leases = Leases(bound, IntervalSet.from_json(meta.get(INTERVALS_KEY)), dict(clocks))
        self._store.check_token(token)
        with self._lock:
            if self._token is not None and token < self._token:
                raise StaleError(f"generation {token} is over: {self._token} gives batches out")
            if token != self._token:
                self._token, self._leases = token, leases
        self._decide()

    def _finished(self, token: Token, meta: dict[str, Any]) -> None:
        member, done = str(meta.get("me")), _batches_in(meta, "done")
        self._store.check_token(token)
        with self._lock:
            if token == self._token and self._leases is not None:
                for number in done:
                    self._leases.done(member, number)
        self._decide()

    def _lease(self, token: Token, number: int, meta: dict[str, Any], reply: Reply) -> None:
        member, sent = str(meta.get("me")), _batches_in(meta, "sent")
        first, stop = number_in(meta, "first"), number_in(meta, "stop")
        if first >= stop:
            raise FrameError("a window of batches is not empty")
        self._store.check_token(token)
        asked, before = _Asked(token, member, first, stop, sent, number, reply), list[_Asked]()
        with self._lock:
            if token == self._token and self._leases is not None:
                before = [other for other in self._waiting if other.member == member]
                self._waiting = [other for other in self._waiting if other.member != member]
            self._waiting.append(asked)
        for other in before:
            other.reply(_refused(other.number, LeaseError(f"{member} has asked again")))
        self._decide(asked)

    def _decide(self, new: _Asked | None = None) -> None:
        """Answer every question that can be answered; `new` has not waited yet."""
        answers: list[tuple[Reply, Answer]] = []
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for asked in waiting:
                answer = self._decided(asked, waited=asked is not new)
                if answer is None:
                    self._waiting.append(asked)
                else:
                    answers.append((asked.reply, answer))
        for reply, answer in answers:
            reply(answer)

    def _decided(self, asked: _Asked, waited: bool) -> Answer | None:
        if self._token is None or self._leases is None or asked.token > self._token:
            return None  # its generation's batches are not known here yet
        if asked.token < self._token:
            return _refused(asked.number, StaleError(f"generation {asked.token} is over"))
        try:
            decision = self._leases.ask(asked.member, asked.first, asked.stop, asked.sent)
        except LeaseError as error:
            return _refused(asked.number, error)
        if isinstance(decision, Wait):
            return None
        finished = self._leases.finished.count(asked.first, asked.stop)
        about: dict[str, Any] = {"finished": finished, "waited": waited}
        if not isinstance(decision, Over):
            about[BATCH_KEY] = decision.number
        return Answer(Frame(Kind.DONE, asked.number, about))


def _owner(kind: Kind, meta: dict[str, Any]) -> str:
    """Return the member whose early push it is where several share a connection; "" on a member's own."""
    return str(meta.get("me")) if kind in (Kind.COPY_EARLY_PUSH, Kind.COPY_BATCH) else ""


def _about(applied_batches: AppliedBatches | None) -> dict[str, Any]:
    return (AppliedBatches() if applied_batches is None else applied_batches).to_json()


def _batches_in(meta: dict[str, Any], name: str) -> list[int]:
    value = meta.get(name, [])
    if (
        not isinstance(value, list)
        or len(value) > _NAMED_LIMIT
        or not all(type(n) is int and n >= 0 for n in value)
    ):
        raise FrameError(f"{name} is a list of at most {_NAMED_LIMIT} batch numbers")
    return value


def _values(chunk: Chunk | Slice) -> torch.Tensor:
    """Return the values that answer a push; none of a slice, whose rows are asked for by id."""
    return chunk.values if isinstance(chunk, Chunk) else _NONE


def _gradient(chunk: Chunk | Slice, meta: dict[str, Any], payload: torch.Tensor) -> torch.Tensor:
    """Flat, as the chunk's `apply` takes it; it may be the payload's memory. Raise SparseGradientError."""
    if isinstance(chunk, Slice):
        return chunk.records_in(payload, dtype_in(meta))
    if meta.get("sel"):
        return chunk.add(None, unpack(payload, chunk.dtype, chunk.values.numel()), None)
    return payload.view(dtype_in(meta)).to(chunk.dtype)


def _apply_postponed(
    of_batch: int, step_spec: StepSpec, payload: torch.Tensor, dtype: torch.dtype, piece: Slice
) -> None:
    """Make a batch on a slice that was on its way when the batch came."""
    piece.check(step_spec)
    piece.applied_batches = piece.applied_batches or AppliedBatches()
    if piece.applied_batches.enter(of_batch, step_spec.skip):
        piece.apply(piece.records_in(payload, dtype), step_spec)


def _answered(frame: Frame, values: torch.Tensor, error: str) -> Answer:
    if error:
        return _refused(frame.request, StepProtocolError(f"a copy could not be made: {error}"))
    return Answer(frame, memory(values))


def _refused(number: int, error: Exception) -> Answer:
    return Answer(Frame(Kind.REFUSED, number, {"error": type(error).__name__, "message": str(error)}))


REFUSALS: Final = (BatchNumberError, LeaseError)
