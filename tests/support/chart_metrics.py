"""Names of the metrics that the code serves, and those that queries ask for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from springtide.coordination.metrics import Metrics
from springtide.launch.series import LauncherSeries
from springtide_coordinator.hub import Hub
from springtide_coordinator.metrics import JobCollector
from springtide_coordinator.settings import Options
from springtide_operator.metrics import Metrics as OperatorMetrics
from springtide_operator.plan.observation import Observation
from springtide_protocol.names import Incarnation
from springtide_protocol.span_export import OtlpExporter, SpanQueue
from springtide_protocol.tracing import TraceSettings
from springtide_ps.server.kv_store import Store
from springtide_ps.server.metrics import ServerCollector
from springtide_ps.server.server import Server

_NAME = re.compile(r"\bspringtide_[a-z0-9_]+")


def names_in(queries: Iterable[str]) -> set[str]:
    """Metric names in PromQL."""
    return {name for query in queries for name in _NAME.findall(query)}


def series(collector: Collector) -> dict[str, set[str]]:
    """{series name: names of its labels}; a family without samples counts with what its type will serve."""
    result: dict[str, set[str]] = {}
    for family in collector.collect():
        endings = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_count", "_sum"),
            "summary": ("_count", "_sum"),
        }
        for ending in endings.get(family.type, ("",)):
            result.setdefault(family.name + ending, set())
        for sample in family.samples:
            result.setdefault(sample.name, set()).update(sample.labels)
    return result


def worker_series() -> dict[str, set[str]]:
    """Return the series of the library, and of the launcher of several processes."""
    launcher = LauncherSeries("job", "namespace", 1, lambda: 1)
    metrics = Metrics("job", "namespace")
    metrics.tracker("tensorboard")
    metrics.count_spans(SpanQueue(TraceSettings(), OtlpExporter("grpc", {})))
    return series(metrics.registry) | series(launcher.registry)


def coordinator_series(folder: Path) -> dict[str, set[str]]:
    hub = Hub(Options(token="t" * 16, number=1, state_dir=folder), Incarnation(1, 0))
    registry = CollectorRegistry()
    registry.register(JobCollector(hub))
    return series(registry)


def server_series() -> dict[str, set[str]]:
    """Return the series of a parameter server, with the labels that the PodMonitor adds."""
    server = Server(Store(0), "t" * 16, "127.0.0.1")
    try:
        found = series(ServerCollector(server))
    finally:
        server.close()
    return {name: labels | {"training_job", "job_namespace"} for name, labels in found.items()}


def operator_series() -> dict[str, set[str]]:
    status = {
        "workers": {},
        "generation": 1,
        "step": 1,
        "samplesPerSecond": "1",
        "goodput": "1",
        "lastRecoverySeconds": "1",
        "lostSeconds": {"failure": "1"},
        "data": {"totalSeen": 1},
        "parameterServers": {"desired": 1},
        "standby": {"wanted": 1},
    }
    metrics = OperatorMetrics(lambda: [("namespace", "job", status)], lambda: True)
    metrics.watch_nodes(Observation)
    metrics.reconciled("success", 0.1)
    metrics.api_error(409)
    metrics.acted("create_worker")
    return series(metrics.registry)
