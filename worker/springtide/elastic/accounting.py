"""Count committed steps: metrics, times, the commits to tell the coordinator of, and the step log."""

from __future__ import annotations

import contextlib
import math
import time

from springtide.coordination.metrics import Metrics
from springtide.coordination.progress import Commit, CommitLog, StepLog
from springtide.data.balance import OwnShare
from springtide.loggers.tracking import Tracking
from springtide.settings import Settings
from springtide.train_step.context import StepContext
from springtide.train_step.timing import Timing
from springtide_protocol.names import StateName


class Accounting:
    """Keep the accounts of this process. The script's thread writes them; the metrics may be read by any."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics(settings.job, settings.namespace)
        self.timing = Timing()
        self.commits = CommitLog()
        self.step_log = StepLog(settings.step_log, settings.pod_name or "alone")
        self.tracking: Tracking | None = None
        """Experiment trackers; None where the script has none."""
        self._committed_at = math.nan
        self.metrics.since_commit.set_function(lambda: time.monotonic() - self._committed_at)

    def count_step(
        self, body: StepContext, seconds: float, state: StateName, values: dict[str, float]
    ) -> Commit:
        """Count a committed step in metrics and times.

        Args:
            body: the account of the step's body.
            seconds: from the body's begin to the commit.
            state: the state that the step made.
            values: means of the reported values over all members.

        Returns:
            The commit, which is not yet in the commit log or the step log.
        """
        data, paused = self.timing.committed(seconds, body.backward_seconds, body.exposed_seconds)
        self.metrics.step.observe(seconds)
        self.metrics.compute.observe(body.backward_seconds)
        self.metrics.exposed.observe(body.exposed_seconds)
        self.metrics.data.observe(data)
        self.metrics.communicated(body.communication_seconds, body.exposed_seconds, body.reduced_bytes)
        self.metrics.steps.inc()
        self._committed_at = time.monotonic()
        self.metrics.samples.inc(body.samples)
        return Commit(
            state,
            time.time(),
            seconds,
            body.exposed_seconds,
            body.assignment.batch.micro.global_samples,
            values,
            data,
            paused,
            body.skipped,
        )

    def announce(self, commit: Commit) -> None:
        """Keep a commit for the coordinator and for experiment trackers, which hear of it later."""
        self.commits.add(commit)
        if self.tracking is not None:
            self.tracking.committed(commit.state, commit.unix_time, commit.values)

    def share(self, share: OwnShare) -> None:
        """Show which part of each global batch falls to this process from now on."""
        self.timing.share = share
        self.metrics.batch_share.set(share.part)
        self.metrics.sample_seconds.set(share.sample_seconds)

    def count_stall(self, seconds: float) -> None:
        """Count the time for which training stood still for a checkpoint's copy."""
        self.timing.paused(seconds)
        self.metrics.checkpoint.stall.observe(seconds)

    def close(self) -> None:
        """Close the step log; an error of its file is ignored, because the process ends."""
        with contextlib.suppress(OSError):
            self.step_log.close()
