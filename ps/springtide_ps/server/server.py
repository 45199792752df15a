"""A parameter server: a thread that reads and one that writes for each client, over one store."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from springtide_protocol.lobby import Guest, Lobby
from springtide_ps.params.chunk import ChunkError
from springtide_ps.params.embedding import TableError
from springtide_ps.params.optim import UpdateError
from springtide_ps.params.sparse_gradient import SparseGradientError
from springtide_ps.server.async_handler import KINDS as BATCH_KINDS
from springtide_ps.server.async_handler import REFUSALS, AsyncHandler
from springtide_ps.server.generation_spans import GenerationSpans
from springtide_ps.server.gradient_stash import GradientStash
from springtide_ps.server.kv_handler import Answer, Counters, KvHandler
from springtide_ps.server.kv_store import Store, StoreError
from springtide_ps.server.send_queue import SendQueue
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.server.sync_handler import KINDS, SyncHandler
from springtide_ps.wire.auth import Tokens
from springtide_ps.wire.client import ServerClient
from springtide_ps.wire.frames import NO_REPLY, PART_BYTES, Frame, FrameError, Header, Kind, memory
from springtide_ps.wire.keepalive import KEEPALIVE_SECONDS, Keepalive
from springtide_ps.wire.keys import STEP_SPEC_KEY
from springtide_ps.wire.options import OPTIONS_BYTES, ReceivedOptions, SharedOptions
from springtide_ps.wire.stream import HANDSHAKE_SECONDS, PeerClosedError, Stream, accept

log = logging.getLogger("springtide.ps")

_REFUSALS: Final = (
    StoreError,
    UpdateError,
    TableError,
    StepProtocolError,
    ChunkError,
    SparseGradientError,
    *REFUSALS,
    FrameError,  # of a request that came whole and lacks what it must have: the next one may be right
)
_GONE: Final = (PeerClosedError, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
CLIENTS_LIMIT: Final = 8192
"""Connected at a time: a thousand workers of eight processes; each takes two threads and a descriptor."""
_UNAUTHENTICATED_LIMIT: Final = 64
_TICK_SECONDS: Final = 0.5
_WINDOW_SECONDS: Final = 10.0
_MANY: Final = 5
_PROGRESS_SECONDS: Final = 0.5
_LOOK_SECONDS: Final = 0.002
_RANK_LIMIT: Final = 1 << 31


@dataclass
class Connection:
    """One client's connection: what is still to be sent to it, the options of parameter groups that it
    has sent, and the gradients that it had set aside."""

    stream: Stream
    name: str
    options: ReceivedOptions
    send_queue: SendQueue = field(default_factory=SendQueue)
    stash: GradientStash = field(default_factory=GradientStash)
    keepalive: Keepalive = field(default_factory=Keepalive)
    scratch: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    scratch_memory: memoryview = field(default_factory=lambda: memoryview(b""))


class Server:
    """Listens at once; `close` ends everything. `about` is told to every client that connects.

    tls: of this server. peers: for its own connections to other servers. part_bytes, threads: as of
    `ShardStore`.
    handshake: seconds in which a connection has proven that it knows the token, from its first byte on.
    spans: are told of generations; None: nobody is.
    """

    def __init__(
        self,
        store: Store,
        token: Tokens,
        bind: str = "",
        port: int = 0,
        about: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
        peers: ssl.SSLContext | None = None,
        part_bytes: int = PART_BYTES,
        handshake: float = HANDSHAKE_SECONDS,
        threads: int = 0,
        spans: GenerationSpans | None = None,
    ) -> None:
        if not token:
            raise ValueError("a parameter server needs the job's token")
        self.store, self.counters = store, Counters()
        self._kv_handler = KvHandler(store, self.counters, lambda: self.clients)
        self.sync_handler = SyncHandler(
            lambda address: ServerClient(address, token, tls=peers),
            store.memory_limit,
            self.counters,
            part_bytes,
            threads,
            spans,
        )
        # One limit for all that is here, by hand and of a job.
        store.others = lambda: self.sync_handler.store.unlocked_bytes
        self.sync_handler.others = lambda: store.held_bytes
        self.async_handler = AsyncHandler(self.sync_handler, self.counters, lambda: self.stashed_bytes)
        self._token, self._about, self._tls = token, about or {}, tls
        # Strangers do not count among the clients, or they would keep these out.
        self.lobby = Lobby(_UNAUTHENTICATED_LIMIT, handshake)
        self._proven = -math.inf  # when a connection has last proven itself
        self._full_since = math.inf  # when the lobby, full now, became so
        self._quiet = Quiet()
        self._options = SharedOptions()
        self._listener = socket.create_server((bind, port), backlog=1024)
        self._listener.settimeout(min(_TICK_SECONDS, handshake / 4))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._clients: dict[int, Connection] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._spawn(self._accept_for_ever, "springtide-ps-accept")
        self._spawn(self._send_keepalives, "springtide-ps-pulse")

    def close(self, timeout: float = 5.0) -> None:
        """Raise TimeoutError when a thread does not end."""
        self._closed.set()
        # A blocked accept() is not woken by close() alone.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.lobby.close()
        with self._lock:
            clients = list(self._clients.values())
            threads = list(self._threads)
        for client in clients:
            client.stream.abort()
        self.sync_handler.close()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
                if thread.is_alive():
                    raise TimeoutError(f"thread {thread.name} has not ended within {timeout:g} s")

    @property
    def connections(self) -> list[Connection]:
        """Return the connections of all clients, as of this moment."""
        with self._lock:
            return list(self._clients.values())

    @property
    def clients(self) -> int:
        """Return how many clients are connected."""
        return len(self._clients)

    def status(self) -> dict[str, int]:
        """Return how much the server holds, for its clients by hand and for a job together."""
        status, job = self.store.status(), self.sync_handler.store.holding
        return {
            **status,
            "keys": status["keys"] + job.pieces,
            "bytes": status["bytes"] + job.nbytes,
            "rows": status["rows"] + job.rows,
            "evicted": status["evicted"] + self.sync_handler.store.evicted,
        }

    @property
    def stashed_bytes(self) -> int:
        """Return the memory of the gradients that were set aside (`gradient_stash`)."""
        with self._lock:
            return sum(client.stash.nbytes for client in self._clients.values())

    def _spawn(self, target: Callable[..., None], name: str, *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:  # whoever closes the server joins what it finds, so it must have begun
            self._threads.add(thread)
            thread.start()

    # ---- connections

    def _accept_for_ever(self) -> None:
        while not self._closed.is_set():
            self.lobby.expire()
            self._let_guests_finish()
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                self._quiet.warn("accept: %s", error)
                self._closed.wait(0.1)
                continue
            try:
                guest = self.lobby.enter(sock, str(address[0]))
                if guest is None:
                    raise OSError("all strangers are being answered")
                self._spawn(
                    self._serve,
                    f"springtide-ps-{address[0]}:{address[1]}",
                    sock,
                    f"{address[0]}:{address[1]}",
                    guest,
                )
            except (OSError, RuntimeError) as error:  # no descriptor, or no thread, for one more
                self._quiet.warn("%s is refused: %s", address[0], error)
                sock.close()

    def _let_guests_finish(self) -> None:
        """Take no further connection into a full lobby while one after another proves itself there.

        A thousand workers come at once when a generation begins, and would drop each other. Where nobody
        proves anything for a while, a new connection takes an old one's place.
        """
        while len(self.lobby) >= self.lobby.most and not self._closed.is_set():
            now = time.monotonic()
            self._full_since = min(self._full_since, now)
            if now - max(self._proven, self._full_since) > _PROGRESS_SECONDS:
                return  # it stays full, and the next one does not wait again
            self._closed.wait(_LOOK_SECONDS)
        self._full_since = math.inf

    def _serve(self, sock: socket.socket, name: str, guest: Guest) -> None:
        try:
            stream = accept(sock, self._token, self._about, self._tls)
        except _GONE as error:
            # It may be one of the job's own, which was killed while it connected.
            if guest.dropped:
                self._quiet.warn("%s is dropped: it has not proven in time that it knows the token", name)
            else:
                log.info("%s has gone before it said who it is: %s", name, error)
            return
        except (OSError, FrameError) as error:
            self.counters.refused += 1
            self._quiet.warn("%s is refused: %s", name, error)
            return
        finally:
            self.lobby.leave(guest)
        self._proven = time.monotonic()
        if self.clients >= CLIENTS_LIMIT:
            self._quiet.warn("%s is refused: %d clients are connected", name, self.clients)
            stream.close()
            return
        client = Connection(stream, name, ReceivedOptions(self._options))
        with self._lock:
            self._clients[id(client)] = client
        try:
            self._spawn(self._write_for_ever, f"springtide-ps-write-{name}", client)
            if not self._closed.is_set():
                self._read_for_ever(client)
        except PeerClosedError:
            log.debug("%s is gone", name)
        except (OSError, FrameError) as error:
            log.warning("the connection of %s ends: %s", name, error)
        except Exception:
            # A fault of ours in one request: that client is sent away, the others stay.
            log.exception("a request of %s failed: its connection ends", name)
        finally:
            stream.abort()
            with self._lock:
                del self._clients[id(client)]
            client.send_queue.end()

    def _write_for_ever(self, client: Connection) -> None:
        broken = False
        while (answer := client.send_queue.take()) is not None:
            try:
                if not broken:
                    self._send(client.stream, answer)
            except OSError:
                # Its reader meets the same end; answers are taken on, so that leases are given back.
                broken = True
                client.stream.abort()
            finally:
                answer.done()
                client.send_queue.sent(answer)
        client.stream.close()

    def _send(self, stream: Stream, answer: Answer) -> None:
        try:
            stream.send(answer.frame, answer.payload, answer.since)
            sent = len(answer.payload)
            self.counters.bytes_out += sent
        except FrameError as error:
            # Whoever asked is told; without a word it and all who ask after it would wait for ever.
            stream.send(_refusal(answer.frame.request, error))

    def _send_keepalives(self) -> None:
        while not self._closed.wait(KEEPALIVE_SECONDS):
            with self._lock:
                clients = [client for client in self._clients.values() if client.stream.keepalives]
            for client in clients:
                if client.keepalive.due(client.send_queue):
                    client.send_queue.put(Answer(Frame(Kind.KEEPALIVE)))

    # ---- requests

    def _read_for_ever(self, client: Connection) -> None:
        reply = client.send_queue.put
        while True:
            client.send_queue.wait_for_room()
            client.keepalive.end()
            header, meta = client.stream.receive()
            client.keepalive.begin()
            in_batches = header.kind in BATCH_KINDS
            in_steps = in_batches or header.kind in KINDS
            handler: Any = self._kv_handler
            if in_steps:
                handler = self.async_handler if in_batches else self.sync_handler
            taken = False
            try:
                if header.kind is Kind.UNKNOWN:
                    raise FrameError("a request of a kind that this server's release does not know")
                if header.kind is Kind.OPTIONS:
                    if header.payload_bytes > OPTIONS_BYTES:
                        raise FrameError(f"{header.payload_bytes} bytes of options: {OPTIONS_BYTES} can be")
                    text, taken = bytearray(header.payload_bytes), True
                    client.stream.receive_into(memoryview(text))
                    client.options.take(meta, bytes(text))
                    if header.request != NO_REPLY:
                        reply(Answer(Frame(Kind.DONE, header.request)))
                    continue
                if meta.get(STEP_SPEC_KEY) is not None:
                    meta[STEP_SPEC_KEY] = client.options.read(meta[STEP_SPEC_KEY])
                handler.check(header, meta)
                if in_steps and header.request != NO_REPLY:
                    # It may wait for other clients, and for this one's own next words.
                    client.send_queue.open(header.request, _held_by(header), _rank_in(meta))
                own = self.sync_handler.spare_for(header, meta) if in_steps else None
                payload = (
                    self._payload(client, header.payload_bytes) if own is None else self._fill(client, own)
                )
                taken = True
                if in_batches:
                    self.async_handler.answer(header, meta, payload, reply, client.stash)
                elif in_steps:
                    self.sync_handler.answer(header, meta, payload, reply, own is not None)
                else:
                    handler.answer(header, meta, payload, reply)
            except _REFUSALS as error:
                if not taken:
                    client.stream.skip(header.payload_bytes)
                reply(Answer(_refusal(header.request, error)))

    def _payload(self, client: Connection, nbytes: int) -> torch.Tensor:
        if client.scratch.numel() < nbytes:
            client.scratch = torch.empty(nbytes, dtype=torch.uint8)
            client.scratch_memory = memory(client.scratch)
        if nbytes:
            client.stream.receive_into(client.scratch_memory[:nbytes])
            self.counters.bytes_in += nbytes
        return client.scratch if client.scratch.numel() == nbytes else client.scratch[:nbytes]

    def _fill(self, client: Connection, own: torch.Tensor) -> torch.Tensor:
        """Receive a payload into memory that is not the client's, and return it."""
        client.stream.receive_into(memory(own))
        self.counters.bytes_in += own.nbytes
        return own


class Quiet:
    """Warns a few times in ten seconds, and then counts: whoever floods the port shall not fill the log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since, self._logged, self._left_out = -math.inf, 0, 0

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless there have been too many."""
        with self._lock:
            now = self._clock()
            left_out = 0
            if now - self._since >= _WINDOW_SECONDS:
                left_out, self._since, self._logged, self._left_out = self._left_out, now, 0, 0
            self._logged += 1
            quiet = self._logged > _MANY
            self._left_out += quiet
        if left_out:
            log.warning("%d more warnings about connections were left out", left_out)
        if not quiet:
            log.warning(text, *args)


def _refusal(request: int, error: Exception) -> Frame:
    return Frame(Kind.REFUSED, request, {"error": type(error).__name__, "message": str(error)[:4000]})


def _held_by(header: Header) -> int:
    """Return the bytes of its payload that a request keeps until it is answered."""
    return header.payload_bytes if header.kind is Kind.ROWS else 0


def _rank_in(meta: dict[str, Any]) -> int:
    """Return how many values the client needs before those that it asks for."""
    rank = meta.get("rank", 0)
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < _RANK_LIMIT:
        raise FrameError(f"{rank!r} is no rank of a request")
    return rank
