"""Hostile jobs through the operator's plan: refused as a whole, or a plan and a condition; never a crash."""

from __future__ import annotations

import contextlib
import copy
import json
import time
from random import Random
from typing import Any

import fuzzing
import pytest
import yaml
from operator_world import World, job_object

from springtide_local.api.bodies import decode
from springtide_local.api.requests import deletion
from springtide_local.ports import ApiError
from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.api.job import InvalidJob
from springtide_operator.plan import training_template

Object = dict[str, Any]

FULL: Object = {
    "metadata": {"labels": {"a": "b"}, "annotations": {"a": "b"}},
    "spec": {
        "schedulerName": "volcano",
        "priorityClassName": "high",
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "initContainers": [{"name": "i", "image": "x", "resources": {"requests": {"cpu": "1"}}}],
        "containers": [
            {
                "name": "worker",
                "image": "img",
                "command": ["python", "t.py"],
                "env": [{"name": "A", "value": "b"}],
                "ports": [{"name": "metrics", "containerPort": 9400}],
                "resources": {"limits": {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}},
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
            }
        ],
    },
}


def with_template(change: Object) -> Object:
    job = job_object(replicas=1)
    job["spec"]["workers"]["template"] = {**FULL, "spec": {**FULL["spec"], **change}}
    return job


def nested(levels: int) -> Object:
    deep: Object = {}
    for _ in range(levels):
        deep = {"a": deep}
    return deep


# Findings 1, 3, 6, 11 and 13, as far as a template is concerned.
SEEDS = (
    with_template({"containers": [{"name": "w", "resources": {"limits": {"cpu": "1e999"}}}]}),
    with_template({"containers": [{"name": "w", "resources": {"limits": {"nvidia.com/gpu": "1e999999"}}}]}),
    with_template({"containers": [{"name": "w", "env": [{"name": ["A"]}]}]}),
    with_template({"tolerations": [{"key": []}]}),
    with_template({"initContainers": [1]}),
    with_template({"initContainers": [[]]}),
    with_template({"priorityClassName": "../../../../api/v1/namespaces/other/pods/victim"}),
    with_template({"affinity": nested(500)}),
    with_template({"x": nested(900)}),
    with_template({"x": [{}] * 400_000}),
)


def made(chance: Random) -> Object:
    job = job_object(replicas=1)
    job["spec"]["workers"]["template"] = copy.deepcopy(FULL)
    job["spec"] = fuzzing.mutated(chance, job["spec"], 3)
    return job


@pytest.mark.slow
@pytest.mark.parametrize("api", ["", names.KUEUE_V1BETA2, names.VOLCANO_API])
def test_any_job_is_planned_or_refused_in_words(api: str) -> None:
    def check(job: Object) -> None:
        kept = records.job(json.loads(json.dumps(job, allow_nan=True)))
        kept["metadata"]["labels"] = {names.LABEL_QUEUE: "q"} if api == names.KUEUE_V1BETA2 else {}
        world, began = World(job=kept, apis={api: True} if api else {}), time.process_time()
        try:
            for _ in range(2):
                world.round()
                world.now += 5.0
        except InvalidJob:
            return
        finally:
            assert time.process_time() - began < 3.0
        assert world.status

    assert fuzzing.run("words", SEEDS, made, check, 400) >= len(SEEDS)


LIMITS: Object = {
    "maxReplicas": 4,
    "maxStandby": 1,
    "maxServers": 2,
    "maxResources": {"cpu": "8", "nvidia.com/gpu": 1},
    "images": ["img", "registry.example.com/*"],
    "serviceAccountNames": ["default"],
    "priorityClassNames": ["high"],
    "fixedFields": ["strategy.type", "workers.template.spec.hostNetwork"],
}


def templated(chance: Random) -> tuple[Object, Object]:
    """Return a template, and a job that names it; one of them, or both, damaged."""
    defaults = {
        "workers": {"template": copy.deepcopy(FULL), "maxReplicas": 3},
        "strategy": {"type": "Hybrid"},
    }
    spec = {"defaults": defaults, "limits": copy.deepcopy(LIMITS)}
    job = job_object(replicas=1)
    job["spec"]["workers"]["template"] = copy.deepcopy(FULL)
    if chance.random() < 0.7:
        spec = fuzzing.mutated(chance, spec, 3)
    if chance.random() < 0.5:
        job["spec"] = fuzzing.mutated(chance, job["spec"], 3)
    if isinstance(job["spec"], dict):
        job["spec"]["templateRef"] = {"kind": "ClusterTrainingTemplate", "name": "t"}
    return {"metadata": {"name": "t", "uid": "u", "generation": 1}, "spec": spec}, job


def test_any_template_is_taken_or_refused_in_words() -> None:
    def check(made: tuple[Object, Object]) -> None:
        template, job = made
        kept, began = records.job(json.loads(json.dumps(job, allow_nan=True))), time.process_time()
        named = training_template.wanted(kept)
        if named is None:  # what is too large or too deep of the job is the job's own trouble
            assert names.UNREADABLE in kept or not isinstance(job["spec"], dict)
            return
        found = json.loads(json.dumps(template, allow_nan=True))
        kept["status"] = training_template.take(kept, named, found, 0.0).status
        assert kept["status"].get("template") or kept["status"]["message"]
        with contextlib.suppress(InvalidJob):
            World(job=kept).round()
        assert time.process_time() - began < 3.0

    assert fuzzing.run("templates", (), templated, check, 1000) > 0


BODIES = (
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b"[" * 300_000,
    b'{"gracePeriodSeconds": "x"}',
    b'{"preconditions": [1], "propagationPolicy": {}}',
    b"\xff\xfe",
    yaml.safe_dump(FULL).encode(),
    json.dumps(FULL).encode(),
)


def test_any_body_is_a_value_or_refused() -> None:
    def check(body: bytes) -> None:
        began = time.process_time()
        for kind in ("application/json", "application/yaml"):
            try:
                value = decode(kind, body)
                deletion(value if isinstance(value, dict) else {}, {})
            except ApiError as error:
                if not 400 <= error.code < 500:
                    raise AssertionError(f"answered {error.code}") from error
        assert time.process_time() - began < 3.0

    def body(chance: Random) -> bytes:
        if chance.random() < 0.5:
            return fuzzing.damaged(chance, chance.choice(BODIES[2:]))
        options = {"gracePeriodSeconds": 1, "preconditions": {"uid": "a"}, "propagationPolicy": "Orphan"}
        return json.dumps(fuzzing.mutated(chance, options)).encode()

    assert fuzzing.run("body", BODIES, body, check, 600) >= len(BODIES)
