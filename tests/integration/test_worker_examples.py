"""The examples run as members of a job, for a few steps, and survive a death where there is time for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_cluster import WorkerCluster, Zygote

from springtide import outcome

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


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
