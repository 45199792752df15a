"""ElasticAccelerator with the real accelerate: the numbers of Accelerator, for a script's own loop."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from halt import Halt
from worker_cluster import Worker, WorkerCluster, Zygote

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "accelerate_script.py"
SEEDS = SCRIPT.with_name("accelerate_chaos_seeds.txt")

pytestmark = [
    pytest.mark.timeout(int(300 + 2 * seconds(3))),
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None,
        reason="accelerate is not installed: pip install 'springtide[worker,accelerate]'",
    ),
]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(ZYGOTE_IMPORTS="accelerate accelerate.state")
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def train_plainly(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train_plainly(OPTIONS, plain=True)` runs the script without a job: with accelerate's own Accelerator."""
    known: dict[str, dict[str, Any]] = {}

    def train(options: dict[str, Any], *, plain: bool = True) -> dict[str, Any]:
        key = json.dumps([options, plain])
        if key not in known:
            folder = tmp_path_factory.mktemp("plain")
            argv = [str(SCRIPT), str(folder), json.dumps(options | {"plain": plain})]
            assert zygote.wait(zygote.fork({}, argv, folder / "log"), 120.0) == 0, (folder / "log").read_text()
            name = "plain" if plain else "alone"
            found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
            known[key] = found | {"events": events(folder / f"{name}.events")}
        return known[key]

    return train


def events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def of(worker: Worker) -> list[dict[str, Any]]:
    return events(worker.folder / f"{worker.name}.events")


def start(
    new_cluster: Callable[..., WorkerCluster], options: dict[str, Any], **settings: Any
) -> WorkerCluster:
    return new_cluster(options, script=SCRIPT, **settings)


def check_end(worker: Worker, wanted: dict[str, Any], cluster: WorkerCluster, tolerance: float = 2e-5) -> None:
    """Check that a worker has the numbers of plain training, for the steps since it came."""
    assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
    found = worker.result()
    assert found is not None
    assert found["values"] == pytest.approx(wanted["values"], abs=max(1e-4, tolerance))
    assert (found["saved"], found["audit"]["lost"], found["audit"]["repeated"]) == (wanted["saved"], 0, 0)
    known = {entry["step"]: entry for entry in wanted["events"] if "step" in entry}
    steps = [entry for entry in of(worker) if "step" in entry]
    for entry in steps:
        assert entry == pytest.approx(known[entry["step"]], abs=tolerance), entry["step"]
    numbers = [entry["step"] for entry in steps]
    assert numbers == sorted(set(numbers)), "once for each step"
    if steps:
        last = {entry["epoch"]: entry["evaluated"] for entry in wanted["events"] if "epoch" in entry}
        own = [entry for entry in of(worker) if "epoch" in entry][-1]
        assert own["evaluated"] == pytest.approx(last[own["epoch"]], abs=tolerance)


WHOLE: dict[str, Any] = {"batch_size": 12}
SPLIT: dict[str, Any] = {"batch_size": 2, "accumulation": 2, "reference_workers": 3}
"""The same global batch of 12 samples: four steps in an epoch of 48."""


def test_alone_it_is_the_accelerator(train_plainly: Train) -> None:
    for options in ({"batch_size": 4, "accumulation": 3}, WHOLE | {"max_train_steps": 6}):
        wanted, found = train_plainly(options), train_plainly(options, plain=False)
        assert found["values"] == pytest.approx(wanted["values"], abs=1e-5)
        assert (found["steps"], found["saved"]) == (wanted["steps"], wanted["saved"])
        assert found["patience"]["best"] == pytest.approx(wanted["patience"]["best"], abs=1e-5)
        for one, other in zip(found["events"], wanted["events"], strict=True):
            # Accelerate's loss in a step of several batches is that of the last one.
            assert one == pytest.approx(other | {"loss": one.get("loss")} if "loss" in one else other, abs=2e-5)
        assert wanted["unclassified"] == [], "each argument of the installed release has its place"


@pytest.mark.parametrize("options", [SPLIT, SPLIT | {"patience": 1, "epochs": 30}], ids=["all", "early end"])
def test_same_losses_through_a_kill_and_a_join(
    options: dict[str, Any], new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    """One of three dies in a backward pass, and one joins in the second epoch: nobody restarts."""
    wanted = train_plainly(options | WHOLE | {"accumulation": 1, "reference_workers": 1})
    cluster = start(new_cluster, options)
    first, second, third = cluster.start(3, faults={0: "backward:3:kill"})
    cluster.until_step(6, second)
    joiner = cluster.add()
    cluster.until_done(second, third, joiner)
    assert first.code == -9, cluster.logs()
    for worker in (second, third, joiner):
        check_end(worker, wanted, cluster)
    assert [entry["step"] for entry in of(second) if "step" in entry] == list(range(1, wanted["steps"] + 1))
    (joined, *_) = [entry["step"] for entry in of(joiner) if "step" in entry]
    assert joined > 6
