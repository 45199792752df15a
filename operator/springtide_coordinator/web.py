"""HTTP beside gRPC: /metrics for Prometheus, /healthz for the kubelet, /timeline for holders of the token.

Threads and locks: the threads of `BoundedServer` call `answer`; they read the hub by `in_loop`, in its event
loop. `_one_at_a_time` is held while a page of /timeline is made, so that one reader at a time costs memory.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from springtide_coordinator.history import Commit, GenerationSeen, History
from springtide_coordinator.hub import Hub
from springtide_coordinator.metrics import LABELS, JobCollector
from springtide_coordinator.settings import Options
from springtide_protocol.bounded_http import (
    REQUEST_SECONDS,
    BoundedServer,
    Reply,
    Request,
    ThrottledValue,
    in_loop,
    in_words,
    serve,
)
from springtide_protocol.span_export import SpanQueue
from springtide_protocol.span_metrics import SpanCollector

log = logging.getLogger("springtide.coordinator")

PAGE_COMMITS = 500
PAGE_GENERATIONS = 50
NAMED_MEMBERS = 64
"""Number of a generation's members that are named; the others are counted."""
KEPT_PAGES = 4

_LOOP_SECONDS = REQUEST_SECONDS - 1.0


def start_web(hub: Hub, options: Options, spans: SpanQueue | None = None) -> BoundedServer:
    """Serve on the metrics port, or on a free one when that is taken; the caller closes it.

    Called in the event loop that the hub lives in.

    Args:
        hub: all state of the process.
        options: of the process.
        spans: whose counts are served, too; None: nothing is traced.

    Returns:
        The server, with the port that it got.
    """
    pages = Pages(hub, (options.token, *options.former_tokens), asyncio.get_running_loop(), spans)
    server = serve(pages.answer, options.host, options.metrics_port)
    log.info("serves metrics", extra={"fields": {"metrics_port": server.port}})
    return server


@dataclass(frozen=True, slots=True)
class TimelinePosition:
    """A reader's position in /timeline: the last step and the last generation's number that it has."""

    step: int = -1
    generation: int = 0

    @classmethod
    def of(cls, request: Request) -> TimelinePosition:
        """Read `since` and `generations_since`. Raises ValueError that says which is wrong."""

        def number(name: str, default: int) -> int:
            given = request.query.get(name, str(default))
            if len(given) > 20 or not given.removeprefix("-").isdecimal():
                raise ValueError(f"{name}={given[:40]!r} must be a whole number")
            return int(given)

        return cls(number("since", -1), number("generations_since", 0))


class Pages:
    """Answers HTTP requests, in the server's threads; what the hub has is read in its event loop alone.

    tokens: the job's, one of which /timeline asks for: it shows what the script reports, and names of pods.
    """

    def __init__(
        self,
        hub: Hub,
        tokens: Sequence[str],
        loop: asyncio.AbstractEventLoop,
        spans: SpanQueue | None = None,
    ) -> None:
        self._hub, self._loop = hub, loop
        self._expected = [f"Bearer {token}".encode() for token in tokens]
        registry = CollectorRegistry()
        registry.register(JobCollector(hub))
        if spans is not None:
            job = (hub.options.job, hub.options.namespace)
            registry.register(SpanCollector(spans, dict(zip(LABELS, job, strict=True))))
        self._metrics = ThrottledValue(
            lambda: in_loop(loop, lambda: generate_latest(registry), _LOOP_SECONDS)
        )
        self._one_at_a_time = threading.Lock()
        self._timelines: OrderedDict[TimelinePosition, ThrottledValue[bytes]] = OrderedDict()

    def answer(self, request: Request) -> Reply:
        """Answer a request for one of the three pages."""
        match request.path:
            case "/metrics":
                return Reply(200, self._metrics(), CONTENT_TYPE_LATEST)
            case "/healthz":
                superseded = in_loop(self._loop, lambda: self._hub.membership.superseded, _LOOP_SECONDS)
                return in_words(503, f"superseded: {superseded}") if superseded else in_words(200, "ok")
            case "/timeline":
                return self._timeline(request)
        return in_words(404, "/metrics, /healthz, /timeline")

    def _timeline(self, request: Request) -> Reply:
        given = request.headers.get("authorization", "").encode(errors="replace")
        if not sum(hmac.compare_digest(given, expected) for expected in self._expected):
            return _json(
                401, {"error": "the job's token is missing or wrong: send `Authorization: Bearer TOKEN`"}
            )
        try:
            place = TimelinePosition.of(request)
        except ValueError as error:
            return _json(400, {"error": str(error)})
        with self._one_at_a_time:
            page = self._timelines.get(place)
            if page is None:
                page = self._timelines[place] = ThrottledValue(lambda: self._page(place))
                while len(self._timelines) > KEPT_PAGES:
                    self._timelines.popitem(last=False)
            return Reply(200, page(), "application/json")

    def _page(self, place: TimelinePosition) -> bytes:
        page = in_loop(self._loop, lambda: timeline_page(self._hub.history, place), _LOOP_SECONDS)
        return json.dumps(page).encode()


def timeline_page(history: History, place: TimelinePosition) -> dict[str, object]:
    """Return what comes after a place, at most a page; with `more`, asking again from `next` brings more.

    Args:
        history: of the committed steps.
        place: the last step and generation that the reader has.
    """
    commits = history.since(place.step, PAGE_COMMITS + 1)
    generations = history.generations_since(place.generation, PAGE_GENERATIONS + 1)
    shown, made = commits[:PAGE_COMMITS], generations[:PAGE_GENERATIONS]
    return {
        "commits": [commit_json(commit) for commit in shown],
        "generations": [generation_json(seen) for seen in made],
        "more": len(commits) > len(shown) or len(generations) > len(made),
        "next": {
            "since": shown[-1].state.step if shown else place.step,
            "generations_since": made[-1].number if made else place.generation,
        },
    }


def _json(status: int, value: dict[str, object]) -> Reply:
    return Reply(status, json.dumps(value).encode(), "application/json")


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
        "members": list(seen.members[:NAMED_MEMBERS]),
        "memberCount": len(seen.members),
    }
