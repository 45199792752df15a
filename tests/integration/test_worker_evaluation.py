"""Evaluation in a job: the means are over all samples, each once, whoever dies in the loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_cluster import WorkerCluster, Zygote

from springtide import outcome

SCRIPT = Path(__file__).parents[1] / "support" / "worker_evaluation_script.py"
NUMBER = 150.0  # the mean of 0..300

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def test_killed_in_an_evaluation_and_a_coordinator_too(zygote: Zygote, tmp_path: Path) -> None:
    """One worker dies in the first evaluation, the coordinator in the second, a joiner comes in between."""
    cluster = WorkerCluster(zygote, tmp_path, {"epochs": 4, "pace": 0.01}, script=SCRIPT)
    try:
        first, second, third = cluster.start(3, faults={1: "evaluation:4:kill"})
        cluster.until(lambda: not second.running, "the death in the first evaluation")
        joiner = cluster.add()
        cluster.until_step(8)
        cluster.kill_coordinator()
        cluster.start_coordinator()
        cluster.until_done()
        survivors = [first, third, joiner]
        for worker in survivors:
            assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        results = [worker.result() for worker in survivors]
        assert results[0] is not None
        assert set(results[0]) == {"4", "8", "12", "16", "-1"}
        for result in results:
            assert result is not None
            for step, values in result.items():
                assert values["number"] == pytest.approx(NUMBER), f"step {step}\n{cluster.logs()}"
                # All workers are told the same, to the last bit.
                assert values == results[0][step], step
        assert results[0]["16"]["held_out"] == pytest.approx(results[0]["-1"]["held_out"])
        assert results[0]["16"]["held_out"] < results[0]["4"]["held_out"]
        end = first.outcome()
        assert isinstance(end, outcome.Finished)
        assert end.values["number"] == pytest.approx(NUMBER)
        assert cluster.reply is not None
        assert cluster.reply.values["held_out"] == pytest.approx(results[0]["-1"]["held_out"])
    finally:
        cluster.close()
