"""Faults from a seed on a job whose optimizer's state is in shards: whatever survives has the numbers of an
undisturbed run, and in exact mode its bits. Where both holders of a shard are lost it goes on from the newest
checkpoint.

Seeds that once found something are kept in tests/support/shards_chaos_seeds.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed, each_seed, seconds
from checkpoint_chaos import ShardChaos, saving_cluster
from worker_chaos import speed_of, survive
from worker_cluster import Zygote
from worker_reference import Reference, train_alone

SEEDS = Path(__file__).resolve().parents[2] / "support" / "shards_chaos_seeds.txt"
OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 14,
    "pace": 0.015,
    "split": 2,
    "optimizer": "adam",
    "lr": 0.003,
    "hidden": 96,
}

EXACT_FROM = 8
"""The first version of the seeds of which every third one has exact sums."""
EXACT = {"SPRINGTIDE_LOGICAL_WORKERS": "8"}

pytestmark = pytest.mark.timeout(int(600 + 2 * seconds(30)))


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Yield a zygote of processes whose sums may be exact."""
    zygote = Zygote(MKL_CBWR="AVX2,STRICT")
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def exact_reference(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The undisturbed run in one process with exact sums."""
    return train_alone(zygote, tmp_path_factory.mktemp("alone-exact"), OPTIONS, EXACT)


@pytest.mark.slow
def test_survivors_with_shards_have_the_undisturbed_numbers(
    zygote: Zygote, reference: Reference, exact_reference: Reference, tmp_path: Path
) -> None:
    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        options, environment = speed_of(seed)
        is_exact = seed.version >= EXACT_FROM and seed.number % 3 == 0
        if is_exact:  # the script sleeps in each of eight parts
            options, environment = {"pace": 0.002} | options, environment | EXACT
        cluster = saving_cluster(zygote, folder, OPTIONS | options)
        cluster.environment |= environment
        cluster.environment["SPRINGTIDE_SHARD"] = "Gradients" if seed.number % 2 else "Optimizer"
        if seed.version >= 6 and seed.number % 4 < 2:  # second copies are made while training goes on
            cluster.environment["SPRINGTIDE_SHARDS_AT_ONCE_MIB"] = "0"
        chaos = ShardChaos(cluster, seed)
        told = survive(chaos, exact_reference if is_exact else reference, early=True)
        if is_exact:
            digests = {(worker.result() or {}).get("parameters") for worker in cluster.finished()}
            assert digests == {exact_reference.digest}, cluster.logs()
        lost = sum("that held them are lost" in worker.log() for worker in cluster.workers)
        mode = cluster.environment["SPRINGTIDE_SHARD"] + (", exact" if is_exact else "")
        return f"{mode}: {told}, {lost} workers lost shards"

    each_seed(SEEDS, seconds(20), one)
