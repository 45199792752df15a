"""Hostile jobs through the operator's plan: refused as a whole, or a plan and a condition; never a crash."""

from __future__ import annotations

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
