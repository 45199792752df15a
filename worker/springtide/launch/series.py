"""The launcher's own series on /metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class LauncherSeries:
    """Series of one pod of `count` processes. running: how many run, asked at each scrape."""

    def __init__(self, job: str, namespace: str, count: int, running: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"training_job": job, "job_namespace": namespace}
        self._restarts = Counter(
            "springtide_launcher_process_restarts",
            "Processes that were started again in this pod, by local rank.",
            [*self._labels, "local_rank"],
            registry=self.registry,
        )
        for rank in range(count):
            self._restarts.labels(**self._labels, local_rank=str(rank))
        Gauge(
            "springtide_launcher_processes",
            "Processes of this pod that run.",
            list(self._labels),
            registry=self.registry,
        ).labels(**self._labels).set_function(running)

    def restarted(self, rank: int) -> None:
        self._restarts.labels(**self._labels, local_rank=str(rank)).inc()
