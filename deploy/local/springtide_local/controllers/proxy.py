"""Services' addresses: a TCP listener per port, spliced to a ready endpoint, as kube-proxy would route it.

A port listens only while it has an endpoint, so that a connection without one is refused at once. When either
side's connection ends, the other one is ended too.

Tasks: one event loop, without locks. Informers' callbacks note changes and set `_wake`; one task opens and
closes listeners, and asyncio's protocols splice the connections.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from typing import Any, cast

from springtide_local.events import EventRecorder
from springtide_local.informer import Change, Informers, key_of
from springtide_local.ports import StorePort

Object = dict[str, Any]
Backend = tuple[str, int]
_log = logging.getLogger(__name__)
_HIGH_WATER = 1 << 20
_DIAL_TIMEOUT = 5.0


def backends_of(service: Object, slices: list[Object]) -> dict[int, list[Backend]]:
    """Return, by TCP port of the Service, the addresses that new connections go to; empty for headless and
    external Services.

    Args:
        service: the Service.
        slices: its EndpointSlices.
    """
    spec = service["spec"]
    if not spec.get("clusterIP") or spec["clusterIP"] == "None":
        return {}
    found: dict[int, list[Backend]] = {}
    for port in spec.get("ports") or []:
        if (port.get("protocol") or "TCP") != "TCP":
            continue
        ready = found.setdefault(int(port["port"]), [])
        for part in slices:
            numbers = [
                p["port"]
                for p in part.get("ports") or []
                if (p.get("name") or "") == (port.get("name") or "")
            ]
            for endpoint in part.get("endpoints") or []:
                if numbers and (endpoint.get("conditions") or {}).get("ready", True):
                    ready.append((endpoint["addresses"][0], int(numbers[0])))
    return found


class _Half(asyncio.Protocol):
    """One of the two connections of a spliced pair. Received bytes are written to the other one, as fast as
    that takes them.
    """

    def __init__(self, client: bool, peer: _Half | None = None) -> None:
        self.client = client
        self.transport: asyncio.Transport | None = None
        self.peer = peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER)
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Before Python 3.11.4 reading begins after this call, also where it was paused here.
        asyncio.get_running_loop().call_soon(self._keep_unread)

    def _keep_unread(self) -> None:
        """Pause reading until there is a peer to write to."""
        if self.peer is None and self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def join(self, peer: _Half) -> None:
        """Resume reading, since there is a peer now that takes the bytes."""
        self.peer = peer
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.write(data)

    def eof_received(self) -> bool:
        peer = self.peer.transport if self.peer is not None else None
        if not self.client or peer is None:
            # A backend that closed or died: the client is told at once, after what was still on its way.
            return False
        if peer.can_write_eof() and not peer.is_closing():
            peer.write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        peer = self.peer.transport if self.peer is not None else None
        if peer is not None and not peer.is_closing():
            if exc is not None and isinstance(exc, ConnectionError):
                peer.abort()
            else:
                peer.close()

    def pause_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None:
            self.peer.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.peer is not None and self.peer.transport is not None and not self.peer.transport.is_closing():
            self.peer.transport.resume_reading()


class _Port:
    """A listener on one address and port of a Service, and the endpoints behind it."""

    def __init__(self, address: str, port: int) -> None:
        self.address = address
        self.port = port
        self.backends: list[Backend] = []
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._dials: set[asyncio.Task[None]] = set()

    async def listen(self) -> None:
        """Raise OSError when the port cannot be had."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                self._accept, self.address, self.port, backlog=512, reuse_address=True
            )

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for dial in self._dials:
            dial.cancel()

    def _accept(self) -> asyncio.Protocol:
        client = _Half(client=True)
        task = asyncio.get_running_loop().create_task(self._dial(client))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)
        return client

    async def _dial(self, client: _Half) -> None:
        loop = asyncio.get_running_loop()
        backends = list(self.backends)
        start = next(self._turn)
        for offset in range(len(backends)):
            host, port = backends[(start + offset) % len(backends)]
            try:
                async with asyncio.timeout(_DIAL_TIMEOUT):
                    _, backend = await loop.create_connection(
                        lambda: _Half(client=False, peer=client), host, port
                    )
            except (OSError, TimeoutError):
                continue
            if client.transport is None or client.transport.is_closing():
                if backend.transport is not None:
                    backend.transport.abort()
                return
            client.join(backend)
            return
        if client.transport is not None:
            client.transport.abort()


class ServiceProxy:
    """Keeps the listeners in step with Services and EndpointSlices."""

    def __init__(self, store: StorePort, informers: Informers) -> None:
        self._services = informers.of("services")
        self._slices = informers.of("endpointslices.discovery.k8s.io")
        self._events = EventRecorder(store, "kube-proxy")
        self._ports: dict[tuple[str, str], dict[int, _Port]] = {}
        self._changed: dict[tuple[str, str], None] = {}
        self._wake = asyncio.Event()
        self._services.on_change(lambda change: self._mark(key_of(change.object)))
        self._slices.on_change(self._on_slice)

    def _on_slice(self, change: Change) -> None:
        metadata = change.object["metadata"]
        name = (metadata.get("labels") or {}).get("kubernetes.io/service-name")
        if name:
            self._mark((metadata["namespace"], name))

    def _mark(self, key: tuple[str, str]) -> None:
        self._changed[key] = None
        self._wake.set()

    async def run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._changed:
                    key = next(iter(self._changed))
                    del self._changed[key]
                    await self._sync(key)
        finally:
            for ports in self._ports.values():
                for port in ports.values():
                    await port.close()

    async def _sync(self, key: tuple[str, str]) -> None:
        namespace, name = key
        service = self._services.get(namespace, name)
        wanted: dict[int, list[Backend]] = {}
        address = ""
        if service is not None:
            slices = [
                part
                for part in self._slices.all(namespace)
                if (part["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == name
            ]
            wanted = backends_of(service, slices)
            address = service["spec"].get("clusterIP") or ""
        known = self._ports.setdefault(key, {})
        for number, port in list(known.items()):
            if not wanted.get(number) or port.address != address:
                await known.pop(number).close()
        for number, backends in wanted.items():
            if not backends:
                continue
            port = known.get(number) or _Port(address, number)
            port.backends = backends
            try:
                await port.listen()
            except OSError as error:
                text = f"port {number} of {address} cannot be opened: {error.strerror or error}"
                if error.errno == 13:
                    text += "; ports below 1024 need root here, so give the Service a higher port"
                _log.warning("service %s/%s: %s", namespace, name, text)
                if service is not None:
                    self._events.warning(service, "FailedToListen", text)
                continue
            known[number] = port
        if service is None:
            self._ports.pop(key, None)
