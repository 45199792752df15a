"""A collector that takes spans by OTLP, over HTTP or gRPC, and keeps them for tests."""

from __future__ import annotations

import gzip
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Received:
    """A span as it came: ids in hexadecimal digits, times in unix seconds."""

    service: str
    pod: str
    name: str
    trace: str
    span: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]
    links: tuple[str, ...]  # traces
    events: tuple[str, ...]
    error: str
    resource: dict[str, Any] = field(default_factory=dict)


class TraceCollector:
    """Keep the spans that came. `refuse`: how many requests are still answered with an error."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Received] = []
        self.refuse = 0
        self.requests = 0
        self.endpoint = ""

    @property
    def spans(self) -> list[Received]:
        with self._changed:
            return list(self._spans)

    def named(self, name: str, **wanted: str) -> list[Received]:
        """Return the spans of that name whose fields are so."""
        return [
            span
            for span in self.spans
            if span.name == name and all(getattr(span, key) == value for key, value in wanted.items())
        ]

    def of_trace(self, trace: str) -> list[Received]:
        return [span for span in self.spans if span.trace == trace]

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until it holds and return it. Raises AssertionError that shows all spans."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            with self._changed:
                if not self._changed.wait(min(1.0, max(0.0, deadline - time.monotonic()))):
                    found = condition()
            if found:
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds:g} s for {what}; there are\n{self.text()}")
        return found

    def text(self) -> str:
        """Return a line for each span, by trace and time."""
        lines = [
            f"{span.trace[:6]} {span.began:.3f} +{span.ended - span.began:.3f} {span.service} {span.pod}"
            f" {span.name} < {span.parent[:6]} = {span.span[:6]} {span.attributes} {span.error}"
            for span in sorted(self.spans, key=lambda span: (span.trace, span.began))
        ]
        return "\n".join(lines)

    def take(self, body: bytes) -> bool:
        """Take a request; return False for one that is refused."""
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.requests += 1
            if self.refuse:
                self.refuse -= 1
                return False
            for resource in request.resource_spans:
                about = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    assert scope.scope.name == "springtide"
                    self._spans += [_received(span, about) for span in scope.spans]
            self._changed.notify_all()
        return True


def _plain(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in attributes:
        kind = entry.value.WhichOneof("value")
        value = getattr(entry.value, kind) if kind else None
        found[entry.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def _received(span: Any, resource: dict[str, Any]) -> Received:
    return Received(
        resource["service.name"],
        resource.get("k8s.pod.name", ""),
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        _plain(span.attributes),
        tuple(link.trace_id.hex() for link in span.links),
        tuple(event.name for event in span.events),
        span.status.message if span.status.code == 2 else "",
        resource,
    )


@contextmanager
def http_collector() -> Iterator[TraceCollector]:
    """A collector that takes OTLP over HTTP on a free port; `endpoint` is what OTEL_... may say."""
    collector = TraceCollector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            taken = self.path == "/v1/traces" and collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString() if taken else b"no"
            self.send_response(200 if taken else 400)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_collector() -> Iterator[TraceCollector]:
    """A collector that takes OTLP over gRPC on a free port."""
    collector = TraceCollector()

    def export(body: bytes, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        if not collector.take(body):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        return ExportTraceServiceResponse()

    handler = grpc.unary_unary_rpc_method_handler(
        export, response_serializer=ExportTraceServiceResponse.SerializeToString
    )
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, {"Export": handler}),))
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(0.5).wait()
