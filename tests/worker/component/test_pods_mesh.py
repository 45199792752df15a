"""`springtide.mesh()`: models that are divided in a pod, in jobs whose pods come and go."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_points import NEWEST
from chaos_seeds import parse, seconds
from gpu_capabilities import needs_cuda
from launch_pods import Launchers, alive, launched, steps
from safetensors.torch import load_file
from worker_cluster import Worker, WorkerCluster

from springtide.checkpoint.consolidate import to_safetensors
from springtide.coordination import outcome

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("fork_server")]

SCRIPT = Path(__file__).parents[2] / "support" / "mesh_script.py"
PACE = {"pace": 0.05}
POINTS = [("1", "transfer")]
"""Local rank and point at which it dies. The others are for `make chaos`: processes take seconds to start."""
if "SPRINGTIDE_CHAOS_SECONDS" in os.environ:
    POINTS += [("1", "gradients"), ("0", "reduced"), ("1", "stepping")]
ANY_POINT = (
    "body",
    "backward",
    "gradients",
    "reduced",
    "stepping",
    "stepped",
    "committed",
    "transfer",
    "formed",
)
DEATH_SECONDS = 10
"""About as long as a pod takes to come and to die."""


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., WorkerCluster]]:
    clusters: list[WorkerCluster] = []

    def make(options: dict[str, Any], processes: int = 2, **environment: str) -> WorkerCluster:
        variables = {"SPRINGTIDE_PROCESSES": str(processes), **environment}
        cluster = WorkerCluster(
            Launchers(),
            tmp_path,
            options,
            script=SCRIPT,
            environment=variables,  # type: ignore[arg-type]
        )
        cluster.processes_per_pod = processes
        clusters.append(cluster)
        return cluster

    yield make
    for cluster in clusters:
        cluster.close()


def losses(path: Path) -> dict[int, float]:
    """The loss of each step, by a step log; of two attempts at a step the one that was committed last."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return {entry["step"]: entry["values"]["loss"] for entry in entries}


def results(worker: Worker, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((worker.folder / f"{worker.name}.{rank}.json").read_text())
    return found


def flat(tree: Any) -> list[float]:
    if isinstance(tree, dict):
        return [number for key in sorted(tree) for number in flat(tree[key])]
    if isinstance(tree, list):
        return [number for item in tree for number in flat(item)]
    return [tree]


def until_steps(cluster: WorkerCluster, pod: Worker, count: int) -> None:
    cluster.until(lambda: steps(pod, 0) >= count, f"{count} steps of {pod.name}")


def check_like_alone(
    alone: Path, cluster: WorkerCluster, pods: list[Worker], processes: int = 2, means: bool = False
) -> None:
    """Losses, parameters and the optimizer's state are those of one process.

    Buffers are equal everywhere; means: where a body has one forward, a batch norm's mean is that of the one
    process, too.
    """
    wanted = json.loads((alone / "alone.0.json").read_text())
    expected = losses(alone / "steps")
    seen: dict[int, float] = {}
    for pod in cluster.workers:
        for path in pod.folder.glob(f"{pod.name}.steps*"):
            seen |= losses(path)
    assert sorted(seen) == sorted(expected)
    assert [seen[step] for step in sorted(seen)] == pytest.approx(
        [expected[step] for step in sorted(expected)], abs=1e-5
    )
    for pod in pods:
        end = pod.outcome()
        assert isinstance(end, outcome.Finished), cluster.logs()
        assert (end.data["repeated"], end.data["lost"]) == (0, 0)
        for rank in range(processes):
            found = results(pod, rank)
            assert found["buffers"] == results(pods[0], 0)["buffers"]
            for kind in ("parameters", "optimizer"):
                assert flat(found[kind]) == pytest.approx(flat(wanted[kind]), abs=1e-5)
            if means:
                mean = wanted["buffers"]["seen.running_mean"]
                assert found["buffers"]["seen.running_mean"] == pytest.approx(mean, abs=1e-5)


@pytest.fixture
def train_alone(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Train in one process of its own, and return its folder."""

    def train(options: dict[str, Any]) -> Path:
        folder = tmp_path / "alone"
        folder.mkdir()
        launchers = Launchers()
        plain = {key: value for key, value in options.items() if key not in ("mesh", "pace")}
        variables = {"SPRINGTIDE_STEP_LOG": str(folder / "steps"), "SPRINGTIDE_PROCESSES": "1"}
        arguments = [str(SCRIPT), str(folder), json.dumps(plain | {"alone": True})]
        pid = launchers.fork(variables, arguments, folder / "log")
        assert launchers.wait(pid, 120.0) == 0, (folder / "log").read_text()
        return folder

    return train


@pytest.mark.slow
def test_dead_process_ends_its_pod_and_no_other(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    options = {"epochs": 8, "pieces": 2, "clip_norm": 0.5, **PACE}
    alone = train_alone(options)
    cluster = make_cluster(options)
    first, second = cluster.start(2)
    until_steps(cluster, first, 5)
    before, doomed = launched(first), launched(second)
    os.kill(doomed[1], signal.SIGKILL)
    cluster.until(lambda: not second.running, "the end of the second pod")
    assert not any(alive(pid) for pid in doomed.values())
    end = second.outcome()
    assert isinstance(end, outcome.Failed)
    assert "process 1 was killed by signal 9" in end.message
    seen = steps(first, 0)
    cluster.until(lambda: steps(first, 0) > seen + 1, "steps of the survivor")
    third = cluster.add()
    cluster.until(lambda: steps(third, 1) > 1, "steps of the pod that joined")
    cluster.until_done()
    assert launched(first) == before
    check_like_alone(alone, cluster, [first, third])


@pytest.mark.slow
def test_two_dimensions_are_saved_and_restored_by_another_mesh(
    make_cluster: Callable[..., WorkerCluster],
    train_alone: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
) -> None:
    """fully_shard over tensor parallelism in one pod of 2 x 2, then tensor parallelism alone in pods of 2."""
    options = {"epochs": 8, "clip_norm": 0.5, "optimizer": "sgd", **PACE}
    alone = train_alone(options)
    (tmp_path / "saved").mkdir()
    storage = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "saved"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2"}
    cluster = make_cluster(options | {"mesh": [["dp_shard", "tp"], [2, 2]]}, processes=4, **storage)
    (first,) = cluster.start(1)
    cluster.until(lambda: len(list((tmp_path / "saved").glob("*/step-*/manifest.json"))) > 1, "checkpoints")
    os.kill(launched(first)[2], signal.SIGKILL)
    cluster.until(lambda: not first.running, "the end of the pod")
    # The same job goes on in pods of another form.
    cluster.environment["SPRINGTIDE_PROCESSES"] = "2"
    cluster.processes_per_pod = 2
    second = cluster.add(mesh=["tp"])
    third = cluster.add(mesh=["tp"])
    cluster.until_done()
    assert any("restored" in pod.log() for pod in (second, third))
    check_like_alone(alone, cluster, [second, third])
    # The checkpoint at the end is a plain one.
    (folder,) = (tmp_path / "saved").iterdir()
    to_safetensors(str(folder), tmp_path / "model.safetensors")
    saved = {
        name: tensor.flatten().tolist() for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    end = results(second, 0)
    assert {name: saved[name] for name in end["parameters"]} == end["parameters"]
    assert {name: saved[name] for name in end["buffers"]} == end["buffers"]


@pytest.mark.slow
def test_two_pods_of_two_dimensions_lose_a_process(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    """fully_shard over tensor parallelism. One process's part drifts away, and its pod is sent the state.

    Then a process of the other pod dies in an evaluation, and the first pod finishes that and goes on.
    """
    options = {"epochs": 4, "clip_norm": 0.5, "evaluate": [5, 19], **PACE}
    alone = train_alone(options)
    mishaps = {"worker-0": {"faults": {"3": "evaluation:19:kill"}}, "worker-1": {"spoilt": [12, 3]}}
    mesh = [["dp_shard", "tp"], [2, 2]]
    cluster = make_cluster(options | {"mesh": mesh, "only": mishaps}, processes=4)
    first, second = cluster.start(2)
    doomed, before = launched(first), launched(second)
    cluster.until(lambda: not first.running, "the end of the first pod")
    assert not any(alive(pid) for pid in doomed.values())
    cluster.until_done()
    assert launched(second) == before
    assert "restored" not in second.log()
    check_like_alone(alone, cluster, [second], processes=4, means=True)
    drifted = [line for line in second.log().splitlines() if "are not those of the other workers" in line]
    assert len(drifted) == 4, cluster.logs()  # each process tells
    for line in drifted:
        assert "step 16: the parameters of worker-1 are not" in line
        assert "(seen in idle); it is sent the state again" in line
    wanted = json.loads((alone / "alone.0.json").read_text())["evaluated"]
    assert wanted["19"]["number"] == 22.0
    for rank in range(4):
        found = results(second, rank)["evaluated"]
        assert list(found) == list(wanted) == ["5", "19"]
        assert flat(found) == pytest.approx(flat(wanted), abs=1e-5)


@pytest.mark.slow
def test_two_pods_with_copies_lose_a_process(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    """fully_shard with two copies in each pod: the other pod goes on from the same step."""
    options = {"epochs": 2, "clip_norm": 0.5, **PACE}
    alone = train_alone(options)
    cluster = make_cluster(options | {"mesh": [["dp_replicate", "dp_shard"], [2, 2]]}, processes=4)
    first, second = cluster.start(2)
    until_steps(cluster, first, 3)
    before, doomed = launched(first), launched(second)
    os.kill(doomed[3], signal.SIGKILL)
    cluster.until(lambda: not second.running, "the end of the second pod")
    assert not any(alive(pid) for pid in doomed.values())
    cluster.until_done()
    assert launched(first) == before
    check_like_alone(alone, cluster, [first], processes=4, means=True)


def deaths() -> list[tuple[str, str]]:
    """Return POINTS, and as many at random as SPRINGTIDE_CHAOS_SECONDS have time for.

    SPRINGTIDE_CHAOS_SEED: of the random ones.
    """
    seed = parse(
        os.environ.get("SPRINGTIDE_CHAOS_SEED") or str(random.SystemRandom().randrange(10**6)), NEWEST
    )
    chooser = random.Random(seed.number)
    more = [(chooser.choice("01"), chooser.choice(ANY_POINT)) for _ in range(int(seconds(0) / DEATH_SECONDS))]
    if more:
        print(f"seed {seed}: {more}", flush=True)
    return POINTS + more


@pytest.mark.slow
@pytest.mark.timeout(600 + 3 * seconds(0))
def test_process_may_die_at_any_point_of_a_step(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    """One process dies, of one pod after the other: in backward, before and after its pod has decided, while
    it receives the state, and with time for it anywhere.
    """
    places = deaths()
    options = {"epochs": max(16, 4 * len(places)), **PACE}
    alone = train_alone(options)
    cluster = make_cluster(options)
    (first,) = cluster.start(1)
    for rank, point in places:
        pod = cluster.add(faults={rank: f"{point}:*:kill"})
        cluster.until(lambda pod=pod: not pod.running, f"the end of {pod.name}", 90.0)
        assert isinstance(pod.outcome(), outcome.Failed), cluster.logs()
        seen = steps(first, 0)
        cluster.until(lambda seen=seen: steps(first, 0) > seen + 1, f"steps after a death at {point}")
    assert len(launched(first)) == 2
    cluster.until_done()
    check_like_alone(alone, cluster, [first])


@pytest.mark.slow
def test_leaving_pods_save_what_others_go_on_from(
    make_cluster: Callable[..., WorkerCluster],
    train_alone: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
) -> None:
    """fully_shard with two copies in each pod; SIGTERM of all pods, then a pod that finds the checkpoint."""
    mesh = [["dp_replicate", "dp_shard"], [2, 2]]
    options = {"epochs": 6, "micro_batch": 2, **PACE}
    alone = train_alone(options)
    (tmp_path / "saved").mkdir()
    storage = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "saved"), "SPRINGTIDE_CHECKPOINT_SECONDS": "600"}
    cluster = make_cluster(options | {"mesh": mesh}, processes=4, **storage)
    (first,) = cluster.start(1)
    until_steps(cluster, first, 3)
    cluster.suspend = True
    cluster.until_done(first)
    cluster.until(lambda: cluster.reply is not None and cluster.reply.put_away, "the job to be put away")
    assert isinstance(first.outcome(), outcome.Left)
    assert cluster.reply is not None
    cluster.kill_coordinator()
    cluster.suspend, cluster.saved = False, cluster.reply.checkpoint.name
    cluster.environment["SPRINGTIDE_PROCESSES"] = "1"
    cluster.processes_per_pod = 1
    cluster.start_coordinator()
    second = cluster.add(mesh=["dp_shard"])
    cluster.until_done()
    assert "restored" in second.log()
    check_like_alone(alone, cluster, [second], processes=1)


@pytest.mark.slow
def test_example_trains_in_two_pods_of_two(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "examples" / "gpt_fsdp" / "train.py"
    variables = {"SPRINGTIDE_PROCESSES": "2", "STEPS": "3"}
    cluster = WorkerCluster(Launchers(), tmp_path, {}, script=script, environment=variables)  # type: ignore[arg-type]
    cluster.processes_per_pod = 2
    try:
        pods = cluster.start(2)
        cluster.until_done()
        for pod in pods:
            assert isinstance(pod.outcome(), outcome.Finished), cluster.logs()
            whole, here = map(int, re.findall(r"trained (\d+) parameters, of which (\d+) are", pod.log())[0])
            assert 0.4 * whole < here < 0.6 * whole
    finally:
        cluster.close()


def test_calls_that_do_not_go_with_a_mesh_are_refused(
    make_cluster: Callable[..., WorkerCluster],
) -> None:
    cluster = make_cluster({"calls": True}, processes=2)
    cluster.target = cluster.minimum = 1
    cluster.start_coordinator()
    pod = cluster.add(hold=False)
    cluster.until(lambda: not pod.running, "the end of the pod")
    for problem in (
        "mesh(): the sizes (3,) of ('dp_shard',) must be 1 numbers whose product is the 2 processes",
        "mesh() was called for dp_shard 2 before: a pod has one mesh, got tp 2",
        "distribute(): the gradient of idle would not be summed over dp_shard of the mesh",
        "distribute(): with mesh() a body makes one optimizer step: give one optimizer, not a list",
        "batches(rehearsals=) tries a body out in one process",
        "mesh() after distribute(): call it before the model is divided and distributed",
    ):
        assert f"refused: {problem}" in pod.log()


@needs_cuda("pods", devices=2)
def test_pod_of_two_devices_trains_over_nccl(
    make_cluster: Callable[..., WorkerCluster], train_alone: Callable[[dict[str, Any]], Path]
) -> None:
    options = {"epochs": 4, "clip_norm": 0.5, **PACE}
    alone = train_alone(options)
    cluster = make_cluster(options)
    (first,) = cluster.start(1)
    cluster.until_done()
    check_like_alone(alone, cluster, [first])
