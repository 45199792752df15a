"""The metrics of a parameter server, computed when Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from springtide_ps.server.server import Server


class ServerCollector(Collector):
    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        status, counters = self._server.status(), self._server.counters
        yield GaugeMetricFamily(
            "springtide_ps_keys",
            "Keys that this server holds; of a job, chunks and slices",
            status["keys"],
        )
        yield GaugeMetricFamily("springtide_ps_value_bytes", "Bytes of values that it holds", status["bytes"])
        yield GaugeMetricFamily("springtide_ps_table_rows", "Rows of embedding tables", status["rows"])
        yield CounterMetricFamily(
            "springtide_ps_evicted_rows", "Rows of embedding tables that were evicted", status["evicted"]
        )
        yield CounterMetricFamily(
            "springtide_ps_looked_up_rows", "Rows of embedding tables that were looked up", counters.looked_up
        )
        yield CounterMetricFamily(
            "springtide_ps_updated_rows", "Row gradients of embedding tables", counters.row_updates
        )
        yield GaugeMetricFamily("springtide_ps_clients", "Clients that are connected", self._server.clients)
        yield CounterMetricFamily(
            "springtide_ps_pushes", "Pushes applied; of a job, gradients", counters.pushes
        )
        yield CounterMetricFamily("springtide_ps_pulls", "Pulls; of a job, chunks asked for", counters.pulls)
        yield CounterMetricFamily(
            "springtide_ps_received_bytes", "Bytes of tensors received", counters.bytes_in
        )
        yield CounterMetricFamily("springtide_ps_sent_bytes", "Bytes of tensors sent", counters.bytes_out)
        yield GaugeMetricFamily(
            "springtide_ps_offered_bytes",
            "Bytes of gradients that came before their range was pushed",
            self._server.stashed_bytes,
        )
        yield CounterMetricFamily(
            "springtide_ps_ranges", "Gradients of ranges applied to a chunk", counters.batches
        )
        yield CounterMetricFamily(
            "springtide_ps_repeated_ranges",
            "Gradients not applied, since the chunk had their range already",
            counters.repeated,
        )
        yield CounterMetricFamily(
            "springtide_ps_refused_connections", "Connections without the token", counters.refused
        )
