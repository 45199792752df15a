"""Describe spans and the traces that they belong to, and decide which are recorded. PURE.

A span is described when it is over, with both its times, so nothing is open in a library and nothing is done
for it while it lasts. Which trace it belongs to is known by then: the coordinator begins the trace of each
change of a job's members and sends its name along with the generation (`Start.traceparent`), and names that
every process of a job can compute need not be sent (`derived`).

Names of traces and spans are those of W3C Trace Context, samplers those of OpenTelemetry's specification.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

AttributeValue = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_TRACE_BITS = 64
"""Lower bits of a trace's number that a ratio sampler compares, as OpenTelemetry's does."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Name a span: its trace (128 bits), its number (64 bits), and whether the trace is recorded."""

    trace_id: int
    span_id: int
    sampled: bool = True

    def __str__(self) -> str:
        """Return the `traceparent` of W3C Trace Context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"


def parse(traceparent: str) -> TraceContext | None:
    """Return the span that a `traceparent` names; None for an empty text and for what is none."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))


def derived(*names: str) -> TraceContext:
    """Return the span that follows from these names, which all who know them compute alike.

    Args:
        names: what the span is of, the job's uid first.
    """
    digest = hashlib.sha256("\0".join(names).encode()).digest()
    return TraceContext(int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:24]) or 1)


def of_job(uid: str) -> TraceContext:
    """Return the span of a whole job.

    Args:
        uid: of the TrainingJob.
    """
    return derived(uid, "job")


def of_coordinator(uid: str, number: int, restart: int) -> TraceContext:
    """Return the span in which a coordinator takes the place of the one before.

    Args:
        uid: of the TrainingJob.
        number: of the new coordinator's incarnation.
        restart: of its container.
    """
    return derived(uid, "coordinator", str(number), str(restart))


def of_checkpoint(uid: str, name: str) -> TraceContext:
    """Return the span of a checkpoint, which all members write together.

    Args:
        uid: of the TrainingJob.
        name: of the checkpoint's folder.
    """
    return derived(uid, "checkpoint", name)


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Name something that happened at one moment of a span, in unix seconds."""

    name: str
    at: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """Describe a span that is over; times are unix seconds.

    Attributes:
        name: of few different ones: what differs from job to job is an attribute.
        context: the span's own name.
        began: when it did.
        ended: when it did; not before it began.
        parent: the span that it is a part of; None for the first of a trace.
        attributes: by name.
        events: in order of time.
        linked: spans of other traces that it has to do with.
        error: why it failed; "" where it did not.
    """

    name: str
    context: TraceContext
    began: float
    ended: float
    parent: TraceContext | None = None
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    linked: tuple[TraceContext, ...] = ()
    error: str = ""


class Tracer(Protocol):
    """Take spans that are over. Any thread may call it; no method waits or raises."""

    @property
    def enabled(self) -> bool:
        """Return whether spans go anywhere."""

    def new_trace(self) -> TraceContext:
        """Return the name of a span that begins a trace."""

    def begin(self, context: TraceContext) -> TraceContext:
        """Return a span that begins a trace under a name that others compute, too (`derived`)."""

    def child_of(self, parent: TraceContext) -> TraceContext:
        """Return the name of a span that is a part of another one."""

    def record(self, span: Span) -> None:
        """Take a span, which is over."""


_NOBODYS = TraceContext(1, 1, sampled=False)


class NoTracer:
    """Take nothing: nobody asked for traces. Implements `Tracer`."""

    enabled = False

    def new_trace(self) -> TraceContext:
        """Return a span that nobody records."""
        return _NOBODYS

    def begin(self, context: TraceContext) -> TraceContext:
        """Return a span that nobody records."""
        return _NOBODYS

    def child_of(self, parent: TraceContext) -> TraceContext:
        """Return the span itself: no part of it is recorded."""
        return parent

    def record(self, span: Span) -> None:
        """Forget the span."""


OFF: Tracer = NoTracer()
"""The tracer of a process that nobody asked for traces."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Decide which traces are recorded: a share of them, chosen by their numbers.

    Attributes:
        ratio: 0 for none, 1 for all.
        follows: the beginner of a trace decides for all its spans; otherwise each process does for its own.
    """

    ratio: float = 1.0
    follows: bool = True

    def begins(self, trace_id: int) -> bool:
        """Return whether a trace that begins here is recorded."""
        return trace_id & ((1 << _TRACE_BITS) - 1) < round(self.ratio * (1 << _TRACE_BITS))

    def keeps(self, context: TraceContext) -> bool:
        """Return whether a span is recorded, whoever began its trace."""
        return context.sampled if self.follows else self.begins(context.trace_id)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Say whether and how spans are exported, as OpenTelemetry's variables do.

    Attributes:
        enabled: there is somewhere to export to, and nobody has turned it off.
        protocol: `http/protobuf` or `grpc`.
        endpoint: for messages to people; the exporter reads it by itself.
        sampler: of traces.
        most_waiting: spans in the queue; further ones are dropped.
        most_at_once: spans in one request.
        delay: seconds from a span to the request with it, at most.
        problems: variables that cannot be followed, and what is done instead.
    """

    enabled: bool = False
    protocol: str = "http/protobuf"
    endpoint: str = ""
    sampler: Sampler = Sampler()
    most_waiting: int = 2048
    most_at_once: int = 512
    delay: float = 5.0
    problems: tuple[str, ...] = ()


PROTOCOLS = ("http/protobuf", "grpc")
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_SAMPLERS = ("always_on", "always_off", "traceidratio")


def read_settings(environ: Mapping[str, str]) -> TraceSettings:
    """Return what OpenTelemetry's variables say.

    Spans are exported where an endpoint is named, or `OTEL_TRACES_EXPORTER` says `otlp`. A variable that
    cannot be followed is no error, as OpenTelemetry's specification asks: it must not keep a job from
    training.

    Args:
        environ: the process's environment.
    """

    def text(name: str) -> str:
        return environ.get(name, "").strip()

    endpoint = next((text(name) for name in _ENDPOINTS if text(name)), "")
    exporters = {part.strip() for part in text("OTEL_TRACES_EXPORTER").lower().split(",") if part.strip()}
    if text("OTEL_SDK_DISABLED").lower() == "true" or not (endpoint or "otlp" in exporters):
        return TraceSettings()
    problems: list[str] = []
    if exporters and "otlp" not in exporters:
        if exporters != {"none"}:
            problems.append(f"OTEL_TRACES_EXPORTER is {','.join(sorted(exporters))!r}: only otlp is exported")
        return TraceSettings(problems=tuple(problems))

    def number(name: str, default: float, least: float = 1.0, most: float = 1e6) -> float:
        given = text(name)
        if not given:
            return default
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if least <= value <= most:
            return value
        problems.append(f"{name} is {given!r}, no number from {least:g} to {most:g}: {default:g} is taken")
        return default

    protocol = text("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or text("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in ("", *PROTOCOLS):
        problems.append(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: {PROTOCOLS[0]} is taken")
        protocol = ""
    most_waiting = int(number("OTEL_BSP_MAX_QUEUE_SIZE", 2048))
    sampler = _sampler(text("OTEL_TRACES_SAMPLER"), lambda: number("OTEL_TRACES_SAMPLER_ARG", 1.0, 0.0, 1.0))
    if sampler is None:
        problems.append(
            f"OTEL_TRACES_SAMPLER is {text('OTEL_TRACES_SAMPLER')!r}: parentbased_always_on is taken"
        )
    return TraceSettings(
        True,
        protocol or PROTOCOLS[0],
        endpoint or "the collector on this machine",
        sampler or Sampler(),
        most_waiting,
        min(most_waiting, int(number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512))),
        number("OTEL_BSP_SCHEDULE_DELAY", 5000.0, 0.0) / 1000.0,
        tuple(problems),
    )


def _sampler(name: str, ratio: Callable[[], float]) -> Sampler | None:
    """Return the sampler of that name; None where it is not known here."""
    kind = name.removeprefix("parentbased_") or _SAMPLERS[0]
    follows = not name or name.startswith("parentbased_")
    if kind not in _SAMPLERS:
        return None
    return Sampler(ratio() if kind == "traceidratio" else float(kind == "always_on"), follows)
