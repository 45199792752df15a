"""Decisions about a template: it is taken, or the job waits and says why."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_world import World, job_object

from springtide_operator.api import reasons
from springtide_operator.api.effective_spec import Reference
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.api.limits import MAX_SNAPSHOT_BYTES
from springtide_operator.plan import conditions, training_template
from springtide_operator.plan.actions import Plan
from springtide_operator.plan.decide import invalid

Object = dict[str, Any]

NOW = 1_800_000_000.0
GPU = Reference("ClusterTrainingTemplate", "gpu")
POD = {"spec": {"containers": [{"image": "img", "command": ["python", "t.py"]}]}}


def job(kind: str = GPU.kind) -> Object:
    made = job_object(1)
    made["spec"] = {"workers": {"replicas": 1}, "templateRef": {"kind": kind, "name": "gpu"}}
    return made


def template(**spec: Any) -> Object:
    return {
        "metadata": {"name": "gpu", "uid": "t-1", "generation": 4},
        "spec": {"defaults": {"workers": {"template": POD}}, **spec},
    }


def condition(decided: Plan, kind: str) -> Object:
    [found] = [one for one in decided.status["conditions"] if one["type"] == kind]
    assert isinstance(found, dict)
    return found


def test_a_template_is_taken_once() -> None:
    made = job()
    assert training_template.wanted(made) == GPU
    decided = training_template.take(made, GPU, template(), NOW)
    assert decided.status["template"] == {
        "kind": GPU.kind,
        "name": "gpu",
        "uid": "t-1",
        "generation": 4,
        "time": "2027-01-15T08:00:00Z",
        "spec": template()["spec"],
    }
    assert [event.reason for event in decided.events] == [reasons.EVENT_TEMPLATE]
    made["status"] = decided.status
    assert training_template.wanted(made) is None
    assert Job.parse(made).spec.workers.template["spec"]["containers"][0]["image"] == "img"


@pytest.mark.parametrize("change", [{"deletionTimestamp": "2026-01-01T00:00:00Z"}, None])
def test_a_job_that_ends_needs_no_template(change: Object | None) -> None:
    made = job()
    if change is None:
        made["status"] = {"completionTime": "2026-01-01T00:00:00Z"}
    else:
        made["metadata"] |= change
    assert training_template.wanted(made) is None


def test_a_job_without_a_reference_needs_none() -> None:
    assert training_template.wanted(job_object(1)) is None


def test_a_missing_template_is_waited_for() -> None:
    made = job("TrainingTemplate")
    named = Reference("TrainingTemplate", "gpu")
    decided = training_template.lack(made, named, 404, "not found", NOW)
    text = "there is no TrainingTemplate gpu in namespace default: the job waits for it"
    assert decided.status["message"].startswith(text)
    assert decided.status["state"] == "Pending"
    assert not decided.actions
    # Tools that roll manifests out wait for it as well.
    wanted = {"Degraded": "True", "Ready": "False", "Reconciling": "True", "Stalled": "False"}
    for kind, value in wanted.items():
        found = condition(decided, kind)
        assert (found["status"], found["reason"]) == (value, reasons.TEMPLATE_NOT_FOUND)
    assert [event.reason for event in decided.events] == [reasons.TEMPLATE_NOT_FOUND]
    made["status"] = decided.status
    assert not training_template.lack(made, named, 404, "not found", NOW + 9).events  # told once


def test_a_refused_read_says_which_right_is_missing() -> None:
    decided = training_template.lack(job(), GPU, 403, 'User "x" cannot get', NOW)
    assert condition(decided, "Degraded")["reason"] == reasons.TEMPLATE_UNREADABLE
    assert 'User "x" cannot get' in decided.status["message"]
    assert "rbac.clusterTemplates" in decided.status["message"]


def nested(levels: int) -> Object:
    value: Object = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (template(description="x" * MAX_SNAPSHOT_BYTES), "bytes of JSON"),
        (template(defaults={"workers": nested(70)}), "nested more than 64 levels"),
        (template(limits={"maxReplicas": "many"}), "limits.maxReplicas: Input should be a valid integer"),
        (template(limits={"images": ["[a"]}), "limits.images.0: String should match pattern"),
        ({"metadata": {}, "spec": {"defaults": []}}, "defaults: Input should be a valid dictionary"),
    ],
)
def test_a_template_that_cannot_be_used_is_not_taken(found: Object, says: str) -> None:
    decided = training_template.take(job(), GPU, found, NOW)
    assert "template" not in decided.status
    assert condition(decided, "Degraded")["reason"] == reasons.TEMPLATE_UNREADABLE
    assert says in decided.status["message"]
    assert "the job waits until it is corrected" in decided.status["message"]


def test_the_snapshot_stays_through_the_life_of_a_job() -> None:
    world = World()
    world.job = job()
    world.job["status"] = training_template.take(world.job, GPU, template(), NOW).status
    before = copy.deepcopy(world.job["status"]["template"])
    world.settle()
    assert world.job["status"]["template"] == before
    assert [one["spec"]["containers"][0]["image"] for one in world.workers()] == ["img"]


def test_a_job_beyond_its_limits_has_a_reason_of_its_own() -> None:
    made = job()
    made["status"] = training_template.take(made, GPU, template(limits={"images": ["other/*"]}), NOW).status
    with pytest.raises(InvalidJob) as caught:
        Job.parse(made)
    decided = invalid(made["status"], 1, str(caught.value), NOW, caught.value.reason)
    assert condition(decided, "Stalled")["reason"] == reasons.TEMPLATE_LIMITS
    assert conditions.is_true(decided.status, reasons.DEGRADED)
    assert decided.status["template"] == made["status"]["template"]
