"""The examples run as members of a job, for a few steps, and survive a death where there is time for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_cluster import WorkerCluster, Zygote

from springtide.coordination import outcome

EXAMPLES = Path(__file__).parents[3] / "examples"

SHORTER = {"streaming": ("NAMES = sorted(topics)", "NAMES = sorted(topics)[::4]")}
"""Replacements in the text that make a whole pass short, by the name of the example."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Yield a zygote with scikit-learn, whose import takes longer than most of the examples' steps."""
    zygote = Zygote(ZYGOTE_IMPORTS="sklearn.datasets sklearn.metrics")
    yield zygote
    zygote.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment", "fault", "said"),
    [
        ("accumulation", {"EPOCHS": "3"}, "backward:5:kill", "accuracy on the training set"),
        ("augmentation", {"EPOCHS": "1"}, "", "test accuracy"),
        ("streaming", {"PASSES": "1"}, "backward:9:kill", "the last block was trained"),
        ("gpt", {"STEPS": "3", "SPRINGTIDE_SHARD": "Gradients"}, "", "held-out loss"),
    ],
)
def test_example(
    zygote: Zygote, tmp_path: Path, name: str, environment: dict[str, str], fault: str, said: str
) -> None:
    text = (EXAMPLES / name / "train.py").read_text()
    if name in SHORTER:
        long, short = SHORTER[name]
        assert long in text
        text = text.replace(long, short)
    script = tmp_path / "train.py"
    script.write_text(text)
    cluster = WorkerCluster(zygote, tmp_path, {}, script=script, environment=environment)
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


CLICKS = EXAMPLES / "clicks" / "train.py"
SIZES = {"CLICKS_SAMPLES": "20000", "CLICKS_EPOCHS": "3"}


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return how well the clicks are ranked by one process."""
    log = tmp_path_factory.mktemp("alone") / "alone.log"
    assert zygote.wait(zygote.fork(SIZES, [str(CLICKS)], log), 120) == 0, log.read_text()
    return auc_in(log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "consistency"), [("Hybrid", "Synchronous"), ("ParameterServer", "Asynchronous")]
)
def test_clicks_in_a_job_rank_as_well_as_in_one_process(
    zygote: Zygote, tmp_path: Path, alone: float, strategy: str, consistency: str
) -> None:
    """The tables lie on two servers; one worker is killed and another one comes."""
    environment = {
        "SPRINGTIDE_STRATEGY": strategy,
        "SPRINGTIDE_CONSISTENCY": consistency,
        "SPRINGTIDE_REPLICATION": "2",
        **SIZES,
    }
    cluster = WorkerCluster(zygote, tmp_path, {}, script=CLICKS, environment=environment)
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
