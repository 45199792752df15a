"""A tracer that keeps what it is given, with numbers that count up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from springtide_protocol.tracing import Span, TraceContext


@dataclass
class RecordedSpans:
    """Implements `Tracer`. `sampled`: of traces that begin here."""

    enabled: bool = True
    sampled: bool = True
    spans: list[Span] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def new_trace(self) -> TraceContext:
        return TraceContext(1000 + next(self._numbers), next(self._numbers), self.sampled)

    def begin(self, context: TraceContext) -> TraceContext:
        return replace(context, sampled=self.sampled)

    def child_of(self, parent: TraceContext) -> TraceContext:
        return TraceContext(parent.trace_id, next(self._numbers), parent.sampled)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        [found] = self.named(name)
        return found

    def parts(self, whole: Span) -> list[str]:
        """Return the names of a span's parts in order of time."""
        inside = [span for span in self.spans if span.parent == whole.context]
        return [span.name for span in sorted(inside, key=lambda span: (span.began, span.ended))]
