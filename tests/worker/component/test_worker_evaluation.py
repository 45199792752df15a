"""Evaluation in a job: the means are over all samples, each once, whoever dies in the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from halt import Halt
from worker_cluster import WorkerCluster, Zygote

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "worker_evaluation_script.py"
NUMBER = 150.0  # the mean of 0..300

pytestmark = pytest.mark.timeout(300)


IN_SHARDS = {"shards": [40, 17, 0, 9, 64, 33, 1, 50, 23, 64]}  # 301 samples


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, IN_SHARDS], ids=["by number", "in shards"])
def test_killed_in_an_evaluation_and_a_coordinator_too(
    zygote: Zygote, tmp_path: Path, options: dict[str, Any]
) -> None:
    """One worker dies in the first evaluation, the coordinator in the second, a joiner comes in between."""
    cluster = WorkerCluster(zygote, tmp_path, {"epochs": 4, "pace": 0.01} | options, script=SCRIPT)
    try:
        # The others keep their first ranges until then: else they might take all before the victim comes.
        halt = Halt(tmp_path)
        held = halt.at("evaluation:4")
        first, second, third = cluster.start(3, faults={0: held, 1: "evaluation:4:kill", 2: held})
        cluster.until(lambda: not second.running, "the death in the first evaluation")
        halt.go()
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


@pytest.mark.slow
def test_all_stop_early_at_the_same_place(zygote: Zygote, tmp_path: Path) -> None:
    """One dies in the third evaluation, one in a later loop; what the evaluations say ends the job."""
    script = SCRIPT.with_name("worker_early_stop_script.py")
    cluster = WorkerCluster(zygote, tmp_path, {"most": 60, "enough": 0.2}, script=script)
    try:
        halt = Halt(tmp_path)
        held = halt.at("evaluation:9")
        faults = {0: held, 1: "evaluation:9:kill", 2: f"{held};backward:20:kill", 3: held}
        first, second, third, fourth = cluster.start(4, faults=faults)
        cluster.until(lambda: not second.running, "the death in an evaluation")
        halt.go()
        cluster.until_done()
        assert [worker.code for worker in (second, third)] == [-9, -9], cluster.logs()
        found = first.result()
        assert isinstance(found, list), cluster.logs()
        assert found == fourth.result()
        assert found[-1] < 0.2 < found[-2]
        for worker in (first, fourth):
            end = worker.outcome()
            assert isinstance(end, outcome.Finished), cluster.logs()
            assert (end.step, end.data["totalSeen"]) == (3 * len(found), 96 * len(found))
            assert (end.data["repeated"], end.data["lost"]) == (0, 0)
    finally:
        cluster.close()


POISON = """
import torch
import springtide

class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 41:
            raise ValueError("picture 41 is no picture")
        return torch.randn(4)

springtide.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
springtide.distribute(model, optimizer)
for x in springtide.batches(Pictures(), batch_size=16, shuffle=False):
    with springtide.step():
        model(x.data).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_sample_that_ends_one_worker_after_the_other_is_named(zygote: Zygote, tmp_path: Path) -> None:
    script = tmp_path / "poison.py"
    script.write_text(POISON)
    cluster = WorkerCluster(zygote, tmp_path, {}, script=script)
    try:
        first, second = cluster.start(2)
        cluster.until(lambda: not first.running or not second.running, "the first death")
        cluster.add()
        cluster.until(lambda: cluster.reply is not None and cluster.reply.HasField("poison"), "the verdict")
        assert cluster.reply is not None
        poison = cluster.reply.poison
        assert poison.step == 3
        assert poison.samples == "samples 32 to 47 of pass 1"
        assert len(set(poison.workers)) >= 2
        assert "picture 41 is no picture" in poison.detail
    finally:
        cluster.close()
