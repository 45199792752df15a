"""Templates whose parts have other types than Kubernetes gives them, and quantities that no machine has."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from operator_world import World, job_object

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.resources import quantity, sum_of_requests
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan import conditions

Object = dict[str, Any]


def with_template(spec: Object | None = None, metadata: Any = None, **container: Any) -> Object:
    job = copy.deepcopy(job_object(replicas=1))
    template = job["spec"]["workers"]["template"]
    template["spec"] |= spec or {}
    template["spec"]["containers"][0] |= container
    if metadata is not None:
        template["metadata"] = metadata
    return job


# What the findings name, and their neighbours: each crashed the plan, or something behind it.
MALFORMED = [
    (with_template(resources={"limits": {"cpu": "1e999"}}), "containers[0].resources.limits.cpu: '1e999'"),
    (with_template(resources={"limits": {"cpu": "inf"}}), "containers[0].resources.limits.cpu: 'inf'"),
    (with_template(resources={"requests": {"nvidia.com/gpu": "1e999999"}}), "exponents go from -30 to 30"),
    (with_template(resources={"requests": {"memory": "9" * 5000}}), "is no quantity"),
    (with_template(env=[{"name": ["A"], "value": "b"}]), "containers[0].env[0].name: must be a string"),
    (with_template({"schedulerName": "volcano"}, {"annotations": "x"}), "annotations: must be an object"),
    (with_template({"schedulerName": "volcano"}, {"annotations": ["x"]}), "annotations: must be an object"),
    (with_template({"schedulerName": ["volcano"]}), "schedulerName: must be a string"),
    (with_template({"tolerations": [{"key": []}]}), "tolerations[0].key: must be a string"),
    (with_template({"initContainers": [1]}), "initContainers[0]: must be an object"),
    (with_template({"initContainers": [[]]}), "initContainers[0]: must be an object"),
    (with_template({"nodeSelector": [1]}), "nodeSelector: must be an object"),
    (with_template({"priorityClassName": "../../api/v1/pods"}), "priorityClassName: '../../api/v1/pods'"),
    (with_template({"runtimeClassName": "A/B"}), "runtimeClassName: 'A/B' is no name"),
    (with_template({"volumes": [{"name": {}}]}), "volumes[0].name: must be a string"),
    (with_template(ports=[[]]), "containers[0].ports[0]: must be an object"),
    (with_template(command=[{}]), "containers[0].command[0]: must be a string"),
]


@pytest.mark.parametrize(("job", "text"), MALFORMED, ids=[text for _, text in MALFORMED])
def test_a_malformed_template_is_a_condition(job: Object, text: str) -> None:
    for labels, api in (({}, None), ({names.LABEL_QUEUE: "q"}, names.KUEUE_V1BETA2), ({}, names.VOLCANO_API)):
        given = copy.deepcopy(job)
        given["metadata"]["labels"] = labels
        world = World(job=given, apis={api: True} if api else {})
        world.round()
        found = world.status
        failed = conditions.is_true(found, reasons.FAILED)
        kind = reasons.FAILED if failed else reasons.DEGRADED
        assert conditions.reason_of(found, kind) == reasons.INVALID_TEMPLATE
        assert text in conditions.message_of(found, kind)
    with pytest.raises(TemplateError, match=r"spec\.workers\.template"):
        worker_pod(Job.parse(job), 0, 0, "")


def test_a_quantity_of_a_million_digits_costs_nothing() -> None:
    began = time.monotonic()
    for text in ("1e999999", "1e-999999", "-1e300000", "9" * 100_000, "1e31", "1E+31", "1" + "0" * 64):
        with pytest.raises(ValueError, match="quantity"):
            quantity(text)
    pod = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1e999999"}}}]}}
    assert sum_of_requests([(pod, 1)]) == {}
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", "0.5"),
        (2, "2"),
        ("1e3", "1000"),
        ("1E", "1e18"),
        ("1Ei", str(2**60)),
        ("1e30", "1e30"),
        (".5", "0.5"),
    ],
)
def test_ordinary_quantities_are_read(text: object, value: str) -> None:
    from decimal import Decimal

    assert quantity(text) == Decimal(value)
