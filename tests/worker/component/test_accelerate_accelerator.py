"""ElasticAccelerator with the real accelerate: the numbers of Accelerator, for a script's own loop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from trainer_jobs import (
    PlainRuns,
    checkpoints_in,
    events_of,
    join_at_the_last_evaluation,
    lose_all_at,
    survive,
)
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
    """`train_plainly(OPTIONS, plain=True)` runs the script without a job, by default with Accelerator."""
    return PlainRuns(zygote, SCRIPT, tmp_path_factory)


def start(
    new_cluster: Callable[..., WorkerCluster], options: dict[str, Any], **settings: Any
) -> WorkerCluster:
    return new_cluster(options, script=SCRIPT, **settings)


def check_end(
    worker: Worker, wanted: dict[str, Any], cluster: WorkerCluster, tolerance: float = 2e-5
) -> None:
    """Check that a worker has the numbers of plain training, for the steps since it came."""
    assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
    found = worker.result()
    assert found is not None
    assert found["values"] == pytest.approx(wanted["values"], abs=max(1e-4, tolerance))
    assert (found["saved"], found["audit"]["lost"], found["audit"]["repeated"]) == (wanted["saved"], 0, 0)
    known = {entry["step"]: entry for entry in wanted["events"] if "step" in entry}
    steps = [entry for entry in events_of(worker) if "step" in entry]
    for entry in steps:
        assert entry == pytest.approx(known[entry["step"]], abs=tolerance), entry["step"]
    numbers = [entry["step"] for entry in steps]
    assert numbers == sorted(set(numbers)), "once for each step"
    if steps:
        last = {entry["epoch"]: entry["evaluated"] for entry in wanted["events"] if "epoch" in entry}
        own = [entry for entry in events_of(worker) if "epoch" in entry][-1]
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
            assert one == pytest.approx(
                other | {"loss": one.get("loss")} if "loss" in one else other, abs=2e-5
            )
        assert wanted["unclassified"] == [], "each argument of the installed release has its place"


STREAM: dict[str, Any] = {"data": "stream", "samples": 50}
"""Five steps in an epoch, the last of which is short, as nobody knows before."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [SPLIT, SPLIT | STREAM | {"patience": 1, "epochs": 30}], ids=["all", "stream, early end"]
)
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
    assert [entry["step"] for entry in events_of(second) if "step" in entry] == list(
        range(1, wanted["steps"] + 1)
    )
    (joined, *_) = [entry["step"] for entry in events_of(joiner) if "step" in entry]
    assert joined > 6


def test_break_after_so_many_steps(new_cluster: Callable[..., WorkerCluster], train_plainly: Train) -> None:
    """The script leaves its loop in the middle of an epoch, and so does a worker that came later."""
    options = {"max_train_steps": 10}
    wanted = train_plainly(WHOLE | options)
    cluster = start(new_cluster, SPLIT | options)
    workers = cluster.start(2)
    cluster.until_step(5)
    workers.append(cluster.add())
    cluster.until_done()
    for worker in workers:
        check_end(worker, wanted, cluster)
        found = worker.result()
        assert found is not None
        assert found["steps"] == 10


def test_a_joiner_in_the_last_evaluation_ends_too(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    wanted = train_plainly(WHOLE | {"epochs": 1})
    cluster = start(new_cluster, SPLIT | {"epochs": 1, "held_until": str(tmp_path / "go")})
    for worker in join_at_the_last_evaluation(cluster, tmp_path / "go"):
        check_end(worker, wanted, cluster)


@pytest.mark.slow
def test_a_job_begins_again_where_all_were_lost(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    """Loops that are over, schedules and registered objects go on from the job's checkpoint."""
    early: dict[str, Any] = STREAM | {"patience": 1, "epochs": 30}
    options, wanted = SPLIT | early, train_plainly(WHOLE | early)
    cluster = start(new_cluster, options, environment=checkpoints_in(tmp_path))
    for worker in lose_all_at(cluster, 10, tmp_path):
        check_end(worker, wanted, cluster)


def test_another_worker_saves_when_the_writer_dies(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    """The second one comes to the place where one of them saves when the first one has died there."""
    wanted = train_plainly(WHOLE | {"epochs": 2})
    dead = tmp_path / "dead"
    late = {"epochs": 2, "late": "worker-1", "late_until": str(dead)}
    cluster = start(new_cluster, SPLIT | late)
    first, second = cluster.start(2, faults={0: "evaluation:4:kill"})
    cluster.until_done(first)
    assert first.code == -9, cluster.logs()
    dead.touch()
    cluster.until_done(second)
    check_end(second, wanted, cluster)
    assert (second.folder / "out-elastic" / "epoch_0" / "model.safetensors").exists()


@pytest.mark.slow
def test_random_faults_change_no_number(zygote: Zygote, tmp_path: Path, train_plainly: Train) -> None:
    """Two of four workers die or are asked to leave at random points, and others join."""
    kinds: list[dict[str, Any]] = [{"patience": 2, "epochs": 6}, {"max_train_steps": 14, "epochs": 5}]

    def try_once(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        options = kinds[seed.number % 2]
        wanted = train_plainly(WHOLE | options)
        cluster = WorkerCluster(zygote, folder, SPLIT | options, script=SCRIPT)
        return survive(cluster, seed, wanted["steps"], lambda worker: check_end(worker, wanted, cluster))

    each_seed(SEEDS, seconds(3), try_once)


REFUSED: dict[str, dict[str, Any]] = {
    "ElasticAccelerator(): mixed_precision='fp16'": {"arguments": {"mixed_precision": "fp16"}},
    "the DataLoader has a NoneType for its batches": {"data": "batches"},
    "set_trigger(): decide by what all workers have alike": {"call": "accelerator.set_trigger()"},
    "drop_last leaves out samples of a pass whose end nobody knows": {"data": "stream", "short": True},
    "len() of a prepared DataLoader over a stream": {"data": "stream", "call": "len(loader)"},
    "no_sync(): use `with accelerator.accumulate(model):`": {"call": "accelerator.no_sync(model)"},
    "accumulate() outside of a training loop": {"call": "accelerator.accumulate(model).__enter__()"},
    "load_state('some'): the position in the data": {"call": "accelerator.load_state('some')"},
}
IN_STEPS: dict[str, dict[str, Any]] = {
    "gather() in a training step: the number of workers changes": {"step": "accelerator.gather(x)"},
    "a micro-batch was not trained: put the code of the training loop into": {"step": "none"},
}


def test_what_cannot_be_is_refused_by_name(train_plainly: Train) -> None:
    found = train_plainly({"refused": REFUSED}, plain=False)
    for text in REFUSED:
        assert text in found[text]
    for text, case in IN_STEPS.items():
        assert text in train_plainly({"refused": {text: case}}, plain=False)[text]


def test_the_example_survives_a_kill(new_cluster: Callable[..., WorkerCluster], tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "accelerate" / "train.py"
    # LOCAL_RANK is what `springtide launch` sets; accelerate would form a group of its own by it.
    environment = {"EPOCHS": "2", "OUTPUT": str(tmp_path / "out"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    cluster = new_cluster({}, script=example, environment=environment)
    first, second = cluster.start(2, faults={0: "backward:3:kill"})
    cluster.until_done(second)
    end = second.outcome()
    assert isinstance(end, outcome.Finished), cluster.logs()
    assert (first.code, end.step, end.data["totalSeen"]) == (-9, 46, 2 * 1438)
    assert "epoch 2: accuracy" in second.log()
    assert (tmp_path / "out" / "model.safetensors").exists()
