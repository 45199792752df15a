"""The client's connection to one cluster, with errors that say what to do in Python.

Threads: one of its own runs the event loop; any may call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from springtide_cli.apply import JOBS
from springtide_cli.errors import CliError
from springtide_cli.kube import KubePort, connect
from springtide_client.errors import ClusterRefused, JobNotFound
from springtide_client.screens import Relay, relayed, screen_for
from springtide_kube.content_types import JSON
from springtide_kube.errors import ApiError, ApiRefusal, CredentialsError, Unreachable
from springtide_kube.loop_thread import LoopThread

if TYPE_CHECKING:
    from springtide_cli.screen import Screen

Object = dict[str, Any]
Result = TypeVar("Result")

CONNECT_SECONDS = 120.0


class Session:
    """Requests to one cluster, from any thread."""

    def __init__(
        self, thread: LoopThread, kube: KubePort, stack: contextlib.AsyncExitStack, namespace: str
    ) -> None:
        """Take over a connection.

        Args:
            thread: in which the connection lives.
            kube: the connection.
            stack: closes it.
            namespace: of the jobs.
        """
        self.thread = thread
        self.kube = kube
        self.namespace = namespace
        self._stack = stack

    def request(
        self, method: str, path: str, body: Any = None, content_type: str = JSON, **query: str
    ) -> Object:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL.
            body: plain JSON; None: no body.
            content_type: of the body.
            query: parameters of the URL.

        Raises:
            ClusterRefused: the server refuses, or does not answer.
        """
        return self.run(self.kube.request(method, path, body, query, content_type))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return what a coroutine returns. Raise ClusterRefused."""
        with translated():
            return self.thread.run(work)

    def shown(self, work: Coroutine[Any, Any, Result], relay: Relay, screen: Screen) -> Result:
        """Return what a coroutine returns, and show meanwhile what it says.

        Args:
            work: writes to the relay.
            relay: between the two threads.
            screen: shows.

        Raises:
            ClusterRefused: the server refuses, or does not answer.
        """
        with translated():
            return relayed(self.thread, work, relay, screen)

    def path(self, name: str = "", namespace: str = "") -> str:
        """Return the URL's path of a job, or of all of the namespace.

        Args:
            name: of the job; "" for all.
            namespace: of it; "" for the session's.
        """
        collection = f"{JOBS}/namespaces/{namespace or self.namespace}/trainingjobs"
        return f"{collection}/{name}" if name else collection

    def close(self) -> None:
        """Close the connection; an embedded cluster that was started for it is stopped."""
        if self.thread.closed:
            return
        try:
            self.thread.run(self._stack.aclose())
        finally:
            self.thread.close()


def open_session(
    *,
    kubeconfig: str | None,
    context: str | None,
    namespace: str | None,
    local: bool,
    keep: bool,
    progress: bool,
) -> Session:
    """Connect to a cluster.

    Args:
        kubeconfig: path; None: as kubectl.
        context: of the kubeconfig; None: the current one.
        namespace: of the jobs; None: the context's.
        local: use this machine's embedded cluster; start one if none runs.
        keep: leave a cluster running that was started here.
        progress: show how the embedded cluster starts.

    Raises:
        ClusterRefused: there is none, or it cannot be started.
    """
    thread = LoopThread("springtide client")
    stack = contextlib.AsyncExitStack()
    relay = Relay()
    try:
        with translated():
            if local:
                opening = _open_local(stack, relay, keep)
                kube = relayed(thread, opening, relay, screen_for(progress))
            else:
                kube = thread.run(_open(stack, kubeconfig, context))
    except BaseException:
        thread.close()
        raise
    return Session(thread, kube, stack, namespace or kube.namespace)


async def _open(stack: contextlib.AsyncExitStack, kubeconfig: str | None, context: str | None) -> KubePort:
    kube = await connect(kubeconfig, context)
    stack.push_async_callback(kube.close)
    return kube


async def _open_local(stack: contextlib.AsyncExitStack, relay: Relay, keep: bool) -> KubePort:
    from springtide_cli.local import embedded

    return await stack.enter_async_context(embedded(relay, keep=lambda: keep))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn errors of requests and of the command line's parts into those of the client."""
    try:
        yield
    except ApiRefusal as error:
        kind = JobNotFound if error.code == 404 else ClusterRefused
        raise kind(error.message, error.code, error.reason) from error
    except Unreachable as error:
        raise ClusterRefused(error.message, 0, error.reason) from error
    except ApiError as error:
        raise ClusterRefused(str(error), error.code, error.reason) from error
    except CliError as error:
        cause = error.__cause__
        if isinstance(cause, CredentialsError):
            raise ClusterRefused(
                f"{cause}. Name a kubeconfig by TrainingClient(kubeconfig=...) or KUBECONFIG, or use"
                " TrainingClient(local=True) for a cluster on this machine"
            ) from error
        code, reason = (cause.code, cause.reason) if isinstance(cause, ApiError) else (0, "")
        raise ClusterRefused(str(error).replace("--local", "local=True"), code, reason) from error
