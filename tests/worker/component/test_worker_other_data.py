"""Workers that read different data under the same numbers are found, and told what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from worker_cluster import Worker, WorkerCluster
from worker_groups import form_groups, together

from springtide.coordination import outcome
from springtide.data.loop import LoopPlan, plan_loop
from springtide.data.marks import MAX_MARKED, marked_ids
from springtide.data.source import make_source
from springtide.elastic.data_check import DataCheck, own_row
from springtide.errors import SpringtideError
from springtide.loading.marking import read_marks

OPTIONS: dict[str, Any] = {"samples": 64, "batch": 16, "epochs": 5, "lr": 0.01}


def refusal(worker: Worker) -> str:
    end = worker.outcome()
    assert isinstance(end, outcome.Failed), worker.log()
    return str(end)


def check_others(cluster: WorkerCluster, odd: Worker, step: int) -> None:
    for worker in cluster.workers:
        if worker is not odd:
            assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
            result = worker.result()
            assert result["step"] == step
            assert not result["audit"]["lost"]
            assert not result["audit"]["repeated"]


@pytest.mark.parametrize("odd", [0, 2])
def test_other_order_on_one_of_three_is_refused_there(
    odd: int, new_cluster: Callable[..., WorkerCluster]
) -> None:
    cluster = new_cluster(OPTIONS | {"other_order": [[0, odd]]})
    cluster.start(3)
    cluster.until_done()
    said = refusal(cluster.workers[odd])
    assert f"worker-{odd} reads other data than worker-" in said
    assert str(sorted(marked_ids(64, 8)))[1:-1] in said
    assert "sort it" in said
    check_others(cluster, cluster.workers[odd], 20)


def test_joiner_with_another_order_is_refused(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"epochs": 40})
    cluster.start(1)
    cluster.until_step(4)
    joiners = [cluster.add(other_order=[[0, 1], [0, 2]]) for _ in range(2)]
    cluster.until_done(*joiners)
    for joiner in joiners:
        assert f"{joiner.name} reads other data than worker-0" in refusal(joiner)
    cluster.until_done()
    assert isinstance(cluster.workers[0].outcome(), outcome.Finished), cluster.logs()


def test_other_order_in_a_later_loop_is_refused(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"loops": 2, "other_order": [[1, 1]]})
    cluster.start(2)
    cluster.until_done()
    assert "worker-1 reads other data than worker-0" in refusal(cluster.workers[1])
    check_others(cluster, cluster.workers[1], 40)


def test_no_samples_to_verify_lets_data_differ(new_cluster: Callable[..., WorkerCluster]) -> None:
    cluster = new_cluster(OPTIONS | {"other_order": [[0, 1]], "verify_samples": 0})
    cluster.start(2)
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in cluster.workers), cluster.logs()


# ---- without a job


def plan(x: torch.Tensor, count: int = 8, **options: Any) -> LoopPlan:
    found = plan_loop(x, **({"batch_size": 4} | options))
    marks = read_marks(found.source, count, in_child=False)
    return LoopPlan(*(getattr(found, name) for name in found.__slots__ if name != "marks"), marks)


def on_members(plans: list[LoopPlan], held: tuple[int, ...] = ()) -> list[str]:
    """Return what each member is told; "" for those that go on."""
    groups = form_groups(len(plans))
    labels = [f"w{rank}" for rank in range(len(plans))]

    def check(rank: int) -> str:
        row = own_row(plans[rank], 0, held=rank in held)
        try:
            DataCheck().agree(groups[rank], row, plans[rank], labels)
        except SpringtideError as error:
            return str(error)
        return ""

    try:
        return together([lambda rank=rank: check(rank) for rank in range(len(plans))])
    finally:
        for group in groups:
            group.release()


X = torch.randn(60, 5, generator=torch.Generator().manual_seed(2))


def test_other_arguments_are_named_and_not_other_data() -> None:
    said = on_members([plan(X), plan(X), plan(X, batch_size=5)])
    assert said[:2] == ["", ""]
    assert "batch_size is 5 here and 4 there" in said[2]


def test_members_compare_the_samples_that_both_have_read() -> None:
    assert on_members([plan(X, MAX_MARKED), plan(X, 2), plan(X, 0)]) == ["", "", ""]
    said = on_members([plan(X, MAX_MARKED), plan(X.flip(0), 2)])
    first, second = sorted(marked_ids(60, 2))
    assert f"for the samples {first}, {second}: " in said[1]


def test_one_file_that_is_another_is_only_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    other = X.clone()
    other[marked_ids(60, 8)[3]] += 1
    assert on_members([plan(X), plan(X), plan(other)]) == ["", "", ""]
    assert f"w2 reads other data than w0 for the samples {marked_ids(60, 8)[3]}," in caplog.text


def test_newcomers_do_not_outvote_who_held_the_state() -> None:
    said = on_members([plan(X.flip(0)), plan(X.flip(0)), plan(X)], held=(2,))
    assert said[2] == ""
    assert all("reads other data than w2" in text for text in said[:2])


class Opened(Dataset[Any]):
    """Opens its file at the first reading, which must not come along through a fork."""

    def __init__(self) -> None:
        self.opened = False

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> torch.Tensor:
        self.opened = True
        return torch.tensor(i)


def test_loader_workers_read_the_samples_elsewhere() -> None:
    opened = Opened()
    source = make_source(opened)
    there = read_marks(source, 4, in_child=True)
    assert not opened.opened
    assert there == read_marks(source, 4, in_child=False)
    assert len(there) == 4
    assert opened.opened
