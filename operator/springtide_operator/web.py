"""HTTP for Prometheus and the kubelet: /metrics, /livez (the loop turns), /healthz and /readyz with their
reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

log = logging.getLogger("springtide.operator")

Trouble = Callable[[], str | None]


async def start_web(
    registry: CollectorRegistry, unhealthy: Trouble, unready: Trouble, host: str, port: int
) -> web.AppRunner:
    """Serve on `port`, or on a free one when that is taken; the caller cleans up."""
    runner = web.AppRunner(make_app(registry, unhealthy, unready), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
    except OSError as error:
        log.warning("metrics port %s is not free (%s): a free port is used instead", port, error)
        await web.TCPSite(runner, host or None, 0).start()
    log.info("serves metrics", extra={"fields": {"metrics_port": runner.addresses[0][1]}})
    return runner


def make_app(registry: CollectorRegistry, unhealthy: Trouble, unready: Trouble) -> web.Application:
    """`unhealthy` and `unready` say what is wrong, or None."""

    def check(trouble: Trouble) -> Callable[[web.Request], object]:
        async def answer(_: web.Request) -> web.Response:
            text = trouble()
            return web.Response(text="ok\n") if text is None else web.Response(status=503, text=f"{text}\n")

        return answer

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/livez", check(lambda: None))  # type: ignore[arg-type]
    app.router.add_get("/healthz", check(unhealthy))  # type: ignore[arg-type]
    app.router.add_get("/readyz", check(unready))  # type: ignore[arg-type]
    return app
