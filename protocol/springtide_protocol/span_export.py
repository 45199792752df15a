"""Export spans by OTLP from a thread of its own, which training never waits for.

Threads and locks: any thread records; the exporting thread, which the first span starts, alone imports and
calls OpenTelemetry. `_changed` guards the queue and the counts. A process that was forked from this one has
no exporting thread, and records nothing.

The queue is bounded and what finds no room is counted and dropped, as is what a collector does not take. The
log says so once.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from springtide_protocol.tracing import (
    Span,
    TraceContext,
    TraceSettings,
    read_settings,
)

log = logging.getLogger("springtide.tracing")

CLOSE_SECONDS = 2.0
"""Limit of the wait for a collector when a process ends."""
SCOPE = "springtide"
_LIBRARIES = {
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
}
# The loggers that the exporters say their troubles to.
_LOGGERS = (*_LIBRARIES.values(), "opentelemetry.exporter.otlp.proto.grpc.exporter")


class Exporter(Protocol):
    """Send spans to a collector. One thread calls it."""

    def export(self, spans: Sequence[Span]) -> str:
        """Send spans, which may take seconds; return why they did not arrive, "" if they did."""

    def close(self) -> None:
        """Give up what is being sent. Any thread may call it."""


class SpanQueue:
    """Keep spans until they are exported, in a thread of its own. Implements `Tracer`."""

    enabled = True

    def __init__(self, settings: TraceSettings, exporter: Exporter) -> None:
        """Begin with an empty queue.

        Args:
            settings: of the process.
            exporter: takes the spans.
        """
        self._settings, self._exporter = settings, exporter
        self._changed = threading.Condition()
        self._waiting: deque[Span] = deque()
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._closing = self._warned = False
        self.exported = 0
        """Spans that a collector has taken."""
        self.dropped = 0
        """Spans that found no room, or that no collector took."""

    def new_trace(self) -> TraceContext:
        """Return the name of a span that begins a trace, which the sampler decides on."""
        # Never the `random` module: its state is the training script's.
        return self.begin(TraceContext(secrets.randbits(128) or 1, secrets.randbits(64) or 1))

    def begin(self, context: TraceContext) -> TraceContext:
        """Return a span that begins a trace of that name, which the sampler decides on."""
        return replace(context, sampled=self._settings.sampler.begins(context.trace_id))

    def child_of(self, parent: TraceContext) -> TraceContext:
        """Return the name of a span that is a part of another one."""
        return TraceContext(parent.trace_id, secrets.randbits(64) or 1, parent.sampled)

    def record(self, span: Span) -> None:
        """Queue a span; drop it where the queue is full."""
        if not self._settings.sampler.keeps(span.context) or os.getpid() != self._process:
            return
        with self._changed:
            if self._closing or len(self._waiting) >= self._settings.most_waiting:
                self._lost(1, "the queue is full: OTEL_BSP_MAX_QUEUE_SIZE")
                return
            self._waiting.append(span)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._export_for_ever, name="springtide-traces", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Export what is left and end the thread; after so many seconds give up."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._closing = True
            thread = self._thread
            self._changed.notify_all()
        if thread is None:
            return
        thread.join(seconds)
        if not thread.is_alive():
            return
        with self._changed:  # the thread finds nothing more to send when it comes back from what it sends
            left, self._waiting = len(self._waiting), deque()
            self._lost(left, f"they were not taken within {seconds:g} s of the end")
        self._exporter.close()
        thread.join(min(1.0, seconds))

    def _export_for_ever(self) -> None:
        while batch := self._next_batch():
            try:
                problem = self._exporter.export(batch)
            except Exception as error:  # whatever a library does, training goes on
                problem = f"{type(error).__name__}: {error}"
            with self._changed:
                if problem:
                    self._lost(len(batch), problem)
                else:
                    self.exported += len(batch)
        self._exporter.close()

    def _next_batch(self) -> list[Span]:
        """Wait for spans and return them; none when the queue is closed and empty."""
        settings = self._settings
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            self._changed.wait_for(
                lambda: self._closing or len(self._waiting) >= settings.most_at_once, settings.delay
            )
            count = min(settings.most_at_once, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]

    def _lost(self, count: int, why: str) -> None:
        """Count spans that nobody gets, and say so once (in the lock)."""
        self.dropped += count
        if count and not self._warned:
            self._warned = True
            log.warning(
                "traces do not reach %s: %s. Nothing waits for them; this is said once, and"
                " springtide_trace_spans_dropped_total counts what is lost",
                self._settings.endpoint,
                why,
            )


class OtlpExporter:
    """Send spans with OpenTelemetry's exporter, which reads its variables by itself. Implements `Exporter`.

    Nothing is imported before the first spans are sent.
    """

    def __init__(self, protocol: str, resource: Mapping[str, str]) -> None:
        """Note what is sent, and how.

        Args:
            protocol: one of `tracing.PROTOCOLS`.
            resource: attributes of the process.
        """
        self._protocol, self._resource_attributes = protocol, resource
        self._exporter: Any = None
        self._resource: Any = None
        self._said = _LastWord()

    def export(self, spans: Sequence[Span]) -> str:
        """Send spans; the exporter tries again for up to `OTEL_EXPORTER_OTLP_TIMEOUT`."""
        if self._exporter is None:
            self._open()
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._said.begin()
        result = self._exporter.export([self._readable(span) for span in spans])
        return "" if result is SpanExportResult.SUCCESS else self._said.text or "the collector refused them"

    def close(self) -> None:
        """Close the connection."""
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.shutdown()
            for name in _LOGGERS:  # another thread may get the number that this one has had
                logging.getLogger(name).removeFilter(self._said)

    def _open(self) -> None:
        module = importlib.import_module(_LIBRARIES[self._protocol])
        from opentelemetry.sdk.resources import Resource

        for name in _LOGGERS:
            logging.getLogger(name).addFilter(self._said)
        attributes = {key: value for key, value in self._resource_attributes.items() if value}
        named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        if named:
            del attributes["service.name"]
        self._resource = Resource.create(attributes)
        self._exporter = module.OTLPSpanExporter()

    def _readable(self, span: Span) -> Any:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def named(context: TraceContext, remote: bool) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
            return SpanContext(context.trace_id, context.span_id, remote, flags)

        return ReadableSpan(
            name=span.name,
            context=named(span.context, False),
            parent=None if span.parent is None else named(span.parent, True),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(event.name, dict(event.attributes), _ns(event.at)) for event in span.events],
            links=[Link(named(link, True)) for link in span.linked],
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_ns(span.began),
            end_time=_ns(max(span.began, span.ended)),
            instrumentation_scope=InstrumentationScope(SCOPE),
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class _LastWord(logging.Filter):
    """Keep what the exporter says in the exporting thread for our one warning, out of the process's log."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._thread = 0

    def begin(self) -> None:
        """Listen to this thread from now on."""
        self.text, self._thread = "", threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self._thread:
            return True  # the script's own
        self.text = record.getMessage()[:300]
        return False


def open_tracer(
    service: str, resource: Mapping[str, str], environ: Mapping[str, str] = os.environ
) -> SpanQueue | None:
    """Return where this process's spans go; None where nobody asked for them, or they cannot be exported.

    Args:
        service: `service.name`, unless OpenTelemetry's variables name one.
        resource: other attributes of the process; those that are empty are left out.
        environ: its environment.
    """
    settings = read_settings(environ)
    for problem in settings.problems:
        log.warning("traces: %s", problem)
    if not settings.enabled:
        return None
    if not _installed(settings.protocol):
        log.warning(
            "traces are asked for (OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_TRACES_EXPORTER), and this image lacks"
            " OpenTelemetry's exporter for %s: add springtide[otel] to it, or set OTEL_SDK_DISABLED=true",
            settings.protocol,
        )
        return None
    exporter = OtlpExporter(settings.protocol, {"service.name": service, **resource})
    return SpanQueue(settings, exporter)


def _installed(protocol: str) -> bool:
    try:
        return importlib.util.find_spec(_LIBRARIES[protocol]) is not None
    except ImportError:
        return False


def job_resource(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the attributes of a process in a pod of a job, by OpenTelemetry's semantic conventions.

    Args:
        environ: its environment.
    """
    return {
        "service.namespace": environ.get("SPRINGTIDE_NAMESPACE", ""),
        "service.instance.id": environ.get("SPRINGTIDE_POD_UID", ""),
        "k8s.namespace.name": environ.get("SPRINGTIDE_NAMESPACE", ""),
        "k8s.pod.name": environ.get("SPRINGTIDE_POD_NAME", ""),
        "k8s.pod.uid": environ.get("SPRINGTIDE_POD_UID", ""),
        "k8s.node.name": environ.get("SPRINGTIDE_NODE_NAME", ""),
        "springtide.job": environ.get("SPRINGTIDE_JOB", ""),
        "springtide.job.uid": environ.get("SPRINGTIDE_JOB_UID", ""),
    }


def process_began() -> float:
    """Return when this process began, in unix seconds, by Linux's word; now where it does not say."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
