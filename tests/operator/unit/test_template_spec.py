"""The spec of a job with a template: defaults, limits, and the rules that no API server has checked."""

from __future__ import annotations

import copy
from typing import Any

import celpy
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from springtide_operator.api import crd, names, reasons, spec_rules
from springtide_operator.api.effective_spec import (
    InvalidJob,
    effective_spec,
    merged_spec,
    reference,
    template_in_status,
)
from springtide_operator.api.job import Job
from springtide_operator.api.merged_rules import broken
from springtide_operator.api.model import TrainingJobSpec
from springtide_operator.unschedulable_pods import may_have_extras

Object = dict[str, Any]

IMAGE = "registry.example.com/ml/train:1"
POD: Object = {"spec": {"containers": [{"image": IMAGE}]}}
DEFAULTS: Object = {"workers": {"template": POD}}


def job(
    own: Object, defaults: Object | None = None, limits: Object | None = None, labels: Object | None = None
) -> Object:
    """Return a job that names a template, which is kept in its status."""
    spec = {"defaults": copy.deepcopy(DEFAULTS if defaults is None else defaults), "limits": limits or {}}
    named = {"kind": "ClusterTrainingTemplate", "name": "gpu"}
    snapshot = {**named, "uid": "t", "generation": 3, "time": "2026-01-01T00:00:00Z", "spec": spec}
    own = copy.deepcopy(own)
    return {
        "metadata": {"name": "j", "namespace": "n", "uid": "u", "labels": labels or {}},
        "spec": {"workers": {"replicas": 1}, **own, "templateRef": named},
        "status": {"template": snapshot},
    }


def refused(made: Object) -> InvalidJob:
    with pytest.raises(InvalidJob) as caught:
        effective_spec(made)
    return caught.value


def test_fields_come_from_the_template_the_job_and_the_models() -> None:
    defaults = {**DEFAULTS, "strategy": {"allReduce": {"shard": "Optimizer"}}, "podCleanup": "All"}
    read = Job.parse(job({"failurePolicy": {"backoffLimit": 0}}, defaults)).spec
    assert read.workers.template["spec"]["containers"] == [{"name": "worker", "image": IMAGE}]
    assert read.strategy.all_reduce.shard.value == "Optimizer"
    assert (read.pod_cleanup.value, read.failure_policy.backoff_limit) == ("All", 0)
    assert read.strategy.all_reduce.bucket_mib == 25


def test_the_default_of_the_operator_wins_where_the_job_says_it() -> None:
    defaults = {**DEFAULTS, "failurePolicy": {"backoffLimit": 10}}
    said = {"failurePolicy": {"backoffLimit": 6}}
    assert effective_spec(job({}, defaults)).failure_policy.backoff_limit == 10
    assert effective_spec(job(said, defaults)).failure_policy.backoff_limit == 6


def test_a_job_without_its_template_waits() -> None:
    made = job({})
    del made["status"]["template"]
    error = refused(made)
    assert error.reason == reasons.TEMPLATE_NOT_FOUND
    assert "waits for its template, ClusterTrainingTemplate gpu" in str(error)


@pytest.mark.parametrize(
    "change", [{"name": "cpu"}, {"kind": "TrainingTemplate"}, {"spec": "text"}, {"spec": None}]
)
def test_a_snapshot_of_another_template_does_not_count(change: Object) -> None:
    made = job({})
    made["status"]["template"] |= change
    assert reference(made) == ("ClusterTrainingTemplate", "gpu")
    assert template_in_status(made) is None


def test_a_job_that_names_no_template_is_read_as_it_is() -> None:
    made = {"metadata": {}, "spec": {"workers": {"template": POD}}, "status": job({})["status"]}
    assert reference(made) is None
    assert merged_spec(made) == made["spec"]
    assert effective_spec(made).template_ref is None


def test_servers_of_a_template_are_for_jobs_with_servers() -> None:
    defaults = {
        **DEFAULTS,
        "strategy": {"type": "ParameterServer", "parameterServer": {"replication": 2}},
        "parameterServers": {"replicas": 2},
    }
    assert effective_spec(job({}, defaults)).servers == 2
    alone = {"strategy": {"type": "AllReduce"}}
    assert effective_spec(job(alone, defaults)).parameter_servers is None
    both = refused(job({**alone, "parameterServers": {"replicas": 1}}, defaults))
    assert "parameterServers is for strategy.type ParameterServer" in str(both)


def test_what_the_two_are_together_keeps_the_rules() -> None:
    defaults = {**DEFAULTS, "strategy": {"allReduce": {"shard": "Gradients"}}}
    error = refused(job({"strategy": {"allReduce": {"compression": "BF16"}}}, defaults))
    assert str(error).startswith("with ClusterTrainingTemplate gpu of 2026-01-01T00:00:00Z: ")
    assert "spec.strategy.allReduce.shard: strategy.allReduce.shard and compression exclude" in str(error)
    assert error.reason == reasons.INVALID_SPEC


def test_extra_workers_of_a_template_are_looked_after() -> None:
    assert not may_have_extras(job({}))
    assert may_have_extras(job({}, {**DEFAULTS, "elasticity": {"policy": "Capacity"}}))
    assert may_have_extras(job({}, {"workers": {"template": POD, "standby": 1}}))
    assert not may_have_extras(job({"workers": {"standby": 0}}, {"workers": {"template": POD, "standby": 1}}))


def test_a_job_and_a_template_without_a_pod_are_one_clear_error() -> None:
    assert "spec.workers.template: Field required" in str(refused(job({}, {})))


def test_a_second_main_container_is_refused() -> None:
    defaults = {"workers": {"template": {"spec": {"containers": [{"name": "trainer", "image": "a"}]}}}}
    own = {"workers": {"template": {"spec": {"containers": [{"name": "worker", "tty": True}]}}}}
    error = refused(job(own, defaults))
    assert "main container is called 'trainer', and the job's 'worker'" in str(error)
    assert "give the job's the name 'trainer', or none" in str(error)


def workers(**fields: Any) -> Object:
    return {"workers": {"replicas": 1, **fields}}


def with_pod(**spec: Any) -> Object:
    return workers(template={"spec": spec})


@pytest.mark.parametrize(
    ("own", "limits", "says"),
    [
        (workers(replicas=8), {"maxReplicas": 8}, None),
        (workers(replicas=9), {"maxReplicas": 8}, "spec.workers.replicas is 9, and at most 8"),
        (workers(maxReplicas=9), {"maxReplicas": 8}, "spec.workers.maxReplicas is 9, and at most 8"),
        (workers(standby=2), {"maxStandby": 1}, "spec.workers.standby is 2, and at most 1"),
        (workers(standby=2), {"maxReplicas": 1}, None),
        (
            {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 3}},
            {"maxServers": 2},
            "spec.parameterServers.replicas is 3, and at most 2",
        ),
        ({}, {"images": ["registry.example.com/*"]}, None),
        (
            {},
            {"images": ["other.example.com/*", "a:1"]},
            f"containers[0].image is {IMAGE}, and may be one of other.example.com/*, a:1",
        ),
        (
            with_pod(initContainers=[{"name": "i", "image": "evil"}]),
            {"images": ["registry.example.com/*"]},
            "spec.workers.template.spec.initContainers[0].image is evil",
        ),
        (
            {"coordinator": {"image": "evil"}},
            {"images": ["registry.example.com/*"]},
            "spec.coordinator.image is evil",
        ),
        (with_pod(serviceAccountName="a"), {"serviceAccountNames": ["a"]}, None),
        (
            with_pod(serviceAccountName="b"),
            {"serviceAccountNames": ["a"]},
            "AccountName is b, and may be a",
        ),
        (
            with_pod(serviceAccount="b"),
            {"serviceAccountNames": []},
            "is b, and may be none at all",
        ),
        (with_pod(), {"serviceAccountNames": []}, None),
        (
            {"coordinator": {"priorityClassName": "high"}},
            {"priorityClassNames": ["low"]},
            "spec.coordinator.priorityClassName is high, and may be low",
        ),
        ({}, {"fixedFields": ["workers.template", "strategy"]}, None),
        (
            with_pod(hostNetwork=True),
            {"fixedFields": ["workers.template.spec.hostNetwork"]},
            "spec.workers.template.spec.hostNetwork is true, and is fixed: left out",
        ),
        (
            with_pod(hostNetwork=False),
            {"fixedFields": ["workers.template.spec.hostNetwork"]},
            "hostNetwork is false, and is fixed",
        ),
        (
            {"strategy": {"allReduce": {"bucketMiB": 9}}},
            {"fixedFields": ["strategy.allReduce"]},
            'spec.strategy.allReduce is {"bucketMiB": 9}, and is fixed: left out',
        ),
        ({"strategy": {"allReduce": {}}}, {"fixedFields": ["strategy.allReduce"]}, None),
    ],
)
def test_limits(own: Object, limits: Object, says: str | None) -> None:
    made = job(own, limits=limits)
    if says is None:
        effective_spec(made)
        return
    error = refused(made)
    assert error.reason == reasons.TEMPLATE_LIMITS
    assert "the job goes beyond what ClusterTrainingTemplate gpu allows: " in str(error)
    assert says in str(error)


@pytest.mark.parametrize(
    ("containers", "says"),
    [
        ([{"resources": {"limits": {"memory": "4Gi"}}}], None),
        (
            [{"resources": {"requests": {"memory": "4097Mi"}}}],
            "4296015872 of memory, and at most 4Gi",
        ),
        ([{"resources": {"limits": {"memory": 1}, "requests": {"memory": "5Gi"}}}], "of memory"),
        ([{"resources": {"limits": {"memory": "3Gi"}}}, {"name": "b", "image": "x"}], None),
        (
            [
                {"resources": {"limits": {"memory": "3Gi"}}},
                {"name": "b", "image": "x", "resources": {"limits": {"memory": "2Gi"}}},
            ],
            "of memory",
        ),
        ([{"resources": {"limits": {"nvidia.com/gpu": 2}}}], "ask for 2 of nvidia.com/gpu, and at most 1"),
        ([{"resources": {"limits": {"memory": "much"}}}], "is no quantity"),
    ],
)
def test_resources_of_a_pod(containers: list[Object], says: str | None) -> None:
    made = job(
        with_pod(containers=containers), limits={"maxResources": {"memory": "4Gi", "nvidia.com/gpu": 1}}
    )
    if says is None:
        effective_spec(made)
    else:
        assert says in str(refused(made))


def test_the_queue_has_to_be_one_of_the_templates() -> None:
    limits = {"queueNames": ["team-a"]}
    effective_spec(job({}, limits=limits, labels={names.LABEL_QUEUE: "team-a"}))
    assert "queue-name is missing, and has to name team-a" in str(refused(job({}, limits=limits)))
    other = job({}, limits=limits, labels={names.LABEL_QUEUE: "b"})
    assert "names the queue b, and has to name team-a" in str(refused(other))


def test_the_limit_is_the_maximum_of_a_job_without_one() -> None:
    limits = {"maxReplicas": 8}
    assert effective_spec(job(workers(), limits=limits)).workers.max_replicas == 8
    assert effective_spec(job(workers(maxReplicas=4), limits=limits)).workers.max_replicas == 4
    needs_one = {"elasticity": {"policy": "Capacity"}}
    assert effective_spec(job(needs_one, limits=limits)).elasticity.policy.value == "Capacity"


def test_all_limits_are_told_together() -> None:
    made = job(with_pod(hostIPC=True, serviceAccountName="b"), limits={"serviceAccountNames": ["a"]})
    made["status"]["template"]["spec"]["limits"]["fixedFields"] = ["workers.template.spec.hostIPC"]
    assert str(refused(made)).count("; ") == 1


_SIZES = st.one_of(st.none(), st.integers(1, 4), st.sampled_from([500, 1000]))
WHOLE = st.fixed_dictionaries(
    {
        "strategy": st.fixed_dictionaries(
            {
                "type": st.sampled_from(["AllReduce", "ParameterServer", "Hybrid"]),
                "allReduce": st.fixed_dictionaries(
                    {},
                    optional={
                        "exact": st.booleans(),
                        "shard": st.sampled_from(["None", "Optimizer", "Gradients"]),
                        "compression": st.sampled_from(["None", "BF16"]),
                        "logicalWorkers": st.integers(1, 8),
                    },
                ),
                "parameterServer": st.fixed_dictionaries(
                    {},
                    optional={
                        "compression": st.sampled_from(["None", "BF16", "TopK"]),
                        "consistency": st.sampled_from(["Synchronous", "Asynchronous"]),
                        "replication": st.integers(1, 2),
                    },
                ),
            }
        ),
        "workers": st.fixed_dictionaries(
            {"template": st.just(POD), "replicas": st.sampled_from([1, 2, 3, 900])},
            optional={
                "minReplicas": st.integers(1, 4),
                "maxReplicas": st.sampled_from([1, 2, 4, 1000]),
                "standby": st.sampled_from([0, 1, 200]),
                "groupSize": st.integers(1, 2),
                "processesPerPod": st.integers(1, 3),
            },
        ),
        "elasticity": st.fixed_dictionaries({}, optional={"policy": st.sampled_from(["Manual", "Capacity"])}),
        "security": st.just({}),
    },
    optional={"parameterServers": st.fixed_dictionaries({}, optional={"replicas": st.integers(1, 2)})},
)


class Rules:
    """The rules of the CRD, compiled once."""

    def __init__(self) -> None:
        environment = celpy.Environment()
        spec = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        schema = spec["properties"]["spec"]
        parts = (("spec", schema), ("spec.workers", schema["properties"]["workers"]))
        self.programs = [
            (
                f"{where}{rule['fieldPath']}: {rule['message']}",
                where,
                environment.program(environment.compile(rule["rule"])),
            )
            for where, one in parts
            for rule in one["x-kubernetes-validations"]
            if "oldSelf" not in rule["rule"]
            and "is needed" not in rule["message"]
            and "needs an" not in rule["message"]
        ]

    def broken(self, spec: Object) -> set[str]:
        found = set()
        for text, where, program in self.programs:
            value = spec if where == "spec" else spec["workers"]
            if not program.evaluate({"self": celpy.json_to_cel(value)}):
                found.add(text)
        return found


RULES = Rules()


@pytest.mark.slow
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(WHOLE)
def test_the_operator_and_the_api_server_refuse_the_same(spec: Object) -> None:
    try:
        read = TrainingJobSpec.model_validate(spec)
    except ValidationError:  # a bound of one field, which both have from the same model
        assume(False)
        raise
    assert set(broken(read)) == RULES.broken(spec)


def test_every_rule_between_fields_is_checked_in_both() -> None:
    assert len(RULES.programs) == len(spec_rules.MERGED) + len(spec_rules.WORKERS)
