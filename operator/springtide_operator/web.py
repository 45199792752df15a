"""HTTP for Prometheus and the kubelet: /metrics, /livez (the loop turns and every task lives), /healthz and
/readyz with their reasons.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from springtide_protocol.bounded_http import (
    REQUEST_SECONDS,
    Answer,
    BoundedServer,
    Reply,
    Request,
    ThrottledValue,
    in_loop,
    in_words,
    serve,
)

log = logging.getLogger("springtide.operator")

Trouble = Callable[[], str | None]

_LOOP_SECONDS = REQUEST_SECONDS - 1.0


def start_web(
    registry: CollectorRegistry, dead: Trouble, unhealthy: Trouble, unready: Trouble, host: str, port: int
) -> BoundedServer:
    """Serve pages in threads of their own; to be called in the event loop.

    Args:
        registry: of the metrics.
        dead: says why the process is to be restarted; None for nothing.
        unhealthy: says why it does not do its work.
        unready: says why it does not act.
        host: address to listen on.
        port: to listen on; a taken one is replaced by a free one.

    Returns:
        The server, which the caller closes.
    """
    answer = pages(registry, dead, unhealthy, unready, asyncio.get_running_loop())
    server = serve(answer, host, port)
    log.info("serves metrics", extra={"fields": {"metrics_port": server.port}})
    return server


def pages(
    registry: CollectorRegistry,
    dead: Trouble,
    unhealthy: Trouble,
    unready: Trouble,
    loop: asyncio.AbstractEventLoop,
) -> Answer:
    """Answer requests from any thread: what is asked for is looked up in the event loop.

    Args:
        registry: of the metrics.
        dead: says why the process is to be restarted; None for nothing.
        unhealthy: says why it does not do its work.
        unready: says why it does not act.
        loop: in which the other arguments are called.

    Returns:
        The function from a request to its reply.
    """
    checks: dict[str, Trouble] = {"/livez": dead, "/healthz": unhealthy, "/readyz": unready}
    metrics = ThrottledValue(lambda: in_loop(loop, lambda: generate_latest(registry), _LOOP_SECONDS))

    def answer(request: Request) -> Reply:
        if request.path == "/metrics":
            return Reply(200, metrics(), CONTENT_TYPE_LATEST)
        check = checks.get(request.path)
        if check is None:
            return in_words(404, "/metrics, /livez, /healthz, /readyz")
        trouble = in_loop(loop, check, _LOOP_SECONDS)
        return in_words(200, "ok") if trouble is None else in_words(503, trouble)

    return answer
