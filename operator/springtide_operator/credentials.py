"""The API server's address and our credentials for it: read from files, and read again.

In a pod the address comes from `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, which the kubelet
sets, never from a name: an operator that needs the cluster's DNS to start cannot start when that DNS is down.
The token of a pod lives for about an hour, and the kubelet replaces the file well before that; so every
request, also those of kopf's watches, carries the token that was on disk a few seconds ago.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping

import aiohttp
import kopf

from springtide_operator.api import names
from springtide_operator.guarded_http import Feed, GuardedResponse, response_class
from springtide_operator.settings import service_account_folder

log = logging.getLogger(__name__)

REREAD_SECONDS = 10.0  # a token is replaced when a fifth of its life is left: minutes
PAUSE_SECONDS = 1.0  # between two logins of kopf: credentials that are refused are not tried in a tight loop


def server_url(host: str, port: str) -> str:
    """Return the API server's URL.

    Args:
        host: An IPv4 or IPv6 address (the latter without brackets, as the kubelet writes it), or a name.
        port: The port as text.
    """
    return (
        f"https://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"https://{host}:{port}"
    )


def read_service_account(environ: Mapping[str, str]) -> kopf.ConnectionInfo | None:
    """Return what a pod is given, or None where there is no token.

    Raises:
        kopf.LoginError: There is a token but no address to use it at, or a file is empty.
        OSError: A file cannot be read.
    """
    folder = service_account_folder(environ)
    if not (folder / "token").exists():
        return None
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise kopf.LoginError(
            f"{folder} holds a service account's token, but KUBERNETES_SERVICE_HOST and"
            " KUBERNETES_SERVICE_PORT, which the kubelet sets in every pod, are not set"
        )
    token = (folder / "token").read_text(encoding="utf-8").strip()
    if not token:
        raise kopf.LoginError(f"{folder / 'token'} is empty")
    authority = folder / "ca.crt"
    namespace = folder / "namespace"
    return kopf.ConnectionInfo(
        server=server_url(host, port),
        ca_data=authority.read_text(encoding="ascii") if authority.exists() else None,
        token=token,
        default_namespace=namespace.read_text(encoding="utf-8").strip() if namespace.exists() else None,
    )


def find_credentials(settings: kopf.OperatorSettings | None = None) -> kopf.ConnectionInfo:
    """Return the credentials of KUBECONFIG when it is set, else of the pod, else of ~/.kube/config.

    Raises:
        kopf.LoginError: There is none of them, or a file cannot be read.
    """
    settings = settings if settings is not None else kopf.OperatorSettings()
    try:
        info = None if os.environ.get("KUBECONFIG") else read_service_account(os.environ)
        if info is None:
            found = kopf.login_with_kubeconfig(settings=settings, logger=log)
            info = found if isinstance(found, kopf.ConnectionInfo) else None
    except (OSError, KeyError, TypeError, AttributeError, UnicodeError) as error:
        raise kopf.LoginError(f"the cluster's credentials cannot be read: {error!r}") from error
    if info is not None:
        return info
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        raise kopf.LoginError(
            f"this pod has no token in {service_account_folder(os.environ)}: its"
            " automountServiceAccountToken, or that of its service account, is false"
        )
    raise kopf.LoginError("no cluster: set KUBECONFIG, or run in a pod with a service account")


class Credentials:
    """Credentials that are read again when they are `REREAD_SECONDS` old, and at once after a refusal."""

    def __init__(
        self,
        read: Callable[[], kopf.ConnectionInfo] = find_credentials,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._info: kopf.ConnectionInfo | None = None
        self._read_at = float("-inf")

    def current(self) -> kopf.ConnectionInfo:
        """Return the credentials to use now: those read before where they cannot be read at the moment.

        Raises:
            kopf.LoginError: There have been none yet.
        """
        now = self._clock()
        if self._info is None or now - self._read_at > REREAD_SECONDS:
            try:
                self._info = self._read()
            except kopf.LoginError as error:
                if self._info is None:
                    raise
                log.warning("going on with the credentials from before: %s", error)
            self._read_at = now
        return self._info

    def forget(self) -> None:
        """Read anew next time, and fail where that fails."""
        self._info = None

    def refused(self, headers: Mapping[str, str]) -> bool:
        """Read again after an answer 401; return whether there is another token now.

        Args:
            headers: The headers of authorization that were refused.
        """
        self._read_at = float("-inf")
        return self.current().as_http_headers() != headers


class Login:
    """Gives kopf a session whose every request carries the current token.

    kopf keeps one session until a request is refused with 401, and ends when a login handler then returns
    credentials that it has seen refused before. So each login makes a new session, which it has never seen;
    and a token that is replaced on disk interrupts no watch.
    """

    def __init__(
        self, credentials: Credentials | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._credentials = credentials or Credentials()
        self._clock = clock
        self._last = float("-inf")

    async def session(self, feed: Feed | None = None) -> kopf.AiohttpSession:
        """Return a new session.

        Args:
            feed: Takes the objects of lists and watches; None: kopf does.

        Raises:
            kopf.LoginError: There are no credentials.
        """
        wait = self._last + PAUSE_SECONDS - self._clock()
        if wait > 0:
            await asyncio.sleep(wait)
        self._last = self._clock()
        self._credentials.forget()  # kopf asks because it was refused
        info = self._credentials.current()
        context = info.as_ssl_context()
        known = info.ca_data

        async def authorize(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            nonlocal known
            now = self._credentials.current()
            if now.ca_data is not None and now.ca_data != known:
                # An authority that is being replaced: for a while servers show the old one or the new one.
                text = now.ca_data if isinstance(now.ca_data, str) else now.ca_data.decode("ascii")
                if text.startswith("-----BEGIN "):
                    context.load_verify_locations(cadata=text)
                known = now.ca_data
            request.headers.update(now.as_http_headers())
            return await handler(request)

        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            middlewares=(authorize,),
            proxy=info.proxy_url,
            trust_env=info.trust_env,
            headers={"User-Agent": names.USER_AGENT},
            # One object that kopf cannot read must not end kopf.
            response_class=GuardedResponse if feed is None else response_class(feed),
        )
        return kopf.AiohttpSession(
            server=info.server, aiohttp_session=session, default_namespace=info.default_namespace
        )
