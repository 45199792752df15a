"""SpringtideStrategy with the real Lightning: the numbers of its own strategy, each hook once for a step."""

from __future__ import annotations

import csv
import importlib.util
from collections import Counter
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
    lose_the_writer,
    survive,
)
from worker_cluster import Worker, WorkerCluster, Zygote

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "lightning_script.py"
SEEDS = SCRIPT.with_name("lightning_chaos_seeds.txt")
IMPORTS = "lightning.pytorch torchmetrics lightning.pytorch.loggers"

pytestmark = [
    pytest.mark.timeout(int(300 + 2 * seconds(3))),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None,
        reason="lightning is not installed: pip install 'springtide[worker,lightning]'",
    ),
]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(ZYGOTE_IMPORTS=IMPORTS, MKL_CBWR="AVX2,STRICT")  # of exact mode
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def train_plainly(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """`train_plainly(OPTIONS, plain=True)` runs the script without a job, with Lightning's own strategy."""
    return PlainRuns(zygote, SCRIPT, tmp_path_factory, lambda folder: {"rows": rows(folder)})


def rows(folder: Path) -> list[dict[str, str]]:
    """Read what the logger has written, a row for each step or evaluation, without the names it lacks."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(newline="") as file:
        return [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]


def steps_of(found: list[dict[str, Any]], event: str) -> list[int]:
    return [entry["step"] for entry in found if entry["event"] == event]


def check_same(found: list[dict[str, Any]], wanted: list[dict[str, Any]], tolerance: float = 2e-5) -> None:
    """Check that a worker's steps have the losses, norms and logged values of plain training.

    Steps before the worker joined are not there.
    """
    for hook in ("on_train_batch_end", "on_before_optimizer_step", "on_validation_end", "on_train_epoch_end"):
        known = {entry["step"]: entry for entry in reversed(wanted) if entry["event"] == hook}
        for entry in found:
            if entry["event"] != hook or not entry["step"]:
                continue  # the sanity check comes before training
            same = known[entry["step"]]
            for name in ("loss", "norm", "ended", "batch_idx"):
                assert entry.get(name) == pytest.approx(same.get(name), abs=tolerance), (hook, entry["step"])
            metrics, like = entry.get("metrics", {}), same.get("metrics", {})
            assert set(metrics) == set(like), (hook, entry["step"])
            assert metrics == pytest.approx(like, abs=tolerance), (hook, entry["step"])


def check_end(
    worker: Worker,
    wanted: dict[str, Any],
    cluster: WorkerCluster,
    tolerance: float = 1e-4,
    *,
    has_files: bool = True,
) -> None:
    assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
    found = worker.result()
    assert found is not None
    assert found["values"] == pytest.approx(wanted["values"], abs=tolerance)
    for name in ("global_step", "epoch", "ended"):
        assert found[name] == wanted[name], name
    assert found["best"][0] == pytest.approx(wanted["best"][0], abs=tolerance)
    if has_files:
        assert (found["best"][1], found["checkpoints"]) == (wanted["best"][1], wanted["checkpoints"])
    for one, other in zip(found["after"], wanted["after"], strict=True):
        assert one == pytest.approx(other, abs=2e-5)
    assert found["audit"]["lost"] == found["audit"]["repeated"] == 0


def start(
    new_cluster: Callable[..., WorkerCluster], options: dict[str, Any], **settings: Any
) -> WorkerCluster:
    return new_cluster(options, script=SCRIPT, **settings)


STEPS: dict[str, Any] = {
    "batch_size": 12,
    "test": True,
    "arguments": {"gradient_clip_val": 0.5, "val_check_interval": 3, "check_val_every_n_epoch": None},
}
"""One batch of 12 samples is a step: five in an epoch of 50."""
SPLIT = STEPS | {"batch_size": 4, "reference_workers": 3}
"""The same global batch, as three processes would have had it."""


@pytest.mark.slow
def test_alone_it_is_lightning(train_plainly: Train) -> None:
    """One process: the same numbers, hooks and rows of the log, in the same order."""
    wanted, found = train_plainly(STEPS), train_plainly(STEPS, plain=False)
    assert found["values"] == pytest.approx(wanted["values"], abs=1e-6)
    assert [entry["event"] for entry in found["events"]] == [entry["event"] for entry in wanted["events"]]
    assert [entry["step"] for entry in found["events"]] == [entry["step"] for entry in wanted["events"]]
    check_same(found["events"], wanted["events"])
    for one, other in zip(found["rows"], wanted["rows"], strict=True):
        assert {key: float(value) for key, value in one.items()} == pytest.approx(
            {key: float(value) for key, value in other.items()}, abs=2e-5
        )
    assert found["after"][0] == pytest.approx(wanted["after"][0])
    assert wanted["unclassified"] == [], "each argument of the installed Trainer has its place in ARGUMENTS"


def test_same_losses_through_a_kill_and_a_join(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    """The first of three dies in a backward pass, and one joins: nobody restarts, each hook comes once."""
    wanted = train_plainly(STEPS)
    cluster = start(new_cluster, SPLIT)
    first, second, third = cluster.start(3, faults={0: "backward:5:kill"})
    cluster.until_step(7, second)
    joiner = cluster.add()
    cluster.until_done(second, third, joiner)
    assert first.code == -9, cluster.logs()
    for worker in (second, third, joiner):
        check_end(worker, wanted, cluster)
        check_same(events_of(worker), wanted["events"])
    for worker in (second, third):
        seen = events_of(worker)
        for event in ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end"):
            assert steps_of(seen, event) == steps_of(wanted["events"], event), event
        counted = Counter(entry["event"] for entry in seen)
        assert (counted["on_train_start"], counted["on_train_epoch_start"], counted["on_train_end"]) == (
            1,
            3,
            1,
        )
    joined = steps_of(events_of(joiner), "on_train_batch_end")
    assert joined == list(range(joined[0], 16))
    assert 8 <= joined[0] <= 15
    logged = [float(row["train_loss_step"]) for row in rows(cluster.folder) if "train_loss_step" in row]
    like = [float(row["train_loss_step"]) for row in wanted["rows"] if "train_loss_step" in row]
    assert logged == pytest.approx(like, abs=2e-5), "rank 0 of the moment logs each step, in one file"


@pytest.mark.slow
def test_a_stream_through_a_kill_and_a_join(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    """Passes end where the stream does, and the run in the middle of the third: as Lightning has it."""
    limits = {"max_epochs": -1, "max_steps": 13, "gradient_clip_val": 0.5}
    options = STEPS | {"data": "stream", "arguments": limits}
    wanted = train_plainly(options)
    cluster = start(new_cluster, options | {"batch_size": 4, "reference_workers": 3})
    first, second, third = cluster.start(3, faults={0: "backward:4:kill"})
    cluster.until_step(6, second)
    joiner = cluster.add()
    cluster.until_done(second, third, joiner)
    assert first.code == -9, cluster.logs()
    for worker in (second, third, joiner):
        check_end(worker, wanted, cluster)
        check_same(events_of(worker), wanted["events"])
        found = worker.result()
        assert found is not None
        assert found["audit"]["totalSeen"] == 2 * 50 + 36
    for event in ("on_train_epoch_start", "on_train_epoch_end", "on_train_batch_end", "on_validation_end"):
        assert steps_of(events_of(second), event) == steps_of(wanted["events"], event), event


@pytest.mark.slow
def test_early_stop_in_the_middle_of_an_epoch(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    """A metric ends the training alike on all workers, though one dies before an evaluation."""
    options: dict[str, Any] = STEPS | {
        "patience": 1,
        "arguments": STEPS["arguments"] | {"max_epochs": 20},
    }
    wanted = train_plainly(options)
    assert wanted["global_step"] < 100, "it stops early"
    assert wanted["global_step"] % 5, "in the middle of an epoch of five steps"
    cluster = start(new_cluster, options | {"batch_size": 2, "reference_workers": 6})
    first, second, third = cluster.start(3, faults={0: "committed:3:kill"})
    cluster.until_done(second, third)
    assert first.code == -9, cluster.logs()
    for worker in (second, third):
        check_end(worker, wanted, cluster)
        check_same(events_of(worker), wanted["events"])


CASES: dict[str, dict[str, Any]] = {
    "two optimizers by hand, with schedules, a closure and a clipped one": {
        "model": "players",
        "batch_size": 12,
        "fault": "gradients:4:kill",
        "arguments": {"max_epochs": 2},
    },
    "a schedule by validation, gradients clipped by value, norm layers, processes that read": {
        "batch_size": 12,
        "schedule": "plateau",
        "loader_workers": 1,
        "norm": True,
        "arguments": {
            "gradient_clip_val": 0.02,
            "gradient_clip_algorithm": "value",
            "max_steps": 8,
            "sync_batchnorm": True,
        },
    },
    "bfloat16": {"batch_size": 12, "tolerance": 0.05, "arguments": {"precision": "bf16-mixed"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_workers_are_lightning(
    options: dict[str, Any], new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    wanted = train_plainly(options)
    cluster = start(new_cluster, options)
    if fault := options.get("fault"):
        lost, *workers = cluster.start(3, faults={0: fault})
        cluster.until_done(*workers)
        assert lost.code == -9, cluster.logs()
    else:
        workers = cluster.start(2)
        cluster.until_done()
    tolerance = options.get("tolerance", 2e-5)
    for worker in workers:
        check_end(worker, wanted, cluster, max(1e-4, tolerance))
        check_same(events_of(worker), wanted["events"], tolerance)


PLACES: dict[str, dict[str, str]] = {
    "exact": {"SPRINGTIDE_LOGICAL_WORKERS": "4"},
    "shards": {"SPRINGTIDE_SHARD": "Gradients"},
}


@pytest.mark.slow
@pytest.mark.parametrize("environment", PLACES.values(), ids=PLACES)
def test_other_ways_to_sum_are_lightning(
    environment: dict[str, str], new_cluster: Callable[..., WorkerCluster], train_plainly: Train
) -> None:
    """Gradients that the hook before a step sees are a part of them in shards, and are not compared."""
    options = STEPS | {"quiet": True}
    wanted = train_plainly(options)
    cluster = start(new_cluster, SPLIT | {"quiet": True}, environment=environment)
    workers = cluster.start(2)
    cluster.until_done()
    for worker in workers:
        check_end(worker, wanted, cluster)
        check_same(events_of(worker), wanted["events"])


COMPRESSED: dict[str, tuple[dict[str, str], dict[str, Any], float]] = {
    "in 16 bits": ({"SPRINGTIDE_COMPRESSION": "BF16"}, STEPS | {"test": False}, 0.02),
    "as products, two optimizers by hand": (
        {"SPRINGTIDE_COMPRESSION": "PowerSGD"},
        {"model": "players", "wide": True, "batch_size": 12},
        0.1,
    ),
}
"""Environment and options of a job, and how far its parameters may be from those of plain training."""


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "options", "bound"), COMPRESSED.values(), ids=COMPRESSED)
def test_compressed_sums_through_a_kill_and_a_join(
    environment: dict[str, str],
    options: dict[str, Any],
    bound: float,
    new_cluster: Callable[..., WorkerCluster],
    train_plainly: Train,
) -> None:
    """Compression changes the same in all workers, and hooks of a batch come once for each step."""
    wanted = train_plainly(options)
    cluster = start(new_cluster, options, environment=environment)
    lost, *workers = cluster.start(3, faults={0: "backward:5:kill"})
    cluster.until_step(7, workers[0])
    workers.append(cluster.add())
    cluster.until_done(*workers)
    assert lost.code == -9, cluster.logs()
    values = []
    for worker in workers:
        check_end(worker, wanted, cluster, bound, has_files=False)
        check_same(events_of(worker), wanted["events"], bound)
        found = worker.result()
        assert found is not None
        values.append(found["values"])
    assert values[0] == values[1] == values[2]
    assert values[0] != pytest.approx(wanted["values"], abs=1e-6), "gradients were compressed"
    for event in ("on_train_batch_start", "on_train_batch_end"):
        assert steps_of(events_of(workers[0]), event) == steps_of(wanted["events"], event), event


@pytest.mark.slow
def test_a_job_begins_again_where_all_were_lost(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    """Counts, logs and callbacks go on from the job's checkpoint; so it ends early at the right step."""
    options: dict[str, Any] = STEPS | {
        "patience": 1,
        "arguments": STEPS["arguments"] | {"max_epochs": 20},
    }
    wanted = train_plainly(options)
    cluster = start(new_cluster, options, environment=checkpoints_in(tmp_path))
    for worker in lose_all_at(cluster, 6, tmp_path):
        check_end(worker, wanted, cluster, has_files=False)  # those of steps that were lost are there, too
        check_same(events_of(worker), wanted["events"])


@pytest.mark.slow
def test_a_joiner_in_the_last_test_ends_with_the_others(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    options = STEPS | {"arguments": STEPS["arguments"] | {"max_epochs": 1}}
    wanted = train_plainly(options)
    cluster = start(new_cluster, options | {"held_until": str(tmp_path / "go")})
    for worker in join_at_the_last_evaluation(cluster, tmp_path / "go"):
        check_end(worker, wanted, cluster)


def test_another_worker_saves_when_the_writer_dies(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Train, tmp_path: Path
) -> None:
    options = {"batch_size": 12, "arguments": {"max_epochs": 2}}
    wanted = train_plainly(options)
    cluster = start(new_cluster, options)
    second = lose_the_writer(cluster, 5, tmp_path)
    check_end(second, wanted, cluster)


PLAYERS: dict[str, Any] = {"model": "players", "batch_size": 12, "arguments": {"max_epochs": 3}}


@pytest.mark.slow
def test_random_faults_change_no_number(zygote: Zygote, tmp_path: Path, train_plainly: Train) -> None:
    """Two of four workers die or are asked to leave at random points, and others join."""
    wanted = [train_plainly(STEPS), train_plainly(PLAYERS)]

    def try_once(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        which = seed.number % 2
        cluster = WorkerCluster(zygote, folder, (SPLIT, PLAYERS)[which], script=SCRIPT)

        def check(worker: Worker) -> None:
            check_end(worker, wanted[which], cluster)
            check_same(events_of(worker), wanted[which]["events"])
            ended = steps_of(events_of(worker), "on_train_batch_end")
            assert len(ended) == len(set(ended)), "once for each step"

        return survive(cluster, seed, 15, check)

    each_seed(SEEDS, seconds(3), try_once)


BEFORE: dict[str, dict[str, Any]] = {
    "Trainer(max_time=True): each worker has a clock of its own": {"arguments": {"max_time": "00:01:00:00"}},
    "Trainer(overfit_batches=2)": {"arguments": {"overfit_batches": 2}},
    "by time: each worker has a clock of its own": {"arguments": {"val_check_interval": "00:01:00:00"}},
    "callback EMAWeightAveraging: the average would be each worker's own": {"callbacks": ["average"]},
    "callback Afterwards has on_after_backward()": {"callbacks": ["after"]},
    "Hooked.on_after_backward(): gradients are not summed there": {"hook": True},
    "fit(ckpt_path='some.ckpt'): its counts and position are those of another run": {
        "ckpt_path": "some.ckpt"
    },
    "drop_last leaves out samples of a pass whose end nobody knows": {"data": "endless", "short": True},
    "limit_train_batches=0.5 is a share of a stream": {
        "data": "endless",
        "arguments": {"limit_train_batches": 0.5},
    },
    "Trainer(val_check_interval=0.5): it is a share of a stream": {
        "data": "endless",
        "arguments": {"val_check_interval": 0.5},
    },
}
DATA: dict[str, dict[str, Any]] = {
    "a SubsetRandomSampler is a sampler of one process": {"data": "sampler"},
    "Odds_0.lock: builtins.object cannot be part of the job's state": {"callbacks": ["odds"]},
    "a dict is no torch.utils.data.DataLoader": {"data": "two"},
    "limit_train_batches=1 in more than one epoch": {"arguments": {"limit_train_batches": 1}},
    "validation after 1 batches is in the middle of a step": {
        "arguments": {"val_check_interval": 1, "accumulate_grad_batches": 2}
    },
}


def test_what_cannot_be_is_refused_by_name(train_plainly: Train) -> None:
    found = train_plainly({"refused": BEFORE}, plain=False)
    for text in BEFORE:
        assert text in found[text]
    for text, case in DATA.items():
        assert text in train_plainly({"refused": {text: case}}, plain=False)[text]


def test_a_second_run_in_one_job_is_refused(train_plainly: Train) -> None:
    """Also by another Trainer with a strategy of its own."""
    options = {"again": True, "arguments": {"max_epochs": 1}}
    said = train_plainly(options, plain=False)["again"]
    assert said.startswith("UsageError: Trainer.fit() was called already: a job trains one model once")


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        ("gather", "all_gather() in a training step: the number of workers changes"),
        ("max", "self.log('highest', reduce_fx='max') in a training step"),
        ("none", "training_step() has returned None: each sample counts in a step"),
        ("skip", "on_train_batch_start() has returned -1"),
        ("twice", "the optimizer_closure was called a second time"),
    ],
)
def test_what_cannot_be_in_a_step_is_refused(odd: str, text: str, train_plainly: Train) -> None:
    assert text in train_plainly({"refused": {text: {"odd": odd}}}, plain=False)[text]


@pytest.mark.slow
def test_the_example_survives_a_kill(new_cluster: Callable[..., WorkerCluster], tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "examples" / "lightning" / "train.py"
    example = tmp_path / "train.py"  # Lightning with the newest torch has warnings, which are errors here
    example.write_text("import warnings\nwarnings.simplefilter('ignore')\n" + source.read_text())
    # LOCAL_RANK is what `springtide launch` sets; Lightning would think of processes of its own by it.
    environment = {"EPOCHS": "1", "OUTPUT": str(tmp_path / "out"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    cluster = new_cluster({}, script=example, environment=environment)
    first, second = cluster.start(2, faults={0: "backward:3:kill"})
    cluster.until_done(second)
    end = second.outcome()
    assert isinstance(end, outcome.Finished), cluster.logs()
    assert (first.code, end.step, end.data["totalSeen"]) == (-9, 23, 1438)
    assert "accuracy" in second.log()
    assert list((tmp_path / "out").rglob("*.ckpt"))
