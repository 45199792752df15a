"""Show on /metrics how a worker process trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from springtide_protocol.bounded_http import BoundedServer, Reply, Request, ThrottledValue, in_words
from springtide_protocol.span_export import SpanQueue
from springtide_protocol.span_metrics import SpanCollector

log = logging.getLogger(__name__)

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class TrackerCounts:
    """Count for one experiment tracker. Any thread may call it."""

    failures: Counter
    losses: Counter
    waiting: Gauge

    def failed(self) -> None:
        """Count a call that raised."""
        self.failures.inc()

    def lost(self, entries: int) -> None:
        """Count commits that the tracker did not take in time."""
        self.losses.inc(entries)

    def behind(self, entries: int) -> None:
        """Show how many commits wait."""
        self.waiting.set(entries)


class _Series:
    """Make the series of a process, with the labels that all of them have."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry, self._labels = registry, labels

    def counter(self, name: str, text: str) -> Counter:
        """Return what only grows."""
        full = f"springtide_worker_{name}"
        return Counter(full, text, list(self._labels), registry=self._registry).labels(**self._labels)

    def gauge(self, name: str, text: str) -> Gauge:
        """Return a number of the present."""
        full = f"springtide_worker_{name}"
        return Gauge(full, text, list(self._labels), registry=self._registry).labels(**self._labels)

    def seconds(self, name: str, text: str) -> Histogram:
        """Return durations, which are observed in seconds."""
        return self.histogram(f"{name}_seconds", text, _SECONDS)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """Return a distribution.

        Args:
            name: without the prefix.
            text: what is observed.
            buckets: their upper bounds.
        """
        full, labels = f"springtide_worker_{name}", list(self._labels)
        made = Histogram(full, text, labels, buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)


class TransferSeries:
    """Hold the series of state that members send each other."""

    def __init__(self, series: _Series) -> None:
        self.transfers = series.counter(
            "state_transfers", "State transfers that this process sent or received."
        )
        self.sent_bytes = series.counter(
            "state_transfer_bytes", "Bytes of state that this process sent or received, as they move."
        )
        self.kept_bytes = series.counter(
            "state_transfer_kept_bytes",
            "Bytes of state that did not have to come, since this process had them bit for bit.",
        )


class CheckpointSeries:
    """Hold the series of checkpoints that this process has a share in."""

    def __init__(self, series: _Series) -> None:
        self.writing = series.seconds(
            "checkpoint", "Writing this process's share of a checkpoint, and waiting for it."
        )
        self.stall = series.seconds(
            "checkpoint_stall", "Training stood still for the copy that a checkpoint is written from."
        )
        self.written_bytes = series.counter(
            "checkpoint_bytes", "Bytes of checkpoints that this process wrote."
        )
        self.failures = series.counter(
            "checkpoint_failures", "Checkpoints that failed in this process, or could not be completed by it."
        )


class MemorySeries:
    """Hold the series of the memory that this process needs and may take."""

    def __init__(self, series: _Series) -> None:
        self.estimate = series.gauge(
            "memory_estimate_bytes",
            "Bytes that this process needs for parameters, gradients and the optimizer's state, at the "
            "present size; activations come on top.",
        )
        self.limit = series.gauge(
            "memory_limit_bytes",
            "Bytes that this process may take of the memory that its parameters are in; 0 where that is not "
            "known.",
        )


class TrackerSeries:
    """Hold the series of the experiment trackers, which have their name as a label."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._labels, names = labels, [*labels, "tracker"]
        self._failures = Counter(
            "springtide_worker_tracker_failures",
            "Calls of an experiment tracker that raised; each is tried again.",
            names,
            registry=registry,
        )
        self._losses = Counter(
            "springtide_worker_tracker_lost_commits",
            "Commits that an experiment tracker did not take while this process could keep them.",
            names,
            registry=registry,
        )
        self._waiting = Gauge(
            "springtide_worker_tracker_waiting_commits",
            "Commits that wait for an experiment tracker, at the process that writes to it; 0 elsewhere.",
            names,
            registry=registry,
        )

    def counts(self, name: str) -> TrackerCounts:
        """Return the counts of the tracker of that name."""
        labels = {**self._labels, "tracker": name}
        return TrackerCounts(
            self._failures.labels(**labels), self._losses.labels(**labels), self._waiting.labels(**labels)
        )


class Metrics:
    """Hold the series of one worker process; labels name the job as the operator's do."""

    def __init__(self, job: str, namespace: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"training_job": job, "job_namespace": namespace}
        series = _Series(self.registry, self._labels)
        # Committed steps.
        self.step = series.seconds("step", "From the begin of a committed step's body to its commit.")
        self.compute = series.seconds("compute", "Forward and backward of a committed step.")
        self.data = series.seconds("data", "Fetching the samples of a committed step; part of compute.")
        self.communication = series.seconds(
            "communication", "From the begin of a committed step's first reduction to the end of its last."
        )
        self.exposed = series.seconds(
            "exposed_communication", "Wait for reductions after backward of a committed step."
        )
        self.steps = series.counter("steps", "Steps that this process committed.")
        self.samples = series.counter(
            "samples", "Samples whose gradients this process put into committed steps."
        )
        self.dropped = series.counter("dropped_steps", "Steps whose body was dropped.")
        self.salvaged = series.counter(
            "salvaged_samples",
            "Samples of committed steps that this process had computed in a dropped try at the same step.",
        )
        self.reduced_bytes = series.counter(
            "reduced_bytes", "Bytes that this process put into the reductions of committed steps."
        )
        self._overlap = series.gauge(
            "overlap_ratio", "Part of the communication of the last committed step that computing hid, 0-1."
        )
        self.since_commit = series.gauge(
            "since_commit_seconds",
            "For how long this process has committed no step; NaN before the first.",
        )
        self.values = series.seconds(
            "values",
            "Wait for the values of parameters that other workers step, between two committed steps.",
        )
        self.staleness = series.histogram(
            "staleness_updates",
            "Updates of others that a chunk got between this process's pull and its push, the mean over the "
            "chunks.",
            (0, 1, 2, 4, 8, 16, 32, 64, 128),
        )
        self.batch_share = series.gauge(
            "batch_share",
            "Part of each global batch that falls to this process, 0-1; with elasticity.balance Speed it "
            "follows the process's speed.",
        )
        self.sample_seconds = series.gauge(
            "sample_seconds",
            "Computing time per sample of this process, smoothed, without fetching samples and waiting for "
            "others; 0 before it is known.",
        )
        # The state.
        self.replicas_differed = series.counter(
            "replicas_differed",
            "Steps in which members were found to have other parameters than most.",
        )
        self.copies_differed = series.counter(
            "shard_copies_differed",
            "Times that a copy of shards that this process holds was found not to be the other holder's.",
        )
        self.optimizer_bytes = series.gauge(
            "optimizer_bytes",
            "Bytes of the optimizer's state that this process holds, where it is in shards; 0 elsewhere.",
        )
        self.transfer = TransferSeries(series)
        self.checkpoint = CheckpointSeries(series)
        self.memory = MemorySeries(series)
        # The job.
        self.coordinator_missing = series.gauge(
            "coordinator_missing_seconds",
            "For how long this process has had no stream to the coordinator; 0 while it has one.",
        )
        self.generation = series.gauge("generation", "Number of the membership generation.")
        self._trackers = TrackerSeries(self.registry, self._labels)

    def tracker(self, name: str) -> TrackerCounts:
        """Return the counts of an experiment tracker of that name."""
        return self._trackers.counts(name)

    def count_spans(self, spans: SpanQueue) -> None:
        """Show how many spans of this process reached a collector, from now on."""
        self.registry.register(SpanCollector(spans, self._labels))

    def communicated(self, seconds: float, exposed: float, size: int) -> None:
        """Count the reductions of a committed step.

        Args:
            seconds: from the first one's begin to the last one's end.
            exposed: of those, seconds that computing did not hide.
            size: bytes that this process put in.
        """
        self.communication.observe(seconds)
        self.reduced_bytes.inc(size)
        self._overlap.set(1.0 - min(1.0, exposed / seconds) if seconds > 0 else 0.0)

    def serve(self, port: int, address: str, port_file: str = "") -> Callable[[], None]:
        """Serve /metrics; a taken port is replaced by a free one, and no failure is fatal.

        Args:
            port: 0 for a free one.
            address: the one to listen on; all when empty.
            port_file: if given, serve on a free port of the loopback address and write its number there,
                for the launcher of several processes, which serves the metrics of all.

        Returns:
            The call that ends it.
        """
        if port_file:
            port, address = 0, "127.0.0.1"
        metrics = ThrottledValue(lambda: generate_latest(self.registry))

        def answer(request: Request) -> Reply:
            if request.path not in ("/metrics", "/"):
                return in_words(404, "/metrics")
            return Reply(200, metrics(), CONTENT_TYPE_LATEST)

        for candidate in (port, 0):
            try:
                server = BoundedServer(answer, address, candidate)
            except OSError as error:
                log.warning("metrics: port %d cannot be used (%s)", candidate, error.strerror)
                continue
            log.info("metrics on port %d", server.port)
            if port_file:
                _write_port(port_file, server.port)
            return server.close
        return lambda: None


def _write_port(path: str, port: int) -> None:
    try:
        Path(f"{path}.tmp").write_text(str(port))
        os.replace(f"{path}.tmp", path)
    except OSError as error:
        log.warning("metrics: cannot tell the launcher the port in %s (%s)", path, error.strerror)
