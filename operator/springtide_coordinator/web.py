"""HTTP beside gRPC: /metrics for Prometheus, /healthz for the kubelet, /timeline for live views."""

from __future__ import annotations

import logging

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .history import Commit, GenerationSeen
from .hub import Hub
from .metrics import JobCollector
from .settings import Options

log = logging.getLogger("springtide.coordinator")


async def start_web(hub: Hub, options: Options) -> web.AppRunner:
    """Serve on the metrics port, or on a free one when that is taken; the caller cleans up."""
    runner = web.AppRunner(make_app(hub), access_log=None)
    await runner.setup()
    host = options.host or None
    try:
        await web.TCPSite(runner, host, options.metrics_port).start()
    except OSError as error:
        log.warning("metrics port %s is not free (%s): another one is taken", options.metrics_port, error)
        await web.TCPSite(runner, host, 0).start()
    port = runner.addresses[0][1]
    log.info("serves metrics", extra={"fields": {"metrics_port": port}})
    return runner


def make_app(hub: Hub) -> web.Application:
    registry = CollectorRegistry()
    registry.register(JobCollector(hub))

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        if hub.membership.superseded:
            return web.Response(status=503, text=f"superseded: {hub.membership.superseded}\n")
        return web.Response(text="ok\n")

    async def timeline(request: web.Request) -> web.Response:
        text = request.query.get("since", "-1")
        try:
            since = int(text)
        except ValueError:
            return web.json_response({"error": f"since={text!r} must be a step number"}, status=400)
        return web.json_response(
            {
                "commits": [commit_json(commit) for commit in hub.history.since(since)],
                "generations": [generation_json(seen) for seen in hub.history.generations],
            }
        )

    app = web.Application()
    app.add_routes(
        [web.get("/metrics", metrics), web.get("/healthz", healthz), web.get("/timeline", timeline)]
    )
    return app


def commit_json(commit: Commit) -> dict[str, object]:
    name = commit.state.generation
    return {
        "step": commit.state.step,
        "generation": name.number,
        "incarnation": [name.incarnation.number, name.incarnation.restart],
        "unix_time": commit.unix_time,
        "step_seconds": commit.step_seconds,
        "samples": commit.samples,
        "values": dict(commit.values),
    }


def generation_json(seen: GenerationSeen) -> dict[str, object]:
    return {
        "name": str(seen.name),
        "generation": seen.name.number,
        "incarnation": [seen.name.incarnation.number, seen.name.incarnation.restart],
        "at_unix": seen.at_unix,
        "cause": seen.cause,
        "reason": seen.reason,
        "members": list(seen.members),
    }
