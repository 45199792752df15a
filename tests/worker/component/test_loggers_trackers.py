"""Each tracker's own library: writers that follow each other, are cut off, and go back."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import loggers_read
import pytest
from worker_processes import ROOTS

from springtide.loggers import Generation, MLflow, Record, Recorded, Run, TensorBoard
from springtide.loggers.mlflow import REWOUND_TAG, Point, committed

RUN = Run("ns-job-1234", "job", {"lr": 0.1, "model.layers": 2, "deep": True})


def needs(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: pip install 'springtide[{extra}]'")


def records(first: int, last: int, off: float = 0.0, generation: Generation | None = None) -> list[Record]:
    return [
        Record(step, 1000.0 + step, {"loss": step + off}, generation if step == first else None)
        for step in range(first, last + 1)
    ]


FIRST = Generation("1.0/1", 3, "")
SECOND = Generation("2.0/1", 2, "restored")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    needs("tensorboard", "tensorboard")
    return tmp_path


def test_event_files_go_on_after_a_writer_that_was_cut_off(folder: Path) -> None:
    first, second = TensorBoard(folder), TensorBoard(folder)
    assert first.open(RUN) == Recorded()
    first.write(records(1, 5, generation=FIRST))
    (file,) = (folder / RUN.id).iterdir()
    # Killed in the middle of an event.
    file.write_bytes(file.read_bytes()[:-7])
    assert second.open(RUN) == Recorded(-1, {"loss": 4}, "1.0/1")
    second.write(records(5, 6))
    # What the first one adds now comes too late.
    first.write(records(6, 8, off=0.5))
    points, texts = loggers_read.tensorboard(folder, RUN.id)
    assert points["loss"] == [(step, float(step)) for step in range(1, 7)]
    assert texts["springtide/generation@1"] == "generation 1.0/1, 3 workers: the job begins"
    assert "| model.layers | 2 |" in texts["springtide/config@0"]
    first.close("")
    second.close("Finished")


def test_tensorboard_forgets_dropped_steps(folder: Path) -> None:
    logger = TensorBoard(folder)
    logger.open(RUN)
    logger.write(records(1, 9, generation=FIRST))
    assert logger.rewind(4)
    logger.close("")
    # Nothing has been written since, so the next one has to go back, too.
    assert logger.open(RUN).steps == {"loss": 9}
    assert logger.rewind(4)
    logger.write(records(5, 7, off=0.5, generation=SECOND))
    points, _ = loggers_read.tensorboard(folder, RUN.id)
    assert points["loss"] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5.5), (6, 6.5), (7, 7.5)]
    logger.close("")
    assert logger.open(RUN) == Recorded(-1, {"loss": 7}, "2.0/1")


def test_event_files_are_in_the_order_of_their_writers(folder: Path) -> None:
    """Names of files have the time; the second writer's clock is behind the first one's."""
    run = folder / RUN.id
    run.mkdir()
    early = TensorBoard(folder)
    early.open(RUN)
    early.write(records(1, 2))
    early.close("")
    (file,) = run.iterdir()
    ahead = file.rename(run / file.name.replace(file.name.split(".")[3], "9999999990"))
    late = TensorBoard(folder)
    assert late.open(RUN).steps == {"loss": 2}
    late.write(records(3, 3))
    late.close("")
    assert sorted(run.iterdir())[0] == ahead
    # A writer that has slept through another one's time must not drop what that has written.
    early.open(RUN)
    late.open(RUN)
    late.write(records(4, 4))
    with pytest.raises(RuntimeError, match="another process writes"):
        early.write(records(4, 4))
    assert early.open(RUN).steps == {"loss": 4}
    late.close("")


def test_event_files_stay_small_and_are_read_from_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.loggers.tensorboard.MAX_FILE_BYTES", 2000)
    logger = TensorBoard(folder)
    logger.open(RUN)
    logger.write([Record(0, 1.0, {"rare": 1.0})])
    for step in range(1, 200, 10):
        logger.write(records(step, step + 9))
    logger.close("")
    files = sorted((folder / RUN.id).iterdir())
    assert len(files) > 4
    for file in files[1:-1]:
        file.unlink()  # the last one says what was in them
    assert logger.open(RUN).steps == {"rare": 0, "loss": 200}
    points, _ = loggers_read.tensorboard(folder, RUN.id)
    assert points["loss"][-1] == (200, 200.0)


def test_mlflow_run_is_found_again_and_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("mlflow", "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = f"file://{tmp_path}/runs"
    first, second, third = (MLflow("test", tracking_uri=uri) for _ in range(3))
    first.check()
    assert first.open(RUN) == Recorded()
    first.write(records(1, 9, generation=FIRST))
    first.close("")
    assert second.open(RUN) == Recorded(-1, {"loss": 9}, "1.0/1")
    assert second.rewind(4)
    second.write(records(5, 7, off=0.5, generation=SECOND))
    # Cut off: no close. The newest point by its step is one of those that do not count.
    changed = Run(RUN.id, RUN.name, {**RUN.config, "lr": 0.2, "new": 1})
    assert third.open(changed) == Recorded(-1, {"loss": 7}, "2.0/1")
    third.write(records(8, 8))
    third.close("Finished")
    points, run = loggers_read.mlflow(uri, RUN.id)
    expected = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5.5), (6, 6.5), (7, 7.5), (8, 8)]
    assert points["loss"] == expected
    everything, _ = loggers_read.mlflow(uri, RUN.id, all_points=True)
    assert len(everything["loss"]) == 9 + 3 + 1
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "job"
    assert run.data.params == {"lr": "0.1", "model.layers": "2", "deep": "True", "new": "1"}
    assert run.data.tags["springtide.changed.lr"] == "0.2"
    assert run.data.tags["springtide.generation.2.0-1"].startswith("step 5: generation 2.0/1, 2 workers")


def test_points_of_several_ways_back_are_told_apart() -> None:
    tags = {REWOUND_TAG: json.dumps([{"step": 4, "until": 100}, {"step": 2, "until": 200}])}
    points = [
        Point(4, 90, 4.0),
        Point(5, 90, 5.0),
        Point(5, 150, 5.5),
        Point(3, 250, 3.75),
        Point(2, 50, 2.0),
    ]
    assert committed(points, tags) == [Point(2, 50, 2.0), Point(3, 250, 3.75)]
    assert committed(points, {}) == [points[4], points[3], points[0], points[2]]


_WANDB = """
import json, sys
from springtide.loggers import Generation, Record, Run, WandB
run = Run("ns-job-1234", "job", {"lr": 0.1})
logger = WandB("test", folder=sys.argv[1], mode="offline")
logger.check()
recorded = logger.open(run)
goes_back = logger.rewind(int(sys.argv[2])) if sys.argv[2] else None
generation = Generation(sys.argv[3], 2, "") if sys.argv[3] else None
for step in range(int(sys.argv[4]), int(sys.argv[5]) + 1):
    value = {"loss": step + float(sys.argv[6])}
    logger.write([Record(step, 1000.0 + step, value, generation)])
    generation = None
print(json.dumps([recorded.step, recorded.generation, goes_back]), flush=True)
logger.close("Finished")
"""


def test_wandb_offline_goes_on_behind_what_is_there(tmp_path: Path) -> None:
    needs("wandb", "wandb")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(ROOTS), "WANDB_SILENT": "true"}

    def write(*arguments: str) -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", _WANDB, str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            env=env,
            timeout=90,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        found: list[object] = json.loads(done.stdout.splitlines()[-1])
        return found

    assert write("", "1.0/1", "1", "600", "0") == [-1, "", None]
    (session,) = (tmp_path / "wandb").glob("*run-*/*.wandb")
    # A process of W&B that is killed leaves a part of its session, cut off in the middle of a record.
    session.write_bytes(session.read_bytes()[: session.stat().st_size * 3 // 5 + 1])
    rows = loggers_read.wandb(tmp_path, RUN.id)["loss"]
    newest = rows[-1][0]
    assert 100 < newest < 600
    assert rows == [(step, step) for step in range(1, newest + 1)]
    behind = [str(newest + 1), str(newest + 4), "0.5"]
    assert write("3", "2.0/1", *behind) == [newest, "1.0/1", False]
    assert write("", "", str(newest + 5), str(newest + 5), "0") == [newest + 4, "2.0/1", None]
    steps = [step for step, _ in loggers_read.wandb(tmp_path, RUN.id)["loss"]]
    assert steps == list(range(1, newest + 6))
