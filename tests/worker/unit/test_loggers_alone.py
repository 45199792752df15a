"""`springtide.init(loggers=...)`: its arguments, and a script without a job that has a tracker."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import logging
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loggers_world import Store, StoreLogger
from worker_alone import Script, library

import springtide
from springtide.errors import SpringtideError, UsageError
from springtide.loggers import Generation, Logger, MLflow, Record, Recorded, Run, TensorBoard, WandB
from springtide.loggers.history import WORKERS


def train(script: Script, epochs: int = 1) -> list[float]:
    losses = []
    for batch in script.batches(epochs=epochs):
        with springtide.step():
            loss = script.loss(batch)
            loss.backward()
            springtide.report(loss=loss)
            script.finish()
        losses.append(float(loss.detach()))
    return losses


def test_script_alone_has_each_step_and_its_evaluation() -> None:
    store = Store()
    logger = StoreLogger(store)
    with library([logger]) as runtime:
        script = Script()
        losses = train(script, epochs=2)
        evaluation = springtide.batches((script.x, script.y), batch_size=8, train=False)
        for batch in evaluation:
            with torch.no_grad():
                springtide.report(loss=script.loss(batch), accuracy=0.5)
        tracking = runtime.accounting.tracking
        assert tracking is not None
        assert tracking.run.config["springtide/batch_size"] == 8
        assert tracking.run.config["lr"] == 0.1
        assert "springtide/strategy" in tracking.run.config
    assert store.of("loss") == pytest.approx(dict(enumerate(losses, start=1)))
    assert store.of("accuracy") == {6: 0.5}
    assert store.of("outside/loss") == pytest.approx({6: evaluation.values["loss"]})
    assert store.of(WORKERS) == {1: 1.0}
    assert logger.calls == ["open", "close"]


def test_tracker_of_the_docs_goes_on_and_back(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "trackers.md"
    (code,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        if "class Lines" in text
    )
    names: dict[str, Any] = {}
    exec(code.rpartition("\n\n\n")[0], names)
    first, second = (names["Lines"](tmp_path) for _ in range(2))
    assert isinstance(first, Logger)
    run = Run("ns-job-1", "job", {})
    assert first.open(run) == Recorded()
    first.write(
        [Record(step, 0.0, {"loss": 1.0 * step}, generation("1.0/1", step == 1)) for step in (1, 2, 3)]
    )
    assert second.open(run) == Recorded(-1, {"loss": 3}, "1.0/1")
    assert second.rewind(1)
    second.write([Record(2, 0.0, {"loss": 2.5}, generation("2.0/1"))])
    assert first.open(run) == Recorded(-1, {"loss": 2}, "2.0/1")
    with library([first]):
        losses = train(Script())
    (own,) = (path for path in tmp_path.iterdir() if path.name != "ns-job-1.jsonl")
    found = [json.loads(line)["values"]["loss"] for line in own.read_text().splitlines()]
    assert found == pytest.approx(losses)


def generation(name: str, begins: bool = True) -> Generation | None:
    return Generation(name, 2, "") if begins else None


class Hanging(StoreLogger):
    """Takes nothing until it is let go."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, "hanging")
        self.entered, self.go = threading.Event(), threading.Event()

    def write(self, records: Sequence[Record]) -> None:
        self.entered.set()
        assert self.go.wait(30)
        super().write(records)


def test_tracker_that_hangs_holds_up_neither_steps_nor_others() -> None:
    store, other = Store(), Store()
    hanging = Hanging(store)
    with library([hanging, StoreLogger(other)]):
        script = Script()
        train(script)
        assert hanging.entered.wait(30)
        began = time.monotonic()
        train(script, epochs=4)
        deadline = time.monotonic() + 30
        while len(other.of("loss")) < 15 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(other.of("loss")) == 15
        assert not store.points
        assert time.monotonic() - began < 30
        hanging.go.set()
    assert list(store.of("loss")) == list(range(1, 16))


def test_tracker_that_fails_is_told_the_rest_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(fails_after=4)
    with library([StoreLogger(store)]) as runtime, caplog.at_level(logging.WARNING, "springtide"):
        train(Script(), epochs=2)
        deadline = time.monotonic() + 30
        while not count(runtime, "failures_total") and time.monotonic() < deadline:
            time.sleep(0.02)
        store.fails_after = None
    assert list(store.of("loss")) == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("connection refused") == 1


def test_no_tracker_means_no_thread() -> None:
    with library() as runtime:
        train(Script())
        assert runtime.accounting.tracking is None
        assert not [one for one in threading.enumerate() if one.name.startswith("springtide-store")]


def count(runtime: Any, name: str) -> float:
    labels = {"training_job": "", "job_namespace": "", "tracker": "store"}
    found = runtime.accounting.metrics.registry.get_sample_value(f"springtide_worker_tracker_{name}", labels)
    return found or 0.0


@pytest.mark.parametrize(
    ("loggers", "message"),
    [
        ("tensorboard", "expected a list of loggers, got str"),
        ([TensorBoard], "the class TensorBoard is no logger: make one"),
        ([object()], "is no logger: make one, such as springtide.loggers.TensorBoard"),
        ([StoreLogger(Store()), StoreLogger(Store())], "two loggers are named 'store'"),
    ],
)
def test_what_is_no_logger_is_refused(loggers: Any, message: str) -> None:
    with pytest.raises(UsageError, match="init") as caught:
        springtide.init(loggers=loggers)
    assert message in str(caught.value)


def test_config_without_a_tracker_is_refused() -> None:
    with pytest.raises(UsageError, match="give loggers=, too"):
        springtide.init(config={"lr": 0.1})
    with pytest.raises(UsageError, match=r"expected a mapping from names to hyperparameters.*got list"):
        springtide.init(loggers=[StoreLogger(Store())], config=[0.1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("logger", "library_name", "extra"),
    [
        (TensorBoard("/runs"), "tensorboard", "tensorboard"),
        (MLflow(), "mlflow", "mlflow"),
        (WandB("project"), "wandb", "wandb"),
    ],
)
def test_missing_library_is_named_with_its_extra(
    logger: Any, library_name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name.partition(".")[0] == library_name else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(SpringtideError) as caught:
        springtide.init(loggers=[logger])
    assert f"the library {library_name} is not installed" in str(caught.value)
    assert f"pip install 'springtide[{extra}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorBoard("s3://bucket/runs"), "name a folder of a volume that all workers mount"),
        (lambda: MLflow(""), "expected the name of an experiment"),
        (lambda: WandB(""), "expected the name of a project"),
        (lambda: WandB("p", mode="sometimes"), "expected online or offline"),
        (lambda: WandB("p", id="mine"), "so that a job has one run"),
    ],
)
def test_trackers_refuse_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make()
    assert message in str(caught.value)
