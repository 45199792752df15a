"""The job's metrics, computed when they are scraped. Labels: the job's name, its namespace, small enums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from springtide_coordinator.history import RECOVERY_BUCKETS
from springtide_coordinator.hub import Hub
from springtide_coordinator.membership.messages import Standing
from springtide_coordinator.membership.seats import waiting
from springtide_coordinator.reply import goodput

PREFIX = "springtide_coordinator_"
LABELS = ("training_job", "job_namespace")
CAUSES = ("start", "failure", "join", "leave", "consistency")


class JobCollector(Collector):
    """Reads the hub; runs in the event loop's thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        yield self._members()
        yield from self._gauges()
        yield from self._counters()
        yield self._slowest()
        yield self._recovery_seconds()

    @property
    def _job(self) -> tuple[str, str]:
        return self._hub.options.job, self._hub.options.namespace

    def _members(self) -> Metric:
        standings = Counter(record.standing for record in self._hub.membership.connected())
        members = GaugeMetricFamily(
            PREFIX + "members",
            "Connected worker processes by standing: starting, parked, active, ended, after.",
            labels=(*LABELS, "standing"),
        )
        for standing in Standing:
            members.add_metric((*self._job, standing.value), standings[standing])
        return members

    def _gauges(self) -> Iterator[Metric]:
        """Yield what is one number at a time."""
        hub, now = self._hub, self._hub.clock()
        m, history = hub.membership, hub.history
        gauges = (
            ("generation", "Number of the current generation.", m.current.name.number if m.current else 0),
            ("generation_members", "Processes in it.", len(m.current.ids) if m.current else 0),
            ("standbys", "Processes that wait outside of it, ready to take a place.", len(waiting(m))),
            ("step", "Newest committed step.", history.known.step if history.known else 0),
            ("samples_per_second", "Committed samples per second.", history.samples_per_second(now)),
            ("step_seconds", "Median duration of the recent steps.", history.step_seconds()),
            ("goodput_ratio", "Seconds spent on steps that survive / wall time, 0..1.", goodput(hub, now)),
            ("streams", "Open streams of worker processes.", len(hub.streams)),
            (
                "servers",
                "Connected parameter servers.",
                sum(server.connected for server in m.servers.values()),
            ),
            (
                "generation_servers",
                "Parameter servers of the current generation.",
                len(m.current.servers) if m.current else 0,
            ),
            ("incarnation_number", "Number of this coordinator's incarnation.", m.incarnation.number),
            ("incarnation_restarts", "Restarts of its container.", m.incarnation.restart),
            (
                "checkpoint_age_seconds",
                "Since the newest checkpoint was completed, or training began; 0: none are made.",
                hub.storage.age(now),
            ),
            ("checkpoint_interval_seconds", "Wanted between two; 0: none.", hub.storage.interval),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            gauge.add_metric(self._job, value)
            yield gauge

    def _counters(self) -> Iterator[Metric]:
        """Yield what only grows."""
        hub, job = self._hub, self._job
        m, history = hub.membership, hub.history
        counters = (
            ("steps", "Committed steps, also those that a later generation replaced.", history.steps_total),
            ("samples", "Samples of these steps.", history.samples_total),
            ("states_lost", "Times the job's state was lost.", m.states_lost),
        )
        for name, text, count in counters:
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(job, count)
            yield counter
        checkpoints = CounterMetricFamily(
            PREFIX + "checkpoints",
            "Checkpoints told of, by result: completed, failed.",
            labels=(*LABELS, "result"),
        )
        checkpoints.add_metric((*job, "completed"), hub.storage.completed)
        checkpoints.add_metric((*job, "failed"), hub.storage.failures)
        yield checkpoints
        recoveries = CounterMetricFamily(
            PREFIX + "recoveries",
            "New generations that committed, by cause: start, failure, join, leave.",
            labels=(*LABELS, "cause"),
        )
        for cause in CAUSES:
            recoveries.add_metric((*job, cause), history.recoveries[cause])
        yield recoveries
        lost = CounterMetricFamily(
            PREFIX + "lost_seconds",
            "Seconds lost, by cause. Between steps that survive: failure, rescale, checkpoint. Within them:"
            " data (fetching samples), straggler (waiting for one slow worker).",
            labels=(*LABELS, "cause"),
        )
        for cause, value in history.lost_seconds.items():
            lost.add_metric((*job, cause), value)
        yield lost

    def _slowest(self) -> Metric:
        slow = self._hub.slow()
        ratio = GaugeMetricFamily(
            PREFIX + "slowest_worker_ratio",
            "Time per step of a worker that holds the others up, over the others' median; 1 while none does.",
            labels=LABELS,
        )
        ratio.add_metric(self._job, slow.busy / slow.median if slow is not None and slow.median > 0 else 1.0)
        return ratio

    def _recovery_seconds(self) -> Metric:
        history = self._hub.history
        seconds = HistogramMetricFamily(
            PREFIX + "recovery_seconds",
            "Last commit before a new generation to its first commit.",
            labels=LABELS,
        )
        total, buckets = 0, []
        for bound, count in zip((*map(str, RECOVERY_BUCKETS), "+Inf"), history.recovery_buckets, strict=True):
            total += count
            buckets.append((bound, float(total)))
        seconds.add_metric(self._job, buckets, history.recovery_seconds)
        return seconds
