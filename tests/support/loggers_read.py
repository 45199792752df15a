"""Read what trackers show of a run, each by its own library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from springtide.loggers.mlflow import RUN_TAG, committed
from springtide.loggers.wandb import session_rows

Points = dict[str, list[tuple[int, float]]]


def tensorboard(folder: Path, run_id: str) -> tuple[Points, dict[str, str]]:
    """Scalars by tag, and texts by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / run_id), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags: Any = events.Tags()
    points = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {
        f"{tag}@{one.step}": one.tensor_proto.string_val[0].decode()
        for tag in tags["tensors"]
        if events.SummaryMetadata(tag).plugin_data.plugin_name == "text"
        for one in events.Tensors(tag)
    }
    return points, texts


def mlflow(uri: str, run_id: str, all_points: bool = False) -> tuple[Points, Any]:
    """Metrics by name, and the run; all_points: those of dropped steps, too."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("test")
    runs = client.search_runs([experiment.experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{run_id}'")
    assert len(runs) == 1
    run = client.get_run(runs[0].info.run_id)
    points = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        kept = sorted(history, key=lambda p: p.step) if all_points else committed(history, run.data.tags)
        points[name] = [(point.step, point.value) for point in kept]
    return points, run


def wandb(folder: Path, run_id: str) -> Points:
    """Values by name of the rows of all sessions."""
    points: Points = {}
    for step, row in sorted(session_rows(folder / "wandb", run_id), key=lambda one: one[0]):
        for name, value in row.items():
            points.setdefault(name, []).append((step, value))
    return points
