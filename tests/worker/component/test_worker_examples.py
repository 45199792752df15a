"""The examples run as members of a job, for a few steps, and survive a death where there is time for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_cluster import WorkerCluster, Zygote

from springtide.coordination import outcome

EXAMPLES = Path(__file__).parents[3] / "examples"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("name", "environment", "fault", "said"),
    [
        ("accumulation", {"EPOCHS": "3"}, "backward:5:kill", "accuracy on the training set"),
        ("augmentation", {"EPOCHS": "1"}, "", "test accuracy"),
        ("gpt", {"STEPS": "3"}, "", "held-out loss"),
    ],
)
def test_example(
    zygote: Zygote, tmp_path: Path, name: str, environment: dict[str, str], fault: str, said: str
) -> None:
    cluster = WorkerCluster(
        zygote, tmp_path, {}, script=EXAMPLES / name / "train.py", environment=environment
    )
    try:
        first, second = cluster.start(2, faults={1: fault})
        cluster.until_done(seconds=90)
        members = [first] if fault else [first, second]
        for worker in members:
            end = worker.outcome()
            assert isinstance(end, outcome.Finished), f"{end}\n{cluster.logs()}"
            assert (end.data["repeated"], end.data["lost"]) == (0, 0)
            assert said in worker.log()
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("strategy", "consistency"), [("Hybrid", "Synchronous"), ("ParameterServer", "Asynchronous")]
)
def test_clicks_in_a_job_rank_as_well_as_in_one_process(
    zygote: Zygote, tmp_path: Path, strategy: str, consistency: str
) -> None:
    """The tables lie on two servers; one worker is killed and another one comes."""
    script = EXAMPLES / "clicks" / "train.py"
    sizes = {"CLICKS_SAMPLES": "20000", "CLICKS_EPOCHS": "3"}
    pid = zygote.fork(sizes, [str(script)], tmp_path / "alone.log")
    environment = {
        "SPRINGTIDE_STRATEGY": strategy,
        "SPRINGTIDE_CONSISTENCY": consistency,
        "SPRINGTIDE_REPLICATION": "2",
        **sizes,
    }
    cluster = WorkerCluster(zygote, tmp_path, {}, script=script, environment=environment)
    cluster.servers_wanted = 2
    gate, faults = tmp_path / "gate", {1: "gradients:20:kill"}
    if consistency == "Asynchronous":
        # Any range: the first one waits, so that the victim has one. It dies in the middle of its push.
        gate.write_text("120")  # seconds at most
        faults = {0: f"body:*:hold={gate}", 1: "pushing:*:kill"}
    try:
        first, victim = cluster.start(2, faults=faults)
        cluster.until(lambda: not victim.running, "the death")
        second = cluster.add()
        gate.unlink(missing_ok=True)
        cluster.until_done(seconds=90)
        cluster.until(lambda: zygote.code(pid) is not None, "the end of the run in one process", 60)
        assert zygote.code(pid) == 0, (tmp_path / "alone.log").read_text()
        alone = auc_in((tmp_path / "alone.log").read_text())
        assert alone > 0.7
        for worker in (first, second):
            end = worker.outcome()
            assert isinstance(end, outcome.Finished), f"{end}\n{cluster.logs()}"
            assert (end.data["repeated"], end.data["lost"]) == (0, 0)
            found = auc_in(worker.log())
            if consistency == "Synchronous":
                assert found == pytest.approx(alone, abs=0.005)
            else:  # the order of updates is another each time; nearly always it ranks a little better
                assert found > alone - 0.015
    finally:
        cluster.close()


def auc_in(log: str) -> float:
    return float(log.rpartition("test AUC ")[2].split(",")[0])
