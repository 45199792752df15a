"""Checks that hold for the workers of any job, whatever faults it had."""

from __future__ import annotations

import pytest
from worker_cluster import Worker, WorkerCluster
from worker_reference import Reference

from springtide.coordination import outcome

TOLERANCE = 1e-5


def check(
    cluster: WorkerCluster, reference: Reference, members: list[Worker], tolerance: float = TOLERANCE
) -> None:
    """The members finished with equal parameters, those of the reference; every sample counted once per
    epoch; losses and learning rates of all their steps are the reference's.
    """
    results = []
    for worker in members:
        end = worker.outcome()
        assert isinstance(end, outcome.Finished), f"{worker.name}: {end}\n{cluster.logs()}"
        assert worker.code == 0
        assert (end.data["repeated"], end.data["lost"]) == (0, 0)
        assert end.data["totalSeen"] == reference.audit["totalSeen"]
        result = worker.result()
        assert result is not None
        results.append(result)
    assert len({result["parameters"] for result in results}) == 1
    assert len({result["buffers"] for result in results}) == 1
    difference = max(abs(a - b) for a, b in zip(results[0]["values"], reference.values, strict=True))
    assert difference <= tolerance
    for worker in members:
        losses = {commit["step"]: commit["values"]["loss"] for commit in worker.commits()}
        # Not all have the last one: who lost a peer in its sums got it with the state of another.
        for step, loss in losses.items():
            assert loss == pytest.approx(reference.losses[step], abs=10 * tolerance), (
                f"step {step} of {worker.name}"
            )
        for step, rate in (worker.result() or {})["rates"].items():
            assert rate == reference.rates[step], f"learning rate of step {step} of {worker.name}"
