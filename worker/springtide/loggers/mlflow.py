"""Write metrics of an MLflow run, which is found again by a tag.

MLflow keeps every point and takes none back. When steps were dropped, the run gets a tag that says up to when
points behind which step count no more; what is made anew is written beside them, with later times.
`committed` tells them apart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from springtide.errors import UsageError
from springtide.loggers.logger import Record, Recorded, Run, require

RUN_TAG: Final = "springtide.run"
"""Tag by which the run of a job is found."""
GENERATION_TAG: Final = "springtide.generation"
"""Tag with the name of the newest generation; with `.NAME` behind it one for each, which says why it is."""
REWOUND_TAG: Final = "springtide.rewound"
"""Tag with a list in JSON of `{"step": ..., "until": ...}`: points behind that step whose time in ms is not
later than that were dropped."""
MAX_REWINDS: Final = 100
"""Entries of that list, the newest ones."""
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # of one request
_MAX_TEXT = 6000  # of a parameter's value


class Point(NamedTuple):
    """One point of a metric: its step, its time in ms and its value."""

    step: int
    timestamp: int
    value: float


def committed(points: Iterable[Point], tags: Mapping[str, str]) -> list[Point]:
    """Return the points of steps that the job still has, each step once, in their order.

    Args:
        points: of one metric, as `MlflowClient.get_metric_history` returns them.
        tags: of the run.
    """
    rewound = json.loads(tags.get(REWOUND_TAG, "[]"))
    newest: dict[int, Point] = {}
    for point in points:
        if any(point.step > one["step"] and point.timestamp <= one["until"] for one in rewound):
            continue
        known = newest.get(point.step)
        if known is None or point.timestamp >= known.timestamp:
            newest[point.step] = point
    return [newest[step] for step in sorted(newest)]


class MLflow:
    """Write values of committed steps to MLflow, as metrics of one run for each job.

    A point cannot be taken back: of steps that were dropped and made anew there are two points, of which the
    later one counts, and the tag `springtide.rewound` says which (`springtide.loggers.mlflow.committed`
    reads it). Changes of the members are the metric `springtide/workers` and tags `springtide.generation...`,
    hyperparameters are the run's parameters.
    """

    settle_seconds = 3.0

    def __init__(
        self, experiment: str = "springtide", *, tracking_uri: str | None = None, name: str = "mlflow"
    ) -> None:
        """Make the logger; nothing is read or written yet.

        Args:
            experiment: name of the experiment, which is made if it is not there.
            tracking_uri: of the server; None: the one of MLFLOW_TRACKING_URI.
            name: of the logger, in logs and metrics.

        Raises:
            UsageError: the experiment has no name.
        """
        if not isinstance(experiment, str) or not experiment:
            raise UsageError(f"MLflow({experiment!r}): expected the name of an experiment")
        self.name = name
        self._experiment, self._uri = experiment, tracking_uri
        # From `open` to `close`.
        self._client: Any = None
        self._run_id = ""
        self._rewound: list[dict[str, int]] = []
        self._newest_timestamp = 0

    def check(self) -> None:
        """Raise SpringtideError when MLflow's client is missing."""
        require("mlflow", "MLflow(...)", "mlflow")

    def open(self, run: Run) -> Recorded:
        """Find the run by its tag or create it, and read how far its metrics are."""
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self._uri)
        found = client.get_experiment_by_name(self._experiment)
        experiment = client.create_experiment(self._experiment) if found is None else found.experiment_id
        runs = client.search_runs(
            [experiment],
            filter_string=f"tags.`{RUN_TAG}` = '{run.id}'",
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        if runs:
            self._run_id = runs[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            made = client.create_run(experiment, run_name=run.name, tags={RUN_TAG: run.id})
            self._run_id = made.info.run_id
        data = client.get_run(self._run_id).data
        self._rewound = json.loads(data.tags.get(REWOUND_TAG, "[]"))
        self._newest_timestamp = max((one["until"] for one in self._rewound), default=0)
        self._write_config(run.config, data.params)
        steps = {}
        for metric in data.to_proto().metrics:  # the point of the greatest step of each
            point = Point(metric.step, metric.timestamp, metric.value)
            left = committed([point], data.tags)
            if not left:
                history = client.get_metric_history(self._run_id, metric.key)
                left = committed([Point(p.step, p.timestamp, p.value) for p in history], data.tags)
            self._newest_timestamp = max(self._newest_timestamp, point.timestamp)
            if left:
                steps[metric.key] = left[-1].step
        return Recorded(-1, steps, data.tags.get(GENERATION_TAG, ""))

    def rewind(self, step: int) -> bool:
        """Say in a tag that what is there behind the step does not count."""
        until = max(self._newest_timestamp, int(time.time() * 1000))
        self._rewound = [*self._rewound, {"step": step, "until": until}][-MAX_REWINDS:]
        self._client.set_tag(self._run_id, REWOUND_TAG, json.dumps(self._rewound))
        self._newest_timestamp = until
        return True

    def write(self, records: Sequence[Record]) -> None:
        """Log the records, the annotation of a generation before its metrics."""
        from mlflow.entities import Metric

        metrics: list[Any] = []
        # What was dropped has the times up to this one.
        later = max((one["until"] for one in self._rewound), default=0) + 1
        for record in records:
            if record.generation is not None:
                self._log(metrics)
                metrics = []
                name = record.generation.name
                text = f"step {record.step}: {record.generation}"
                self._client.set_tag(self._run_id, f"{GENERATION_TAG}.{name.replace('/', '-')}", text)
                self._client.set_tag(self._run_id, GENERATION_TAG, name)
            timestamp = max(int(record.unix_time * 1000), later)
            self._newest_timestamp = max(self._newest_timestamp, timestamp)
            metrics += [Metric(name, value, timestamp, record.step) for name, value in record.values.items()]
        self._log(metrics)

    def close(self, outcome: str) -> None:
        """End the run when the job has ended."""
        client, self._client = self._client, None
        if client is not None and self._run_id and outcome:
            client.set_terminated(self._run_id, "FINISHED" if outcome == "Finished" else "FAILED")

    def _log(self, metrics: Sequence[Any]) -> None:
        for some in _in_batches(metrics, _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=some)

    def _write_config(self, config: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Log parameters that the run has not. One that has changed becomes a tag: MLflow keeps the first."""
        from mlflow.entities import Param

        texts = {name: str(value)[:_MAX_TEXT] for name, value in config.items()}
        fresh = [Param(name, text) for name, text in texts.items() if name not in known]
        for some in _in_batches(fresh, _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=some)
        for name, text in texts.items():
            if name in known and known[name] != text:
                self._client.set_tag(self._run_id, f"springtide.changed.{name.replace('/', '.')}", text)


def _in_batches(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[first : first + size]) for first in range(0, len(items), size)]
