"""ElasticTrainer with the real transformers: the numbers of Trainer, and each event once for each step."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from halt import Halt
from trainer_jobs import join_at_the_last_evaluation
from worker_cluster import Worker, WorkerCluster, Zygote

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "transformers_script.py"
SEEDS = SCRIPT.with_name("transformers_chaos_seeds.txt")
IMPORTS = (
    "transformers.trainer transformers.models.gpt2.modeling_gpt2 transformers.models.bert.modeling_bert "
    "accelerate.state"
)

pytestmark = [
    pytest.mark.timeout(int(300 + 2 * seconds(3))),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None,
        reason="transformers is not installed: pip install 'springtide[worker,transformers]'",
    ),
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(ZYGOTE_IMPORTS=IMPORTS)
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def train_plainly(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """`train_plainly(OPTIONS, plain=True)` runs the script without a job: with transformers' own Trainer."""

    def train(options: dict[str, Any], *, plain: bool = True) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("plain")
        argv = [str(SCRIPT), str(folder), json.dumps(options | {"plain": plain})]
        assert zygote.wait(zygote.fork({}, argv, folder / "log"), 120.0) == 0, (folder / "log").read_text()
        name = "plain" if plain else "alone"
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return found | {"events": events(folder / f"{name}.events"), "folder": folder}

    return train


def events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def losses(history: list[dict[str, Any]], name: str = "loss") -> dict[int, float]:
    return {entry["step"]: entry[name] for entry in history if name in entry}


def steps_of(found: list[dict[str, Any]], event: str) -> list[int]:
    return [entry["step"] for entry in found if entry["event"] == event]


def check_same(
    found: dict[str, Any], wanted: dict[str, Any], name: str = "loss", tolerance: float = 2e-5
) -> None:
    assert losses(found["history"], name) == pytest.approx(losses(wanted["history"], name), abs=tolerance), (
        name
    )


def start(
    new_cluster: Callable[..., WorkerCluster], options: dict[str, Any], **settings: Any
) -> WorkerCluster:
    return new_cluster(options, script=SCRIPT, **settings)


@pytest.mark.slow
def test_alone_it_is_the_trainer(train_plainly: Callable[..., dict[str, Any]]) -> None:
    """One process: the same numbers, and the same events with the same steps, in the same order."""
    options = {
        "arguments": {
            "eval_strategy": "steps",
            "eval_steps": 4,
            "include_num_input_tokens_seen": "non_padding",
            "label_smoothing_factor": 0.1,
        }
    }
    wanted, found = train_plainly(options), train_plainly(options, plain=False)
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "num_input_tokens_seen"):
        check_same(found, wanted, name)
    assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
    assert found["training_loss"] == pytest.approx(wanted["training_loss"], abs=1e-5)
    assert (found["tokens"], found["flos"]) == (wanted["tokens"], pytest.approx(wanted["flos"]))
    for one, other in zip(found["events"], wanted["events"], strict=True):
        if one["event"] != "on_substep_end":
            assert (one["event"], one["step"]) == (other["event"], other["step"])
        assert one.get("norm") == pytest.approx(other.get("norm"), abs=1e-5)
    assert wanted["unclassified"] == [], "each field of the installed release has its place in FIELDS"


def test_same_losses_through_a_kill_and_a_join(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Callable[..., dict[str, Any]]
) -> None:
    """The first of three dies in a backward pass, and one joins: nobody restarts, each event comes once."""
    options = {
        "arguments": {"eval_strategy": "steps", "eval_steps": 4, "save_steps": 6, "save_strategy": "steps"}
    }
    wanted = train_plainly(options)
    cluster = start(new_cluster, options)
    first, second, third = cluster.start(3, faults={0: "backward:5:kill"})
    cluster.until_step(7, second)
    joiner = cluster.add()
    cluster.until_done(second, third, joiner)
    assert first.code == -9, cluster.logs()
    for worker in (second, third, joiner):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        check_same(found, wanted)
        check_same(found, wanted, "grad_norm")
        check_same(found, wanted, "eval_loss")
        assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
        assert (found["audit"]["totalSeen"], found["audit"]["lost"], found["audit"]["repeated"]) == (
            150,
            0,
            0,
        )
        assert found["training_loss"] == pytest.approx(wanted["training_loss"], abs=1e-5)
    by_worker = {w.name: events(w.folder / f"{w.name}.events") for w in cluster.workers}
    for worker in (second, third):
        seen = by_worker[worker.name]
        for event in ("on_step_begin", "on_step_end", "on_pre_optimizer_step", "on_optimizer_step"):
            assert steps_of(seen, event) == steps_of(wanted["events"], event), event
        assert Counter(entry["event"] for entry in seen)["on_train_begin"] == 1
    joined = steps_of(by_worker[joiner.name], "on_step_end")
    assert joined == list(range(joined[0], 16))
    assert 8 <= joined[0] <= 15
    logged = [
        e["step"] for found in by_worker.values() for e in found if e["first"] and "loss" in e.get("logs", {})
    ]
    assert logged == list(range(1, 16)), "rank 0 of the moment logs each step"


STREAM: dict[str, Any] = {
    "data": "stream",
    "arguments": {
        "max_steps": 12,
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "eval_strategy": "epoch",
    },
}
"""Two passes of five steps over a stream whose length nobody knows, and two steps of a third."""


def test_a_stream_alone_is_the_trainer(train_plainly: Callable[..., dict[str, Any]]) -> None:
    """Passes end where the stream does, and the run at `max_steps`, in the middle of a pass."""
    wanted, found = train_plainly(STREAM), train_plainly(STREAM, plain=False)
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch"):
        check_same(found, wanted, name)
    assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
    assert found["training_loss"] == pytest.approx(wanted["training_loss"], abs=1e-5)
    for one, other in zip(found["events"], wanted["events"], strict=True):
        assert (one["event"], one["step"]) == (other["event"], other["step"])


@pytest.mark.slow
def test_shards_through_a_kill_and_a_join(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Callable[..., dict[str, Any]]
) -> None:
    """One dies, and one joins in the second pass: each shuffled sample once, in the batch it has alone."""
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    options = STREAM | {"data": "shards", "shuffle_buffer": 10, "arguments": STREAM["arguments"] | split}
    wanted = train_plainly(options, plain=False)
    cluster = start(new_cluster, options)
    first, second, third = cluster.start(3, faults={0: "backward:4:kill"})
    cluster.until_step(6, second)
    joiner = cluster.add()
    cluster.until_done(second, third, joiner)
    assert first.code == -9, cluster.logs()
    for worker in (second, third, joiner):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch"):
            check_same(found, wanted, name)
        assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
        audit = found["audit"]
        assert (audit["totalSeen"], audit["lost"], audit["repeated"]) == (2 * 50 + 24, 0, 0)
    seen = events(second.folder / f"{second.name}.events")
    for event in ("on_epoch_begin", "on_epoch_end", "on_step_end"):
        assert steps_of(seen, event) == steps_of(wanted["events"], event), event


@pytest.mark.slow
def test_early_stop_in_the_middle_of_an_epoch(
    new_cluster: Callable[..., WorkerCluster], train_plainly: Callable[..., dict[str, Any]]
) -> None:
    """A metric ends the training alike on all workers, though one dies before an evaluation.

    The best model is loaded by all at the end, and the folders are those of the Trainer.
    """
    options: dict[str, Any] = {
        "model": "classes",
        "patience": 1,
        "save": True,
        "arguments": {
            "num_train_epochs": 20,
            "learning_rate": 0.05,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "save_strategy": "steps",
            "save_steps": 3,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy",
        },
    }
    # This model's loss knows nothing of num_items_in_batch: the Trainer adds it up over accumulation steps.
    at_once = options["arguments"] | {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
    wanted = train_plainly(options | {"arguments": at_once})
    assert wanted["global_step"] < 100, "it stops early"
    assert wanted["global_step"] % 5, "in the middle of an epoch of five steps"
    cluster = start(new_cluster, options)
    first, second, third = cluster.start(3, faults={0: "committed:3:kill"})
    cluster.until_done(second, third)
    folder = first.folder
    for worker in (second, third):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        check_same(found, wanted)
        check_same(found, wanted, "eval_loss")
        check_same(found, wanted, "eval_accuracy")
        assert found["best"] == [pytest.approx(wanted["best"][0]), wanted["best"][1]]
        assert (found["global_step"], found["audit"]["lost"]) == (wanted["global_step"], 0)
        assert found["after"]["predicted"] == wanted["after"]["predicted"] == [22, 2]
        for name in ("eval_loss", "eval_accuracy"):
            assert found["after"][name] == pytest.approx(wanted["after"][name], abs=2e-5)
        assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
    names = sorted(path.name for path in (folder / "out-elastic").iterdir())
    # Optimizers' files are the job's checkpoints' affair.
    assert names == sorted(path.name for path in (wanted["folder"] / "out-plain").iterdir())
    for path in (folder / "out-elastic").glob("checkpoint-*"):
        assert sorted(item.name for item in path.iterdir()) == [
            "config.json", "model.safetensors", "trainer_state.json", "training_args.bin"
        ]  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "a loss by the number of words, steps that end in an epoch": {
        "loss": "summed",
        "arguments": {"max_steps": 8, "weight_decay": 0.1, "lr_scheduler_type": "cosine"},
    },
    "a mean with weights of classes, a schedule by the loss of epochs": {
        "model": "classes",
        "loss": "weighted",
        "arguments": {
            "eval_strategy": "epoch",
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 1.0},
            "optim": "sgd",
            "warmup_steps": 0,
            "dataloader_num_workers": 1,
        },
    },
    "adapters of low rank, bfloat16, no clipping": {
        "model": "adapters",
        "tolerance": 0.02,
        "arguments": {"bf16": True, "max_grad_norm": 0.0, "activation_checkpointing": True},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_two_workers_are_the_trainer(
    options: dict[str, Any],
    new_cluster: Callable[..., WorkerCluster],
    train_plainly: Callable[..., dict[str, Any]],
) -> None:
    wanted = train_plainly(options)
    cluster = start(new_cluster, options)
    workers = cluster.start(2)
    cluster.until_done()
    for worker in workers:
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        tolerance = options.get("tolerance", 2e-5)
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
            check_same(found, wanted, name, tolerance)
        assert found["global_step"] == wanted["global_step"]
        assert found["audit"]["lost"] == found["audit"]["repeated"] == 0


def test_another_worker_saves_when_the_writer_dies(
    new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    options = {"save": True, "arguments": {"save_strategy": "steps", "save_steps": 6, "max_steps": 8}}
    cluster = start(new_cluster, options)
    halt = Halt(tmp_path)
    first, second = cluster.start(2, faults={0: "evaluation:6:kill", 1: halt.at("committed:6")})
    cluster.until(lambda: not first.running, "the death of the one that saves")
    halt.go()
    cluster.until_done(second)
    assert isinstance(second.outcome(), outcome.Finished), cluster.logs()
    saved = second.folder / "out-elastic"
    state = json.loads((saved / "checkpoint-6" / "trainer_state.json").read_text())
    assert (state["global_step"], len(state["log_history"])) == (6, 6)
    assert (saved / "checkpoint-8" / "model.safetensors").exists()
    assert (saved / "model.safetensors").exists()


@pytest.mark.slow
def test_a_job_begins_again_where_all_were_lost(
    new_cluster: Callable[..., WorkerCluster],
    train_plainly: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Counts, logs and callbacks go on from the job's checkpoint; so it ends early at the right step."""
    options: dict[str, Any] = {
        "model": "classes",
        "patience": 3,
        "arguments": {
            "per_device_train_batch_size": 12,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.05,
            "num_train_epochs": 9,
            "eval_strategy": "steps",
            "eval_steps": 3,
            "metric_for_best_model": "accuracy",
        },
    }
    wanted = train_plainly(options)
    assert 12 < wanted["global_step"] < 45, "it stops early, after some evaluations"
    (tmp_path / "saved").mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "saved"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.01"}
    cluster = start(new_cluster, options, environment=place)
    halt = Halt(tmp_path)
    lost = cluster.start(2, faults={0: halt.at("body:8", 0), 1: halt.at("body:8", 1)})
    cluster.until(lambda: halt.reached(0) and halt.reached(1), "the eighth step")
    cluster.until(lambda: any((tmp_path / "saved").rglob("manifest*.json")), "a checkpoint")
    for worker in lost:
        worker.kill()
    cluster.until(lambda: not any(worker.running for worker in lost), "the loss of all")
    again = [cluster.add(), cluster.add()]
    cluster.until_done(*again)
    for worker in again:
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        for name in ("loss", "eval_loss", "eval_accuracy"):
            check_same(found, wanted, name)
        assert found["global_step"] == wanted["global_step"]
        assert found["training_loss"] == pytest.approx(wanted["training_loss"], abs=1e-5)
    assert any("restored" in worker.log() for worker in again)
    newest = max((tmp_path / "saved").rglob("manifest*.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(newest.read_text())["reason"] == "end", "an early end is saved, too"


@pytest.mark.slow
def test_a_worker_that_joins_at_the_end_goes_on_with_the_others(
    new_cluster: Callable[..., WorkerCluster],
) -> None:
    """The others have evaluated the state that it is given; after the loop it evaluates with them."""
    options = {"save": "by one", "arguments": {"eval_strategy": "steps", "eval_steps": 5}}
    cluster = start(new_cluster, options)
    workers = cluster.start(2)
    cluster.until_step(14)
    workers.append(cluster.add())
    cluster.until_done()
    found = [worker.result() for worker in workers]
    for worker, result in zip(workers, found, strict=True):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        assert result is not None
        assert list(losses(result["history"])) == list(range(1, 16)), "logs travel with the state"
        assert losses(result["history"], "eval_loss")[15] == pytest.approx(result["after"]["eval_loss"])


def test_a_joiner_in_the_last_evaluation_ends_too(
    new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    options = {"save": "by one", "held_until": str(tmp_path / "go"), "arguments": {"max_steps": 2}}
    cluster = start(new_cluster, options)
    for worker in join_at_the_last_evaluation(cluster, tmp_path / "go"):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        found = worker.result()
        assert found is not None
        assert found["after"]["predicted"] == [22, 10, 32]


POINTS = ("backward", "body", "committed", "stepping", "stepped", "evaluation", "reduced", "prepared")
"""Points of a step at which random faults come; what they mean to a seed does not change."""
DEEDS = ("kill", "kill", "term")
WORDS: dict[str, Any] = {
    "save": True,
    "arguments": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "save_total_limit": 2,
        "include_num_input_tokens_seen": "all",
    },
}
CLASSES: dict[str, Any] = {
    "model": "classes",
    "patience": 2,
    "save": "by one",
    "arguments": {
        "per_device_train_batch_size": 12,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.05,
        "num_train_epochs": 6,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    },
}


@pytest.mark.slow
def test_random_faults_change_no_number(
    zygote: Zygote, tmp_path: Path, train_plainly: Callable[..., dict[str, Any]]
) -> None:
    """Two of four workers die or are asked to leave at random points, and others join."""
    wanted = [train_plainly(WORDS), train_plainly(CLASSES)]

    def survive(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        drawn, which = random.Random(seed.number), seed.number % 2
        last = wanted[which]["global_step"]
        faults = {
            number: f"{drawn.choice(POINTS)}:{drawn.randint(1, last)}:{drawn.choice(DEEDS)}"
            for number in drawn.sample(range(4), 2)
        }
        cluster = WorkerCluster(zygote, folder, (WORDS, CLASSES)[which], script=SCRIPT)
        try:
            workers = cluster.start(4, faults=faults)
            cluster.until_step(drawn.randint(1, last - 1), workers[min({0, 1, 2} - set(faults))])
            workers += [cluster.add() for _ in range(drawn.randint(1, 2))]
            cluster.until_done()
            finished = [worker for worker in workers if worker.result() is not None]
            for worker in workers:  # those that leave have no result
                assert worker.code in ((0, -9) if worker.slot in faults else (0,)), cluster.logs()
            assert len(finished) >= 2, cluster.logs()
            for worker in finished:
                check_survivor(worker, wanted[which])
        finally:
            cluster.close()
        return f"{faults}, {len(finished)} finished"

    each_seed(SEEDS, seconds(3), survive)


def given_states(worker: Worker) -> Iterator[int]:
    """Yield the steps of the states that others gave to a worker, beyond its own."""
    own = 0
    for stood, begun in re.findall(r"after step (\d+): waiting|state step (\d+) of gen", worker.log()):
        if stood:
            own = int(stood)
        elif int(begun) > own:
            yield int(begun)


def check_survivor(worker: Worker, wanted: dict[str, Any]) -> None:
    """Check that a worker has the numbers of plain training, and each event of the steps since it came.

    A sum may reach one worker and not the next, when a third one dies: the next one is given the step's
    result, which is a state from behind its events.
    """
    found = worker.result()
    assert found is not None
    for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "num_input_tokens_seen"):
        check_same(found, wanted, name)
    assert found["values"] == pytest.approx(wanted["values"], abs=1e-4)
    assert found["best"][1] == wanted["best"][1]
    assert found["audit"]["lost"] == found["audit"]["repeated"] == 0
    seen = events(worker.folder / f"{worker.name}.events")
    ended = steps_of(seen, "on_step_end")
    assert ended == sorted(set(ended)), "once for each step"
    skipped = set(range(ended[0], wanted["global_step"] + 1) if ended else ()).difference(ended)
    assert skipped <= set(given_states(worker))
    for event in ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step"):
        begun = steps_of(seen, event)
        assert begun == sorted(set(begun)), event


def test_what_cannot_be_is_refused_by_name(train_plainly: Callable[..., dict[str, Any]]) -> None:
    wanted: dict[str, Any] = {
        "UsageError: ElasticTrainer(): fp16=True": {"use_cpu": True, "fp16_full_eval": False, "fp16": True},
        "UsageError: ElasticTrainer(): auto_find_batch_size=True": {"auto_find_batch_size": True},
        "save_on_each_node=True: one worker writes for all": {
            "save_on_each_node": True,
            "push_to_hub": False,
        },
        "UsageError: ElasticTrainer(): train_dataset: the data set is a list_iterator": "iterator",
        "ValueError: The train_dataset does not implement __len__": "endless",
        "UsageError: ElasticTrainer(): dataloader_drop_last=True: drop_last leaves out samples": "short",
        "UsageError: ElasticTrainer(): callback SubSteps has on_substep_end()": "substeps",
        "UsageError: ElasticTrainer(): Sampling._get_train_sampler() is overridden": "sampler",
        "checkpoint-5'): checkpoint-N folders have no optimizer state here. Set spec.checkpoint": "resume",
    }
    found = train_plainly({"refused": wanted}, plain=False)
    for text in wanted:
        assert text in found[text]


def test_a_second_run_in_one_job_is_refused(train_plainly: Callable[..., dict[str, Any]]) -> None:
    """Also by another trainer."""
    said = train_plainly({"again": True, "arguments": {"max_steps": 1}}, plain=False)["again"]
    assert said.startswith("UsageError: ElasticTrainer.train() was called already: a job trains one model")


@pytest.mark.slow
def test_the_example_survives_a_kill(new_cluster: Callable[..., WorkerCluster], tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "trainer" / "train.py"
    # LOCAL_RANK is what `springtide launch` sets; accelerate would form a group of its own by it.
    environment = {"STEPS": "6", "OUTPUT": str(tmp_path / "out"), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    cluster = new_cluster({}, script=example, environment=environment)
    first, second = cluster.start(2, faults={0: "backward:3:kill"})
    cluster.until_done(second)
    end = second.outcome()
    assert isinstance(end, outcome.Finished), cluster.logs()
    assert (first.code, end.step, end.data["totalSeen"]) == (-9, 6, 6 * 32)
    assert "held-out loss" in second.log()
    assert (tmp_path / "out" / "model.safetensors").exists()
