"""Memory of workers: status, what an edit leads to, and the end of a job whose model does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from operator_world import World, job_object

from springtide_cli.jobview import view
from springtide_cli.story import Story, job_news
from springtide_cli.watch import Seen
from springtide_operator.api import reasons
from springtide_operator.plan import memory
from springtide_operator.plan.completion import LAST_CALLS_SECONDS
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import MemberReport
from springtide_protocol.memory import DEVICE, ModelMemory

MIB = 1 << 20
MODEL = ModelMemory(400 * MIB, 400 * MIB, 25 * MIB, 800 * MIB, "Optimizer", 1300 * MIB)
"""A model for which four processes and more have room, though none for activations."""


def world(replicas: int = 8, model: ModelMemory | None = MODEL, **workers: Any) -> World:
    made = World(job=job_object(replicas, **workers))
    made.settle()
    made.reports(memory=model)
    made.round()
    return made


def degraded(made: World) -> dict[str, Any]:
    return next(c for c in made.status["conditions"] if c["type"] == "Degraded")


def edit(made: World, **workers: Any) -> None:
    made.job["spec"]["workers"] |= workers
    made.job["metadata"]["generation"] += 1


def limited(limit: str) -> dict[str, Any]:
    """A template with a memory limit."""
    template: dict[str, Any] = job_object()["spec"]["workers"]["template"]
    template["spec"]["containers"][0]["resources"] = {"limits": {"memory": limit}}
    return template


def test_status_has_needs_limit_and_fewest_workers() -> None:
    made = world(minReplicas=4)
    assert made.status["memory"] == {
        "perWorker": "1000Mi",
        "perWorkerAtMinReplicas": "1200Mi",
        "limit": "1300Mi",
        "limitedBy": "Container",
        "fewestWorkers": 4,
    }
    assert degraded(made)["status"] == "False"


def test_a_pods_processes_are_one_worker() -> None:
    made = world(4, minReplicas=2, processesPerPod=2)
    made.reports(
        memory=MODEL, members=tuple(MemberReport(f"uid-{n // 2}", True, True, False) for n in range(8))
    )
    made.round()
    assert made.status["memory"] == {
        "perWorker": "2000Mi",
        "perWorkerAtMinReplicas": "2400Mi",
        "limit": "2600Mi",
        "limitedBy": "Container",
        "fewestWorkers": 2,
    }


def test_nothing_is_said_before_a_worker_has_told() -> None:
    made = world(model=None)
    assert "memory" not in made.status
    made.reports(memory=replace(MODEL, limit=0, limited_by=DEVICE))
    made.round()
    assert made.status["memory"].keys() == {"perWorker", "perWorkerAtMinReplicas"}
    assert degraded(made)["status"] == "False"


def test_status_stays_while_the_coordinator_is_silent() -> None:
    made = world(minReplicas=4)
    known = made.status["memory"]
    made.report = None
    made.round()
    assert made.status["memory"] == known


@pytest.mark.parametrize("coordinator", ["answers", "is silent"])
def test_edit_of_min_replicas_is_told_and_not_followed(coordinator: str) -> None:
    made = world(minReplicas=4)
    edit(made, minReplicas=1)
    if coordinator == "is silent":
        made.report = None
    made.round()
    found = degraded(made)
    assert (found["status"], found["reason"]) == ("True", reasons.MEMORY_TOO_SMALL)
    assert "fewer than 4 do not train, and wait for others: set workers.minReplicas to 4" in found["message"]
    assert "raise the memory limit in workers.template" in found["message"]
    word = make_sync(made.parsed(), made.observe(), 1, made.now)
    assert word.minimum == 4


def test_smaller_limit_in_the_template_is_told() -> None:
    made = world(minReplicas=4)
    edit(made, template=limited("1100Mi"))
    made.reports(memory=MODEL)
    made.round()
    assert made.status["memory"]["limit"] == "1100Mi"
    assert "set workers.minReplicas to 6" in degraded(made)["message"]
    edit(made, template=limited("700Mi"))
    made.reports(memory=MODEL)
    made.round()
    assert "fewestWorkers" not in made.status["memory"]
    assert "more workers do not help" in degraded(made)["message"]
    assert memory.smallest(made.parsed()) == 4


def test_job_larger_than_it_may_be_says_so() -> None:
    made = world(8, minReplicas=4)
    edit(made, minReplicas=1, replicas=2, maxReplicas=3)
    made.reports(memory=MODEL)
    made.round()
    assert "4 are needed, and the job has 3 at most" in degraded(made)["message"]


def test_devices_and_shards_get_other_advice() -> None:
    made = world(8, replace(MODEL, shard="None", limit=900 * MIB, limited_by=DEVICE))
    text = degraded(made)["message"]
    assert "set strategy.allReduce.shard in a new job, or use devices with more memory" in text
    assert made.status["memory"]["limitedBy"] == "Device"


def test_job_that_has_not_trained_keeps_its_minimum() -> None:
    made = world(8)
    job = made.parsed()
    job.status.pop("generation")
    assert job.status["memory"]["fewestWorkers"] == 4
    assert memory.smallest(job) == job.spec.workers.min_replicas


def failed(exception: str) -> str:
    return json.dumps(
        {"outcome": "Failed", "exception": exception, "message": "the model does not fit", "frame": ""}
    )


def without_room() -> World:
    """A job whose workers have all ended since the model does not fit; its coordinator has not been asked."""
    made = World(job=job_object(3))
    made.settle()
    for pod in made.workers():
        made.end(pod, 1, failed(memory.ERROR))
    return made


def ended(made: World) -> dict[str, Any] | None:
    return next((c for c in made.status["conditions"] if c["type"] == "Failed"), None)


def test_model_that_does_not_fit_ends_the_job_with_its_figures() -> None:
    """The workers end as soon as they have told the coordinator: it is asked once more."""
    made = without_room()
    asked = frozenset(pod["metadata"]["uid"] for pod in made.workers(live=False))
    made.reports(members=(), asked_living=asked)
    made.round()
    assert ended(made) is None
    made.reports(members=(), asked_living=frozenset(), memory=MODEL)
    made.round()
    found = ended(made)
    assert found is not None
    assert found["reason"] == reasons.MEMORY_TOO_SMALL
    assert "the model does not fit" in found["message"]
    assert (made.status["memory"]["limit"], made.status["memory"]["fewestWorkers"]) == ("1300Mi", 4)


def test_coordinator_that_is_silent_is_not_waited_for() -> None:
    made = without_room()
    made.report, made.unreachable_since = None, made.now
    made.round()
    assert ended(made) is None
    made.now += LAST_CALLS_SECONDS
    made.round()
    assert (ended(made) or {})["reason"] == reasons.MEMORY_TOO_SMALL
    assert "memory" not in made.status


def test_a_rule_of_the_user_comes_first() -> None:
    made = World(job=job_object(3))
    made.job["spec"]["failurePolicy"]["rules"] = [{"action": "Restart", "exceptions": ["MemoryLimitError"]}]
    made.settle()
    made.end(made.workers()[0], 1, failed(memory.ERROR))
    made.round()
    assert "Failed" not in {c["type"] for c in made.status["conditions"]}
    assert made.status["restarts"]["failures"] == 1


def test_the_command_line_tells_of_it_once() -> None:
    made = world(minReplicas=4)
    job = made.job | {"status": made.status}
    assert view(job).memory == (
        "each worker needs 1000Mi of memory without activations and has 1300Mi; 1200Mi where minReplicas are"
        " left"
    )
    story, lines = job_news(Story(since=0.0), Seen("ADDED", job))
    assert [line.text for line in lines if "memory" in line.text] == [view(job).memory]
    _, again = job_news(story, Seen("MODIFIED", job))
    assert not [line for line in again if "memory" in line.text]
