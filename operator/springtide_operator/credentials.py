"""The operator's credentials, for its own requests and for kopf's.

Both are read by `springtide_kube.connection`, so that every request, also those of kopf's watches, carries
the token that was on disk a few seconds ago.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import aiohttp
import kopf

from springtide_kube.connection import (
    Connection,
    Connections,
    from_kubeconfig,
    in_cluster,
    kubeconfig_paths,
)
from springtide_kube.errors import CredentialsError
from springtide_operator.api import names
from springtide_operator.guarded_http import Feed, GuardedResponse, response_class
from springtide_operator.kopf_lists import KopfLists
from springtide_operator.settings import service_account_folder

PAUSE_SECONDS = 1.0  # between two logins of kopf: credentials that are refused are not tried in a tight loop


async def find_connection() -> Connection:
    """Return the connection of KUBECONFIG when it is set, else of the pod, else of ~/.kube/config.

    Raises:
        CredentialsError: there is none of them, or a file cannot be read.
    """
    if os.environ.get("KUBECONFIG"):
        return await from_kubeconfig(kubeconfig_paths())
    folder = service_account_folder(os.environ)
    if (folder / "token").exists():
        return in_cluster(folder, os.environ)
    try:
        return await from_kubeconfig(kubeconfig_paths())
    except CredentialsError as error:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            raise CredentialsError(
                f"this pod has no token in {folder}: its automountServiceAccountToken, or that of its service"
                " account, is false"
            ) from error
        raise CredentialsError(
            f"no cluster: set KUBECONFIG, or run in a pod with a service account ({error})"
        ) from error


class Login:
    """Gives kopf a session whose every request carries the current token.

    kopf keeps one session until a request is refused with 401, and ends when a login handler then returns
    credentials that it has seen refused before. So each login makes a new session, which it has never seen;
    and a token that is replaced on disk interrupts no watch.
    """

    def __init__(
        self, connections: Connections | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connections = connections or Connections(find_connection)
        self._clock = clock
        self._last = float("-inf")

    async def session(self, feed: Feed | None = None, lists: KopfLists | None = None) -> kopf.AiohttpSession:
        """Return a new session.

        Args:
            feed: Takes the objects of lists and watches; None: kopf does.
            lists: Hears of them, with a feed.

        Raises:
            CredentialsError: There are no credentials.
        """
        wait = self._last + PAUSE_SECONDS - self._clock()
        if wait > 0:
            await asyncio.sleep(wait)
        self._last = self._clock()
        self._connections.forget()  # kopf asks because it was refused
        found = await self._connections.current()
        context = found.ssl_context()
        known = found.configuration.ca_cert_data

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            nonlocal known
            now = await self._connections.current()
            authority = now.configuration.ca_cert_data
            if authority is not None and authority != known:
                # An authority that is being replaced: for a while servers show the old one or the new one.
                context.load_verify_locations(cadata=authority)
                known = authority
            request.headers.update(now.headers)
            request.server_hostname = found.server_hostname
            return await handler(request)

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            middlewares=(authorize,),
            proxy=found.proxy,
            headers={"User-Agent": names.USER_AGENT},
            # One object that kopf cannot read must not end kopf.
            response_class=GuardedResponse if feed is None else response_class(feed, lists or KopfLists()),
        )
        return kopf.AiohttpSession(
            server=found.server, aiohttp_session=session, default_namespace=found.namespace
        )
