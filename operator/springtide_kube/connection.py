"""Connections: the address of the API server and the credentials for it, read by `kubernetes.aio`, and read
again.

In a pod the address comes from `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, which the kubelet
sets, never from a name: a program that needs the cluster's DNS to start cannot start when that DNS is down.
The token of a pod lives for about an hour, and the kubelet replaces the file well before that; so every
request carries the token that was on disk a few seconds ago.

Tasks: all of one event loop; `Connections` has a lock so that one task reads while the others wait for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config.incluster_config import InClusterConfigLoader

from springtide_kube.errors import CredentialsError, explain

log = logging.getLogger("springtide.kube")

REREAD_SECONDS = 10.0  # a pod's token is replaced when a fifth of its life is left: minutes
REREAD_KUBECONFIG_SECONDS = 60.0  # which may run a plugin
EXPIRY_SECONDS = 300.0  # before its end a plugin's token is fetched anew, as kubernetes.aio does
LOAD_SECONDS = 120.0  # a plugin may ask its user

_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_FILES = ("cert_file", "key_file")


@dataclass(frozen=True)
class Connection:
    """One reading of the credentials.

    Attributes:
        configuration: of `kubernetes.aio`: address, authority, client certificate, proxy, token.
        namespace: in which the reader works; None: not said.
        seconds: until they are to be read again.
    """

    configuration: Configuration
    namespace: str | None = None
    seconds: float = REREAD_SECONDS

    @property
    def server(self) -> str:
        """Return the API server's URL without a slash at its end."""
        return str(self.configuration.host).rstrip("/")

    @property
    def proxy(self) -> str | None:
        """Return the URL of the proxy; None for none."""
        proxy: str | None = self.configuration.proxy
        return proxy

    @property
    def server_hostname(self) -> str | None:
        """Return the name that the server's certificate has to have; None: that of its URL."""
        name: str | None = self.configuration.tls_server_name
        return name

    def api(self, **session: Any) -> ApiClient:
        """Return a new client of `kubernetes.aio`, which has asked nobody yet.

        Args:
            session: arguments of its `aiohttp.ClientSession`.

        Raises:
            CredentialsError: the authority or the client's certificate cannot be used.
        """
        configuration = copy.copy(self.configuration)
        configuration.connection_pool_maxsize = 0  # callers say how much they ask at a time
        configuration.client_session_kwargs = session
        try:
            return ApiClient(configuration)
        except (OSError, ValueError) as error:
            raise CredentialsError(
                f"the credentials for {self.server} cannot be used: {explain(error)}"
            ) from error

    def ssl_context(self) -> ssl.SSLContext:
        """Return a new context for connections to the server. Raise CredentialsError."""
        context: ssl.SSLContext = self.api().rest_client.ssl_context
        return context

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that say who asks; none for a client certificate, or nobody."""
        token = self.configuration.api_key.get("BearerToken")
        return {"Authorization": token} if token else {}

    @cached_property
    def endpoint(self) -> tuple[object, ...]:
        """Return what open connections were made with: where it differs, they are of no use any more."""
        found = self.configuration
        files = [_stamp(getattr(found, name)) for name in _FILES]
        return (
            found.host,
            found.ca_cert_data,
            found.verify_ssl,
            found.tls_server_name,
            found.proxy,
            *files,
        )


def at(server: str, token: str | None = None) -> Connection:
    """Return the connection to a server in plain HTTP.

    Args:
        server: its URL.
        token: of the caller; None: nobody in particular.
    """
    configuration = Configuration(host=server)
    if token is not None:
        configuration.api_key = {"BearerToken": f"Bearer {token}"}
    return Connection(configuration)


def in_cluster(folder: Path, environ: Mapping[str, str]) -> Connection:
    """Read what a pod is given.

    Args:
        folder: with the pod's `token`, `ca.crt` and `namespace`.
        environ: of its process.

    Raises:
        CredentialsError: there is no address to use the token at, or a file is missing or empty.
    """
    host, port = environ.get(_HOST), environ.get(_PORT)
    if not host or not port:
        raise CredentialsError(
            f"{folder} holds a service account's token, but {_HOST} and {_PORT}, which the kubelet sets in"
            " every pod, are not set"
        )
    configuration = Configuration()
    try:
        InClusterConfigLoader(
            str(folder / "token"),
            str(folder / "ca.crt"),
            try_refresh_token=False,  # its hook reads once a minute, and never after a refusal
            environ={_HOST: host.strip("[]"), _PORT: port},
        ).load_and_set(configuration)
        _take_authority(configuration)
        namespace = folder / "namespace"
        name = namespace.read_text(encoding="utf-8").strip() if namespace.exists() else None
    except (config.ConfigException, OSError, UnicodeError) as error:
        raise CredentialsError(f"the service account in {folder} cannot be read: {error}") from error
    token = str(configuration.api_key["BearerToken"]).partition(" ")[2].strip()
    if not token:
        raise CredentialsError(f"{folder / 'token'} is empty")
    configuration.api_key = {"BearerToken": f"Bearer {token}"}
    return Connection(configuration, name)


def kubeconfig_paths(explicit: str | None = None) -> list[str]:
    """Return the files that kubectl would read: the one given, else $KUBECONFIG's, else ~/.kube/config."""
    text = explicit or os.environ.get("KUBECONFIG") or os.path.join("~", ".kube", "config")
    return [os.path.expanduser(path) for path in text.split(os.pathsep) if path]


def existing(paths: Sequence[str]) -> list[str]:
    """Return those of the files that are there."""
    return [path for path in paths if Path(path).is_file()]


async def from_kubeconfig(paths: Sequence[str], context: str | None = None) -> Connection:
    """Read kubeconfig files, as kubectl would.

    Args:
        paths: of the files, of which the first that defines something wins; those that are missing are
            left out.
        context: of the kubeconfig; None: its current one.

    Raises:
        CredentialsError: there is none, or it cannot be used.
    """
    there = existing(paths)
    if not there:
        raise CredentialsError(f"no kubeconfig: {' and '.join(paths)} not found")
    merged = os.pathsep.join(there)
    configuration = Configuration()
    try:
        contexts, current = config.list_kube_config_contexts(merged)
        chosen = next((c for c in contexts if c["name"] == context), None) if context else current
        if chosen is None:
            names = ", ".join(c["name"] for c in contexts)
            raise CredentialsError(f"{merged}: there is no context {context!r}, only: {names}")
        async with asyncio.timeout(LOAD_SECONDS):
            loader = await config.load_kube_config(
                merged, context=context, client_configuration=configuration, persist_config=False
            )
        _take_authority(configuration)
    except config.ConfigException as error:
        raise CredentialsError(f"{merged}: no usable kubeconfig: {error}") from error
    except TimeoutError as error:
        raise CredentialsError(f"{merged}: its plugin gave no credentials in {LOAD_SECONDS:.0f} s") from error
    except (ValueError, TypeError, KeyError, AttributeError, OSError, yaml.YAMLError) as error:
        raise CredentialsError(f"{merged}: no usable kubeconfig: {type(error).__name__}: {error}") from error
    return Connection(configuration, chosen["context"].get("namespace"), _seconds(loader))


class Connections:
    """Connections that are read again when they are old, and at once after a refusal."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Connection]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._found: Connection | None = None
        self._due = float("-inf")
        self._reading = asyncio.Lock()

    async def current(self) -> Connection:
        """Return the connection to use now: the one from before where it cannot be read at the moment.

        Raises:
            CredentialsError: there has been none yet.
        """
        found = self._found
        if found is not None and self._clock() < self._due:
            return found
        async with self._reading:
            if self._found is not None and self._clock() < self._due:
                return self._found
            try:
                self._found = await self._read()
            except CredentialsError as error:
                if self._found is None:
                    raise
                log.warning("going on with the credentials from before: %s", error)
            self._due = self._clock() + self._found.seconds
            return self._found

    def forget(self) -> None:
        """Read anew next time, and fail where that fails."""
        self._found = None

    async def refused(self, headers: Mapping[str, str]) -> bool:
        """Read again after an answer 401; return whether there are other credentials now.

        Args:
            headers: those of authorization that were refused.
        """
        if self._found is not None and self._found.headers == headers:
            self._due = float("-inf")
        return (await self.current()).headers != headers


def _take_authority(configuration: Configuration) -> None:
    """Put the text of the authority's file in the place of its path: so it is seen when it is replaced."""
    if configuration.ssl_ca_cert is not None:
        configuration.ca_cert_data = Path(configuration.ssl_ca_cert).read_text("ascii", errors="ignore")
        configuration.ssl_ca_cert = None


def _seconds(loader: Any) -> float:
    """Return the time until a kubeconfig is to be read again: longer where its plugin says so."""
    end = getattr(loader, "exec_plugin_expiry", None)
    if end is None:
        return REREAD_KUBECONFIG_SECONDS
    left = (end - datetime.now(UTC)).total_seconds() - EXPIRY_SECONDS
    return max(REREAD_KUBECONFIG_SECONDS, float(left))


def _stamp(path: str | None) -> tuple[str, int] | None:
    """Return a file and when it was written."""
    if path is None:
        return None
    try:
        return path, os.stat(path).st_mtime_ns
    except OSError:
        return path, 0
