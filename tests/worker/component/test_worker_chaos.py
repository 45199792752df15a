"""Real workers and a real coordinator under faults from a seed: whatever survives has the numbers of an
undisturbed run, and the ledger shows each sample once.

Seeds that once found something are kept in tests/support/worker_chaos_seeds.txt, and those of jobs with
checkpoints in checkpoint_chaos_seeds.txt beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from checkpoint_chaos import SavingChaos, saving_cluster
from worker_chaos import Chaos, follow_of, speed_of, survive
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference

SEEDS = Path(__file__).resolve().parents[2] / "support" / "worker_chaos_seeds.txt"
SAVING_SEEDS = SEEDS.with_name("checkpoint_chaos_seeds.txt")
OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 14, "pace": 0.015, "split": 2}

pytestmark = pytest.mark.timeout(int(600 + 2 * seconds(20)))


@pytest.mark.slow
def test_survivors_of_any_faults_have_the_undisturbed_numbers(
    zygote: Zygote, reference: Reference, tmp_path: Path
) -> None:
    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        # Every third time the faults begin before the first commit, so that the job may have to start again.
        early = seed.number % 3 == 0
        options, environment = speed_of(seed)
        options = OPTIONS | options | {"same_start": early}
        cluster = WorkerCluster(zygote, folder, options, environment=environment | follow_of(seed))
        return survive(Chaos(cluster, seed), reference, early=early)

    each_seed(SEEDS, seconds(20), one)


@pytest.mark.slow
def test_all_lost_last_whole_checkpoint_gives_the_same_numbers(
    zygote: Zygote, reference: Reference, tmp_path: Path
) -> None:
    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        options, environment = speed_of(seed)
        cluster = saving_cluster(zygote, folder, OPTIONS | options)
        cluster.environment |= environment | follow_of(seed)
        chaos = SavingChaos(cluster, seed)
        told = survive(chaos, reference, early=True)
        restored = sum(" restored " in worker.log() for worker in chaos.cluster.workers)
        return f"{told}, {restored} restored a checkpoint"

    each_seed(SAVING_SEEDS, seconds(15), one)
