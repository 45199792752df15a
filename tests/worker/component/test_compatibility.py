"""Scripts of many kinds against plain PyTorch: two workers, and a third that joins while they train.

Each run of the suite has every case under one of the strategies; `make compatibility` has all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import compatibility
import pytest
import torch
from compatibility import CASES, STRATEGIES, Job, Tensors, plain
from halt import Halt
from ps_members import Store
from ps_servers import TOKEN, names, servers
from worker_cluster import READY, WorkerCluster, Zygote
from worker_ranks import Rank, on_ranks

import springtide
from springtide.coordination import outcome

ENVIRONMENTS = {
    "AllReduce": {},
    "exact": {"SPRINGTIDE_LOGICAL_WORKERS": "4"},
    "shards": {"SPRINGTIDE_SHARD": "Gradients"},
    "exact shards": {"SPRINGTIDE_LOGICAL_WORKERS": "4", "SPRINGTIDE_SHARD": "Optimizer"},
    "ParameterServer": {"SPRINGTIDE_STRATEGY": "ParameterServer", "SPRINGTIDE_REPLICATION": "1"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "AllReduce": {},
    "exact": {"logical_workers": 4},
    "shards": {"shard": "Gradients"},
    "exact shards": {"logical_workers": 4, "shard": "Optimizer"},
    "ParameterServer": {"strategy": "ParameterServer", "replication": 1, "token": TOKEN},
}
ALL = os.environ.get("SPRINGTIDE_COMPATIBILITY") == "all"
CHOSEN = [
    pytest.param(name, strategy, id=f"{name}-{strategy}")
    for number, name in enumerate(CASES)
    for turn, strategy in enumerate(STRATEGIES)
    if ALL or number % len(STRATEGIES) == turn
]
HELD = [chosen for chosen in CHOSEN if not CASES[str(chosen.values[0])].refusal(str(chosen.values[1]))]
REFUSED = [
    pytest.param(name, strategy, id=f"{name}-{strategy}")
    for name, case in CASES.items()
    for strategy in STRATEGIES
    if case.refusal(strategy)
]

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Yield a zygote of processes whose sums may be exact."""
    zygote = Zygote(MKL_CBWR="AVX2,STRICT")
    yield zygote
    zygote.close()


def apart(one: Tensors, other: Tensors) -> float:
    """The largest difference of any value; infinite where one of them is not finite."""
    assert one.keys() == other.keys()
    wide = torch.complex128
    return max(
        (
            float((one[name].to(wide) - other[name].to(wide)).abs().nan_to_num(nan=float("inf")).max())
            for name in one
            if one[name].numel()
        ),
        default=0.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), HELD)
def test_as_in_one_process(
    name: str, strategy: str, new_cluster: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    cluster = new_cluster(
        {"case": name}, script=Path(compatibility.__file__), environment=ENVIRONMENTS[strategy]
    )
    cluster.servers_wanted = 1 if strategy == "ParameterServer" else 0
    halt = Halt(tmp_path)
    # Steps take milliseconds: without the sleep the job may end before the coordinator lets the joiner in,
    # which it cannot while members stand at the end of a loop.
    cluster.start(2, faults={0: f"{halt.at('committed:3')};body:5:sleep=0.3"})
    joiner = cluster.add()
    cluster.until(lambda: READY in joiner.log(), "a third worker")
    halt.go()
    cluster.until_done(seconds=150)
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()
    assert joiner.commits()
    results = [torch.load(tmp_path / f"{worker.name}.pt") for worker in cluster.workers]
    for other in results[1:]:
        assert apart(results[0], other) == 0.0
    tolerance = CASES[name].tolerance_of(strategy)
    if tolerance is not None:
        assert apart(results[0], plain(name)) <= tolerance


class RankJob(Job):
    """The same calls of a rank of the test's own process. servers: addresses of those that it enters."""

    def __init__(self, rank: Rank, servers: list[str]) -> None:
        self._rank, self._servers = rank, servers

    def distribute(self, model: Any, optimizer: Any, **arguments: Any) -> None:
        self._rank.distribute(model, optimizer, **arguments)
        if self._servers:
            self._rank.enter_servers(self._servers, Store())

    def batches(self, data: Any, **arguments: Any) -> Iterable[Any]:
        return self._rank.batches(data, **({"batch_size": 8, "epochs": 3, "seed": 3} | arguments))

    def step(self) -> AbstractContextManager[Any]:
        return self._rank.step()


@pytest.mark.parametrize(("name", "strategy"), REFUSED)
def test_refused_with_a_sentence(name: str, strategy: str) -> None:
    case = CASES[name]
    with (
        servers(1 if strategy == "ParameterServer" else 0) as running,
        pytest.raises(springtide.UsageError, match=case.refusal(strategy)),
    ):
        on_ranks(1, lambda rank: case.run(RankJob(rank, names(running))), **SETTINGS[strategy])
