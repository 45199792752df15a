"""Data in shards, in jobs of real processes: each sample once, in the same batch, whoever dies or joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_seeds import Seed, each_seed, seconds
from checkpoint_chaos import SavingChaos, saving_cluster
from halt import Halt, Stop
from stream_job import Sample, StreamJob, keys
from worker_chaos import speed_of, survive
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

from springtide_cli.audit import audit
from springtide_operator.coordinator_connection import to_report
from springtide_operator.plan import progress

LENGTHS = [30, 7, 0, 25, 1, 18, 40, 12, 29, 3, 26, 33]
DEALING = {"streams": 5, "shuffle_buffer": 40}
OPTIONS: dict[str, Any] = {
    "samples": sum(LENGTHS),
    "shards": LENGTHS,
    "dealing": DEALING,
    "batch": 32,
    "epochs": 2,
    "pace": 0.03,
    "noise": 0.1,
}
NEVER_SALVAGE = {"SPRINGTIDE_SALVAGE": "Never"}

SEEDS = Path(__file__).resolve().parents[2] / "support" / "streams_chaos_seeds.txt"

pytestmark = pytest.mark.timeout(int(300 + 2 * seconds(1)))


def expected(epochs: int = 2) -> dict[int, list[Sample]]:
    """Return the samples of each step's global batch, as one process that deals for itself has them."""
    options = DEALING | {
        "batch_size": OPTIONS["batch"],
        "epochs": epochs,
        "seed": 5,
        "min_part": 2,
    }
    job = StreamJob(LENGTHS, options)
    job.resize(1)
    while not job.ended:
        job.step()
    job.close()
    return {number: sorted(batch) for number, (_, batch) in enumerate(job.steps, start=1)}


def trained(folder: Path) -> dict[int, list[Sample]]:
    """Return by step the samples whose gradients went in, when it was committed for the last time."""
    names: dict[int, tuple[int, int, int]] = {}
    for path in folder.glob("*.steps"):
        for line in map(json.loads, path.read_text().splitlines()):
            name = (*line["incarnation"], line["generation"])
            names[line["step"]] = max(names.get(line["step"], name), name)
    found: dict[int, list[Sample]] = {step: [] for step in names}
    for path in folder.glob("*.samples"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["step"] not in names:
                continue  # of a step that nobody has committed
            number, restart, generation = names[line["step"]]
            if line["generation"] == f"{number}.{restart}/{generation}":
                found[line["step"]] += keys(torch.tensor(line["ids"], dtype=torch.int64))
    return {step: sorted(samples) for step, samples in found.items()}


def test_each_sample_is_trained_once_through_deaths_and_joins(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    assert reference.audit["totalSeen"] == OPTIONS["epochs"] * sum(LENGTHS)
    cluster = new_cluster(OPTIONS, environment=NEVER_SALVAGE)
    # The second pass begins with step 8, before which members tell each other what they see of it.
    steady, *victims = cluster.start(3, faults={1: "backward:3:kill", 2: "committed:7:kill"})
    cluster.until(lambda: not victims[0].running, "the first death")
    cluster.until(lambda: cluster.reply is not None and cluster.reply.data.HasField("taken"), "the account")
    assert cluster.reply is not None
    status = progress.numbers(to_report(cluster.reply, at=1000.0), {})
    found = audit({"metadata": {"name": "test"}, "status": {"state": "Running", **status}})
    assert found.code == 0, found.lines
    taken = status["data"]["taken"]
    assert taken["samples"] == status["data"]["seen"] == 32 * taken["step"] % sum(LENGTHS)
    joiner = cluster.add()
    cluster.until_done()
    assert [victim.code for victim in victims] == [-9, -9]
    check(cluster, reference, [steady, joiner])
    assert trained(cluster.folder) == expected()


@pytest.mark.slow
def test_readers_in_processes_give_the_same_numbers(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = new_cluster(OPTIONS | {"loader_workers": 2}, environment=NEVER_SALVAGE)
    steady, victim = cluster.start(2, faults={1: "reduced:9:kill"})
    cluster.until(lambda: not victim.running, "the death")
    joiner = cluster.add()
    cluster.until_done()
    check(cluster, reference, [steady, joiner])
    assert trained(cluster.folder) == expected()


def test_all_killed_others_go_on_from_a_checkpoint(
    new_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path
) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    cluster = new_cluster(
        OPTIONS | {"pace": 0.15},  # several times what a checkpoint takes on a busy machine, for all steps
        environment=NEVER_SALVAGE
        | {
            "SPRINGTIDE_CHECKPOINT_URI": str(volume),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.05",
        },
    )
    workers = cluster.start(2)
    cluster.until(lambda: bool([*volume.rglob("manifest.json")]), "a checkpoint")
    for worker in workers:
        worker.kill()
    cluster.until(lambda: not any(worker.running for worker in workers), "the deaths")
    others = [cluster.add() for _ in range(3)]
    cluster.until_done()
    check(cluster, reference, others)
    assert trained(cluster.folder) == expected()
    restored = [worker for worker in others if "restored" in worker.log()]
    assert restored
    assert min(line["step"] for worker in others for line in worker.commits()) > 1


def test_kept_gradients_over_shards_count_once(
    new_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = new_cluster(OPTIONS | {"split": 2}, environment={"SPRINGTIDE_SALVAGE": "Always"})
    steady, other, victim = cluster.start(3, faults={2: "gradients:5:kill"})
    cluster.until_done()
    assert victim.code == -9
    check(cluster, reference, [steady, other])


def test_a_killed_worker_of_a_server_job_loses_no_sample(
    new_server_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = new_server_cluster(OPTIONS, 2, 1)
    steady, victim = cluster.start(2, faults={1: "backward:4:kill"})
    cluster.until_done()
    assert victim.code == -9
    check(cluster, reference, [steady], tolerance=1e-4)


PUSH = ["backward", "gradients", "pushed", "prepared", "reduced", "stepping", "stepped"]
"""The points of a step with parameter servers, in order."""


@pytest.mark.slow
def test_servers_killed_at_every_point_of_a_push_lose_no_sample(
    new_server_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """Kill a server while both workers stand at the point; its copy on the other one goes on."""
    epochs = 40  # of 7 steps each
    options = OPTIONS | {"epochs": epochs, "pace": 0.01}
    (tmp_path / "alone").mkdir()
    reference = train_alone(zygote, tmp_path / "alone", options)
    cluster = new_server_cluster(options, 2, 2, environment=NEVER_SALVAGE)
    stops = [Stop(tmp_path, point) for point in PUSH]
    faults = {number: ";".join(stop.fault(number) for stop in stops) for number in range(2)}
    workers = cluster.start(2, faults=faults)
    cluster.until_step(1)
    for number, (point, stop) in enumerate(zip(PUSH, stops, strict=True)):
        cluster.until_settled()  # else this death takes the only copy along
        stop.arm(workers[0].commits()[-1]["step"] + 4)
        cluster.until(lambda stop=stop: stop.reached(0) and stop.reached(1), f"both at {point}")
        victim = next(server for server in cluster.servers if server.slot == number % 2 and server.running)
        victim.kill()
        cluster.until(lambda victim=victim: not victim.running, f"the server's death at {point}")
        cluster.add_server(victim.slot)
        stop.go()
        cluster.until_step(workers[0].commits()[-1]["step"] + 2)
    cluster.until_done()
    check(cluster, reference, workers, tolerance=1e-4)
    assert trained(cluster.folder) == expected(epochs)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["pushed", "stepping"])
def test_a_server_and_a_worker_killed_at_once_lose_no_sample(
    new_server_cluster: Callable[..., WorkerCluster], reference: Reference, tmp_path: Path, point: str
) -> None:
    cluster, halt = new_server_cluster(OPTIONS, 2, 2, environment=NEVER_SALVAGE), Halt(tmp_path)
    held = {number: halt.at(f"{point}:5", number) for number in range(3)}
    first, victim, third = cluster.start(3, faults=held)
    cluster.until(lambda: all(halt.reached(number) for number in range(3)), f"all at {point}")
    victim.kill()
    cluster.servers[0].kill()
    cluster.until(lambda: not victim.running and not cluster.servers[0].running, "both deaths")
    cluster.add_server(0)
    halt.go()
    joiner = cluster.add()
    cluster.until_done()
    assert victim.code == -9
    check(cluster, reference, [first, third, joiner], tolerance=1e-4)
    assert trained(cluster.folder) == expected()


@pytest.mark.slow
def test_any_faults_leave_each_sample_of_shards_once(zygote: Zygote, tmp_path: Path) -> None:
    options = OPTIONS | {"epochs": 10, "pace": 0.015, "same_start": True}
    (tmp_path / "alone").mkdir()
    reference, samples = train_alone(zygote, tmp_path / "alone", options), expected(10)

    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        by_speed, environment = speed_of(seed)
        readers = {"loader_workers": seed.number % 3 // 2}
        cluster = saving_cluster(zygote, folder, options | by_speed | readers)
        cluster.environment |= environment | NEVER_SALVAGE
        said = survive(SavingChaos(cluster, seed), reference, early=True)
        assert trained(folder) == samples
        return said

    each_seed(SEEDS, seconds(1), one)
