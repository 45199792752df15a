"""The dashboard's row about traces."""

from __future__ import annotations

from deploy.grafana.panels import Panel, Row

TRACES = Row(
    "Traces",
    (
        Panel(
            "Spans that a collector has taken, and that none took",
            tuple(
                (f"sum(increase(springtide_trace_spans_{said}_total[$__rate_interval]))", said)
                for said in ("exported", "dropped")
            ),
            about="Of all processes that export spans. Nothing waits for the collector.",
            marks=True,
        ),
    ),
)
