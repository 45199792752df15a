"""The API server: one aiohttp application on a loopback address, HTTPS, in the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from springtide_local.api.auth import Tokens
from springtide_local.api.gc import Collector
from springtide_local.api.handlers import Api
from springtide_local.api.housekeeping import Housekeeper
from springtide_local.api.logs import LogProvider
from springtide_local.api.requests import Audit
from springtide_local.api.store import Store
from springtide_local.pki import ADMIN, MASTERS, Authority, kubeconfig, server_context

_LOG = logging.getLogger(__name__)
BODY_LIMIT = 3 * 1024 * 1024
_STOP_SECONDS = 2.0


class ApiServer:
    """Serves `store`. `folder` receives the CA certificate and the server's key; `port` 0 takes a free
    one.

    No token of a service account lives for more than `longest_token` seconds.

    Register the kubelet's logs with `set_log_provider`. `audit` tells who used what. `tokens` issues bearer
    tokens.
    """

    def __init__(
        self,
        store: Store,
        folder: Path,
        address: str = "127.0.0.1",
        port: int = 0,
        longest_token: float | None = None,
    ) -> None:
        self.store = store
        self.authority = Authority()
        store.authority = self.authority.certificate.decode()
        self.tokens = Tokens(store, longest_token)
        self.audit = Audit()
        self._api = Api(store, self.tokens, self.audit)
        self._folder = folder
        self._address = address
        self._port = port
        self._runner: web.AppRunner | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """`https://ADDRESS:PORT`, known once started."""
        return f"https://{self._address}:{self._port}"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request that came some other way than through the server's own listener."""
        return await self._api.handle(request)

    def set_log_provider(self, provider: LogProvider) -> None:
        self._api.log_provider = provider

    def kubeconfig(
        self, user: str = ADMIN, groups: Sequence[str] = (MASTERS,), namespace: str = "default"
    ) -> str:
        """Return a kubeconfig (YAML) with a client certificate.

        Args:
            user: its common name.
            groups: that the user is in.
            namespace: for commands that name none.
        """
        pair = self.authority.client(user, groups)
        return kubeconfig(self.url, self.authority, client=pair, namespace=namespace)

    def token_kubeconfig(self, token: str, namespace: str = "default") -> str:
        """Return a kubeconfig (YAML) with a bearer token.

        Args:
            token: that this server has issued.
            namespace: for commands that name none.
        """
        return kubeconfig(self.url, self.authority, token=token, namespace=namespace)

    def application(self) -> web.Application:
        """Return what answers requests, without a listener, TLS or controllers."""
        application = web.Application(client_max_size=BODY_LIMIT)
        application.router.add_route("*", "/{path:.*}", self._api.handle)
        return application

    async def start(self) -> None:
        """Raise OSError when the address cannot be bound."""
        context = server_context(self.authority, [self._address], self._folder)
        self._runner = web.AppRunner(
            self.application(), access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_SECONDS
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._address, self._port, ssl_context=context)
        await site.start()
        self._port = self._runner.addresses[0][1]
        for worker in (Collector(self.store), Housekeeper(self.store)):
            self._tasks.append(asyncio.create_task(worker.run(), name=type(worker).__name__))
        for task in self._tasks:
            task.add_done_callback(_report)

    async def stop(self) -> None:
        """End all watches and logs, then close."""
        self.store.end_watches()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.error("a controller of the API server stopped", exc_info=task.exception())
