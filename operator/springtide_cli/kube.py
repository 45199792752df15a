"""The port to Kubernetes: JSON requests and streams of lines, with the user's own kubeconfig.

Everything above it (`apply`, `watch`) is written against `KubePort`, so a test needs no API server; with one
it is a `springtide_kube.client.Client`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from springtide_cli.errors import Refused
from springtide_operator.api import names

if TYPE_CHECKING:
    from springtide_kube.client import Client

Object = dict[str, Any]

CALL_SECONDS = 15.0
USER_AGENT = f"springtide/{names.PROGRAM_VERSION}"


class KubePort(Protocol):
    namespace: str  # the context's

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL, from `/api` or `/apis` on.
            body: plain JSON; None: no body.
            query: parameters of the URL.
            content_type: of the body.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: nobody answers in time.
        """
        ...

    def lines(self, path: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Yield lines of a streamed answer until the server ends it.

        Args:
            path: of the URL, from `/api` or `/apis` on.
            query: parameters of the URL.

        Raises:
            ApiRefusal: the server refuses.
            Unreachable: nobody answers, or the connection breaks.
        """
        ...


async def connect(kubeconfig: str | None = None, context: str | None = None) -> Client:
    """Connect as kubectl would.

    Args:
        kubeconfig: path; None: KUBECONFIG, or the usual file.
        context: of the kubeconfig; None: its current one.

    Raises:
        Refused: there is no usable kubeconfig.
    """
    # Half a second, which only those commands need that talk to a cluster.
    from springtide_kube import connection
    from springtide_kube.client import Caller, Client
    from springtide_kube.errors import CredentialsError

    paths = connection.kubeconfig_paths(kubeconfig)
    read = partial(connection.from_kubeconfig, paths, context)
    client = Client(connection.Connections(read), Caller(USER_AGENT, trust_env=True), CALL_SECONDS)
    try:
        await client.connect()
    except CredentialsError as error:
        hint = (
            ""
            if connection.existing(paths)
            else ". Set KUBECONFIG or --kubeconfig to reach a cluster, or use --local to run on an embedded"
            " one on this machine"
        )
        raise Refused(f"{error}{hint}") from error
    return client
