"""Serve how many spans of this process reached a collector, and how many did not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from springtide_protocol.span_export import SpanQueue


class SpanCollector(Collector):
    """Read the counts of a queue of spans; register it only where there is one."""

    def __init__(self, spans: SpanQueue, labels: Mapping[str, str]) -> None:
        """Note what is served.

        Args:
            spans: counts them.
            labels: by name, those of the process's other series.
        """
        self._spans, self._labels = spans, labels

    def collect(self) -> Iterator[Metric]:
        """Yield the two counters."""
        counts = (
            (
                "dropped",
                "Spans that found no room in the queue, or that no collector took.",
                self._spans.dropped,
            ),
            ("exported", "Spans that a collector has taken.", self._spans.exported),
        )
        for name, text, value in counts:
            family = CounterMetricFamily(f"springtide_trace_spans_{name}", text, labels=[*self._labels])
            family.add_metric([*self._labels.values()], value)
            yield family
