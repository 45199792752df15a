"""Real workers, parameter servers and a real coordinator under faults from a seed, in all three kinds of job
with servers: whatever survives has the numbers of an undisturbed run, and each sample counts once.

Seeds that once found something are kept in tests/support/server_chaos_seeds.txt.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from server_chaos import ServerChaos
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone

from springtide import outcome

SECONDS = seconds(60)
SEEDS = Path(__file__).resolve().parents[1] / "support" / "server_chaos_seeds.txt"
DENSE: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 14, "pace": 0.015, "split": 2}
TABLES: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 14,
    "pace": 0.015,
    "model": "tables",
    "momentum": 0.0,
}
KINDS: list[tuple[str, str, int, dict[str, Any]]] = [
    ("ParameterServer", "Synchronous", 2, DENSE),
    ("Hybrid", "Synchronous", 2, TABLES),
    ("ParameterServer", "BoundedStaleness", 2, {**DENSE, "split": 1}),
    # Without copies the job goes back to a checkpoint.
    ("ParameterServer", "Synchronous", 1, DENSE),
]

pytestmark = pytest.mark.timeout(int(600 + 2 * SECONDS))


@pytest.fixture(scope="module")
def references(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    folder = tmp_path_factory.mktemp("alone")
    found = []
    for number, (_, _, _, options) in enumerate(KINDS):
        (folder / str(number)).mkdir()
        found.append(train_alone(zygote, folder / str(number), options))
    return found


def survive(zygote: Zygote, folder: Path, references: list[Reference], seed: Seed) -> str:
    """One job under the faults of this seed; what happened, in a line."""
    strategy, consistency, copies, options = KINDS[seed.number % len(KINDS)]
    environment = {
        "SPRINGTIDE_STRATEGY": strategy,
        "SPRINGTIDE_CONSISTENCY": consistency,
        "SPRINGTIDE_REPLICATION": str(copies),
    }
    if copies == 1:
        (folder / "volume").mkdir()
        environment |= {
            "SPRINGTIDE_CHECKPOINT_URI": str(folder / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2",
        }
    cluster = WorkerCluster(zygote, folder, options, environment=environment)
    cluster.servers_wanted = 2
    chaos = ServerChaos(cluster, seed, copies)
    try:
        chaos.begin()
        cluster.until(lambda: bool(chaos.anchor.commits()), "the anchor's first commit")
        until = time.monotonic() + 8.0
        while not cluster.finished() and time.monotonic() < until:
            time.sleep(chaos.random.choice((0.02, 0.1, 0.4, 0.8)))
            chaos.strike()
        chaos.heal()
        cluster.until(chaos.is_over, "the anchor's end", 60.0)
        chaos.end()
        finished = cluster.finished()
        assert chaos.anchor in finished, cluster.logs()
        if consistency == "Synchronous":
            check(cluster, references[seed.number % len(KINDS)], finished)
        else:
            counted(cluster)
        assert cluster.reply is not None
        number, lost = cluster.reply.generation.number, cluster.reply.states_lost
        assert not lost or copies == 1, cluster.logs()
        what = f"{strategy} {consistency}, {copies} copies"
        return f"{what}, {len(chaos.log)} deeds, generation {number}, {lost} states lost"
    except AssertionError as error:
        story = "\n".join(chaos.log)
        raise AssertionError(
            f"seed {seed} (kept in {SEEDS.name}), {strategy} {consistency}:\n{story}\n{error}"
        ) from error
    finally:
        chaos.close()


def counted(cluster: WorkerCluster) -> None:
    """Each sample counts once in the parameters, which are the same everywhere."""
    results = []
    for worker in cluster.finished():
        end = worker.outcome()
        assert isinstance(end, outcome.Finished)
        assert (end.data["repeated"], end.data["lost"]) == (0, 0)
        assert end.data["totalSeen"] == DENSE["samples"] * DENSE["epochs"]
        results.append(worker.result())
    assert len({result["parameters"] for result in results if result is not None}) == 1


def test_whatever_happens_to_servers_and_workers_nothing_is_lost(
    zygote: Zygote, references: list[Reference], tmp_path: Path
) -> None:
    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        return survive(zygote, folder, references, seed)

    each_seed(SEEDS, SECONDS, one)
