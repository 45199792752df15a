"""A parameter server: a thread that reads and one that writes for each client, over one store."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from springtide_ps.frames import DTYPES, PAYLOAD_LIMIT, Frame, FrameError, Header, Kind, memory
from springtide_ps.store import Entry, Lease, Store, StoreError
from springtide_ps.stream import PeerClosedError, Stream, accept
from springtide_ps.updates import Update, UpdateError

log = logging.getLogger("springtide.ps")

_CLIENTS_LIMIT: Final = 512
_ANSWERS_LIMIT: Final = 64  # queued per client; then its requests wait, so memory stays bounded
_RANK_LIMIT: Final = 16


@dataclass(slots=True)
class _Answer:
    frame: Frame
    lease: Lease | None = None
    entry: Entry | None = None


@dataclass
class Counters:
    """Since the start. Bytes of tensors."""

    pushes: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0


@dataclass
class _Client:
    stream: Stream
    name: str
    answers: queue.Queue[_Answer | None] = field(default_factory=lambda: queue.Queue(_ANSWERS_LIMIT))
    scratch: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))


class Server:
    """Listens at once; `close` ends everything. `about` is told to every client that connects."""

    def __init__(
        self,
        store: Store,
        token: str,
        bind: str = "",
        port: int = 0,
        about: dict[str, Any] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not token:
            raise ValueError("a parameter server needs the job's token")
        self.store, self.counters = store, Counters()
        self._token, self._about, self._tls = token, about or {}, tls
        self._listener = socket.create_server((bind, port), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._clients: dict[int, _Client] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._spawn(self._accept_for_ever, "springtide-ps-accept")

    def close(self, timeout: float = 5.0) -> None:
        """Raise TimeoutError when a thread does not end."""
        self._closed.set()
        # A blocked accept() is not woken by close() alone.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients.values())
            threads = list(self._threads)
        for client in clients:
            client.stream.abort()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)
                if thread.is_alive():
                    raise TimeoutError(f"thread {thread.name} has not ended within {timeout:g} s")

    @property
    def clients(self) -> int:
        return len(self._clients)

    def _spawn(self, target: Callable[..., None], name: str, *args: object) -> None:
        def run() -> None:
            try:
                target(*args)
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    # ---- connections

    def _accept_for_ever(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                log.warning("accept: %s", error)
                self._closed.wait(0.1)
                continue
            with self._lock:
                full = len(self._threads) > 2 * _CLIENTS_LIMIT
            if full:
                log.warning("%s is refused: %d clients are connected", address[0], self.clients)
                sock.close()
                continue
            self._spawn(
                self._serve, f"springtide-ps-{address[0]}:{address[1]}", sock, f"{address[0]}:{address[1]}"
            )

    def _serve(self, sock: socket.socket, name: str) -> None:
        try:
            stream = accept(sock, self._token, self._about, self._tls)
        except (OSError, FrameError) as error:
            self.counters.refused += 1
            log.warning("%s is refused: %s", name, error)
            return
        client = _Client(stream, name)
        with self._lock:
            self._clients[id(client)] = client
        self._spawn(self._write_for_ever, f"springtide-ps-write-{name}", client)
        try:
            if not self._closed.is_set():
                self._read_for_ever(client)
        except PeerClosedError:
            log.debug("%s is gone", name)
        except (OSError, FrameError) as error:
            log.warning("the connection of %s ends: %s", name, error)
        finally:
            stream.abort()
            with self._lock:
                del self._clients[id(client)]
            client.answers.put(None)

    def _write_for_ever(self, client: _Client) -> None:
        broken = False
        while (answer := client.answers.get()) is not None:
            try:
                if not broken:
                    payload = memory(answer.lease.values) if answer.lease is not None else memoryview(b"")
                    client.stream.send(answer.frame, payload)
                    self.counters.bytes_out += len(payload)
            except OSError:
                # Its reader meets the same end; answers are taken on, so that leases are given back.
                broken = True
                client.stream.abort()
            finally:
                if answer.entry is not None and answer.lease is not None:
                    answer.entry.give_back(answer.lease)
        client.stream.close()

    # ---- requests

    def _read_for_ever(self, client: _Client) -> None:
        while True:
            header, meta = client.stream.receive()
            taken = False
            try:
                entry, nbytes = self._admit(header, meta)
                payload = self._payload(client, header, nbytes)
                taken = True
                answer = self._answer(header, meta, entry, payload)
            except (StoreError, UpdateError) as error:
                if not taken:
                    client.stream.skip(header.payload_bytes)
                refusal = {"error": type(error).__name__, "message": str(error)}
                answer = _Answer(Frame(Kind.REFUSED, header.request, refusal))
            client.answers.put(answer)

    def _admit(self, header: Header, meta: dict[str, Any]) -> tuple[Entry | None, int]:
        """The entry that is meant, and how many bytes must follow. Nothing is allocated before.

        Raises StoreError, and FrameError for what no client of ours sends.
        """
        key = meta.get("key", "")
        if not isinstance(key, str):
            raise FrameError("a key is a string")
        entry, nbytes = None, 0
        if header.kind in (Kind.PUSH, Kind.PULL, Kind.PUSH_PULL):
            entry = self.store.entry(key)
            nbytes = 0 if header.kind is Kind.PULL else entry.nbytes
        elif header.kind is Kind.INIT:
            shape, dtype = _shape_of(meta)
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > PAYLOAD_LIMIT:
                raise StoreError(
                    f"{key!r} has {nbytes} bytes, {PAYLOAD_LIMIT} are the limit of one key: cut it"
                )
            self.store.check_room(key, nbytes)
        elif header.kind not in (Kind.UPDATE, Kind.STATUS):
            raise FrameError(f"{header.kind.name} is no request")
        if header.payload_bytes != nbytes:
            raise StoreError(
                f"{header.kind.name} of {key!r} brings {header.payload_bytes} bytes, {nbytes} belong there: "
                "push what init() had, in shape and dtype"
            )
        return entry, nbytes

    def _payload(self, client: _Client, header: Header, nbytes: int) -> torch.Tensor:
        if client.scratch.numel() < nbytes:
            client.scratch = torch.empty(nbytes, dtype=torch.uint8)
        payload = client.scratch[:nbytes]
        if nbytes:
            client.stream.receive_into(memory(payload))
            self.counters.bytes_in += nbytes
        return payload

    def _answer(
        self, header: Header, meta: dict[str, Any], entry: Entry | None, payload: torch.Tensor
    ) -> _Answer:
        """Carry the request out. Raises StoreError or UpdateError."""
        if header.kind is Kind.STATUS:
            return _Answer(Frame(Kind.DONE, header.request, {**self.store.status(), "clients": self.clients}))
        if header.kind is Kind.UPDATE:
            options = {k: v for k, v in meta.items() if k != "name"}
            self.store.use(Update(str(meta.get("name")), options))
            return _Answer(Frame(Kind.DONE, header.request))
        if header.kind is Kind.INIT:
            shape, dtype = _shape_of(meta)
            created = self.store.create(meta["key"], payload.view(dtype).reshape(shape))
            return _Answer(Frame(Kind.DONE, header.request, {"created": created}))
        assert entry is not None
        if header.kind is Kind.PULL:
            self.counters.pulls += 1
            lease = entry.lease()
        else:
            self.counters.pushes += 1
            pushed = payload.view(entry.dtype).reshape(entry.shape)
            if header.kind is Kind.PUSH:
                return _Answer(Frame(Kind.DONE, header.request, {"version": entry.push(pushed)}))
            lease = entry.push_pull(pushed)
        frame = Frame(Kind.VALUES, header.request, {"version": lease.version}, entry.nbytes)
        return _Answer(frame, lease, entry)


def _shape_of(meta: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    shape, dtype = meta.get("shape"), DTYPES.get(str(meta.get("dtype")))
    if dtype is None:
        raise StoreError(f"a tensor of {meta.get('dtype')!r} cannot be held: {', '.join(DTYPES)} can")
    if (
        not isinstance(shape, list)
        or len(shape) > _RANK_LIMIT
        or not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**40 for n in shape)
    ):
        raise StoreError(f"{shape!r} is no shape")
    return tuple(shape), dtype
