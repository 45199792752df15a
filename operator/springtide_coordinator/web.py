"""HTTP beside gRPC: /metrics for Prometheus, /healthz for the kubelet, /timeline for live views."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .history import Commit, GenerationSeen
from .hub import Hub
from .metrics import JobCollector
from .pages import Answer, Page, PageServer, plain
from .settings import Options

log = logging.getLogger("springtide.coordinator")


async def start_web(hub: Hub, options: Options) -> PageServer:
    """Serve on the metrics port, or on a free one when that is taken; the caller closes it."""
    pages, host = make_pages(hub), options.host or None
    try:
        web = await PageServer.start(pages, host, options.metrics_port)
    except OSError as error:
        log.warning("metrics port %s is not free (%s): another one is taken", options.metrics_port, error)
        web = await PageServer.start(pages, host, 0)
    log.info("serves metrics", extra={"fields": {"metrics_port": web.port}})
    return web


def make_pages(hub: Hub) -> dict[str, Page]:
    registry = CollectorRegistry()
    registry.register(JobCollector(hub))

    def metrics(_: Mapping[str, str]) -> Answer:
        return Answer(generate_latest(registry), CONTENT_TYPE_LATEST)

    def healthz(_: Mapping[str, str]) -> Answer:
        if hub.membership.superseded:
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"superseded: {hub.membership.superseded}")
        return plain(HTTPStatus.OK, "ok")

    def timeline(query: Mapping[str, str]) -> Answer:
        text = query.get("since", "-1")
        try:
            since = int(text)
        except ValueError:
            return as_json({"error": f"since={text!r} must be a step number"}, HTTPStatus.BAD_REQUEST)
        return as_json(
            {
                "commits": [commit_json(commit) for commit in hub.history.since(since)],
                "generations": [generation_json(seen) for seen in hub.history.generations],
            }
        )

    return {"/metrics": metrics, "/healthz": healthz, "/timeline": timeline}


def as_json(value: object, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return Answer(json.dumps(value).encode(), "application/json; charset=utf-8", status)


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
