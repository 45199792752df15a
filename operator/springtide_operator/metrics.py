"""Prometheus metrics of the operator. A job's series are computed at scrape time, so they go with the job."""

from __future__ import annotations

import contextlib
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from springtide_operator.api import reasons
from springtide_operator.plan import sight
from springtide_operator.plan.actions import Action
from springtide_operator.plan.observation import Observation

JOB_LABELS = ["training_job", "job_namespace"]
Status = dict[str, Any]
Jobs = Callable[[], Iterable[tuple[str, str, Status]]]  # (namespace, name, status)


class Metrics:
    """One registry per operator process."""

    def __init__(self, jobs: Jobs, acting: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._reconciles = Counter(
            "springtide_operator_reconciles",
            "Rounds of planning, by result: success or error.",
            ["result"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "springtide_operator_reconcile_seconds",
            "Time of one round of planning, status write and actions, in seconds.",
            registry=self.registry,
            buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )
        self._errors = Counter(
            "springtide_operator_api_errors",
            "Requests that the API server refused or did not answer, by HTTP code (0: no answer).",
            ["code"],
            registry=self.registry,
        )
        self._actions = Counter(
            "springtide_operator_actions",
            f"Actions carried out, by kind: {', '.join(kind.kind for kind in get_args(Action))}.",
            ["kind"],
            registry=self.registry,
        )
        self._nodes = Gauge(
            "springtide_operator_nodes_readable",
            "1 while nodes can be read; 0: lost and cordoned nodes are heard of only through their pods.",
            registry=self.registry,
        )
        self._surprises = Counter(
            "springtide_operator_internal_errors",
            "Errors that nobody foresaw, by where: round (of one job), object (that cannot be read), task.",
            ["where"],
            registry=self.registry,
        )
        for where in ("round", "object", "task"):
            self._surprises.labels(where)
        for result in ("success", "error"):
            self._reconciles.labels(result)
        self.registry.register(_JobCollector(jobs, acting))

    def watch_nodes(self, observe: Callable[[], Observation]) -> None:
        """Tell at each scrape how many nodes look lost, and whether pods stay for that.

        Args:
            observe: returns the nodes, and which coordinators answer.
        """
        self.registry.register(_NodeCollector(observe))

    def reconciled(self, result: str, seconds: float) -> None:
        """Count a round of a job's loop.

        Args:
            result: how it ended, in one word.
            seconds: that it took.
        """
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def surprised(self, where: str) -> None:
        """Count an error that nobody foresaw."""
        self._surprises.labels(where).inc()

    def nodes_readable(self, readable: bool) -> None:
        self._nodes.set(readable)

    def api_error(self, code: int) -> None:
        self._errors.labels(str(code)).inc()

    def acted(self, kind: str) -> None:
        self._actions.labels(kind).inc()


class _NodeCollector(Collector):
    def __init__(self, observe: Callable[[], Observation]) -> None:
        self._observe = observe

    def collect(self) -> Iterator[Metric]:
        seen = self._observe()
        brake = sight.brake(seen)
        nodes = GaugeMetricFamily(
            "springtide_operator_nodes",
            "Nodes by state: total, lost (NotReady, or nothing is heard of them).",
            labels=["state"],
        )
        nodes.add_metric(["total"], float(brake.total))
        nodes.add_metric(["lost"], float(brake.lost))
        yield nodes
        held = GaugeMetricFamily(
            "springtide_operator_brake",
            "1 while nothing is deleted and nothing started for nodes that look lost, by why: nodes (too many"
            " of all, or of a zone, look lost), coordinators (too few answer the operator).",
            labels=["why"],
        )
        held.add_metric(["nodes"], float(bool(brake.everywhere or brake.zones)))
        held.add_metric(["coordinators"], float(bool(sight.deaf(seen))))
        yield held


class _JobCollector(Collector):
    def __init__(self, jobs: Jobs, acting: Callable[[], bool]) -> None:
        self._jobs = jobs
        self._acting = acting

    def collect(self) -> Iterator[Metric]:
        jobs = list(self._jobs())
        acting = GaugeMetricFamily(
            "springtide_operator_acting", "1 while this process holds the lease and acts, else 0."
        )
        acting.add_metric([], float(self._acting()))
        yield acting
        states = Tally(status.get("state") or reasons.STATE_PENDING for _, _, status in jobs)
        by_state = GaugeMetricFamily(
            "springtide_jobs", f"Training jobs by state: {', '.join(reasons.STATES)}.", labels=["state"]
        )
        for state in reasons.STATES:
            by_state.add_metric([state], float(states.get(state, 0)))
        yield by_state
        yield from _per_job(jobs)


def _per_job(jobs: list[tuple[str, str, Status]]) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        "springtide_job_workers",
        "Workers of the job by state: desired, existing, ready, active (train in the current generation).",
        labels=[*JOB_LABELS, "state"],
    )
    standing = GaugeMetricFamily(
        "springtide_job_standbys",
        "Standbys of the job by state: desired, existing, ready (wait, warmed up, to take a place).",
        labels=[*JOB_LABELS, "state"],
    )
    serving = GaugeMetricFamily(
        "springtide_job_parameter_servers",
        "Parameter servers of the job by state: desired, existing, ready.",
        labels=[*JOB_LABELS, "state"],
    )
    restarts = CounterMetricFamily(
        "springtide_job_restarts",
        "Restarts, by reason: failure (counted against backoffLimit), preemption, ignored (by a rule)."
        " Workers that end together for one cause are one.",
        labels=[*JOB_LABELS, "reason"],
    )
    recoveries = CounterMetricFamily(
        "springtide_job_recoveries", "Changes of the workers that training survived.", labels=JOB_LABELS
    )
    samples = CounterMetricFamily(
        "springtide_job_samples",
        "Samples whose gradients are in the surviving parameters.",
        labels=JOB_LABELS,
    )
    lost = CounterMetricFamily(
        "springtide_job_lost_seconds",
        "Seconds lost over the job's life, by cause. Between steps that survive: failure, rescale,"
        " checkpoint. Within them: data, straggler.",
        labels=[*JOB_LABELS, "cause"],
    )
    plain = {
        "generation": _gauge("generation", "Number of the membership generation."),
        "step": _gauge("step", "Newest committed step."),
        "samplesPerSecond": _gauge("samples_per_second", "Samples per second of all workers together."),
        "goodput": _gauge("goodput_ratio", "Time spent on steps that survive, as a share of wall time, 0-1."),
        "progress": _gauge(
            "progress_ratio", "Committed steps as a share of those that the job has at its end, 0-1."
        ),
        "estimatedCompletionTime": _gauge(
            "estimated_completion_timestamp_seconds",
            "When the last step is committed, if steps go on as fast as now, in unix seconds.",
        ),
        "lastRecoverySeconds": _gauge(
            "last_recovery_seconds",
            "Last commit before the last change of workers to the first commit after it, in seconds.",
        ),
    }
    for namespace, name, status in jobs:
        with contextlib.suppress(TypeError, ValueError, AttributeError):  # a status that is not ours
            labels = [name, namespace]
            counts = status.get("workers") or {}
            for state, key in (
                ("desired", "desired"),
                ("existing", "replicas"),
                ("ready", "ready"),
                ("active", "active"),
            ):
                workers.add_metric([*labels, state], float(counts.get(key, 0)))
            if counts := status.get("standby"):
                for state, key in (("desired", "wanted"), ("existing", "replicas"), ("ready", "ready")):
                    standing.add_metric([*labels, state], float(counts.get(key, 0)))
            if counts := status.get("parameterServers"):
                for state, key in (("desired", "desired"), ("existing", "replicas"), ("ready", "ready")):
                    serving.add_metric([*labels, state], float(counts.get(key, 0)))
            ended = status.get("restarts") or {}
            restarts.add_metric([*labels, "failure"], float(ended.get("failures", 0)))
            restarts.add_metric([*labels, "preemption"], float(ended.get("preemptions", 0)))
            restarts.add_metric([*labels, "ignored"], float(ended.get("ignored", 0)))
            recoveries.add_metric(labels, float(status.get("recoveries", 0)))
            if "data" in status:
                samples.add_metric(labels, float(status["data"].get("totalSeen", 0)))
            for cause, seconds in (status.get("lostSeconds") or {}).items():
                lost.add_metric([*labels, cause], float(seconds))
            for key, family in plain.items():
                if key in status:
                    family.add_metric(labels, _NUMBER_OF.get(key, float)(status[key]))
    yield from (workers, standing, serving, restarts, recoveries, samples, lost, *plain.values())


# What stands in status as something else than the metric's number.
_NUMBER_OF: dict[str, Callable[[Any], float]] = {
    "progress": lambda percent: percent / 100,
    "estimatedCompletionTime": lambda text: datetime.fromisoformat(text).timestamp(),
}


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"springtide_job_{name}", text, labels=JOB_LABELS)
