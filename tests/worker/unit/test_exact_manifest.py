"""strategy.allReduce.exact in the API and in the worker's pod."""

from __future__ import annotations

import functools
from typing import Any

import celpy
import pytest

from springtide.errors import SpringtideError
from springtide.exact.settings import CUBLAS_WORKSPACE, MKL_CBWR, MOST_PARTS, prepare
from springtide.settings import read_settings
from springtide_operator.api import crd, names
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.worker import worker_pod

SPEC = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
    "spec"
]


def job(limits: dict[str, str] | None = None, env: list[dict[str, str]] | None = None, **reduce: Any) -> Job:
    container: dict[str, Any] = {"name": "worker", "image": "w", "env": env or []}
    if limits:
        container["resources"] = {"limits": limits}
    return Job.parse(
        {
            "metadata": {"name": "j", "namespace": "n", "uid": "12345678"},
            "spec": {
                "strategy": {"allReduce": reduce},
                "workers": {"maxReplicas": 4, "template": {"spec": {"containers": [container]}}},
            },
        }
    )


@functools.cache
def programs(word: str) -> tuple[tuple[Any, str], ...]:
    """Return the rules of the spec that read a field, compiled, with their messages."""
    cel = celpy.Environment()
    return tuple(
        (cel.program(cel.compile(rule["rule"])), rule["message"])
        for rule in SPEC["x-kubernetes-validations"]
        if word in rule["rule"]
    )


def broken(word: str, spec: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """Return the messages of rules about a field that a spec breaks, in the place of `old` or of itself."""
    now, before = celpy.json_to_cel(spec), celpy.json_to_cel(spec if old is None else old)
    return [text for rule, text in programs(word) if not rule.evaluate({"self": now, "oldSelf": before})]


def environment(job: Job) -> dict[str, str]:
    container = worker_pod(job, 0, 0, "10.0.0.1:7070")["spec"]["containers"][0]
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_the_worker_gets_what_equal_bits_need() -> None:
    exact = environment(job(exact=True, logicalWorkers=6))
    assert exact["SPRINGTIDE_LOGICAL_WORKERS"] == "6"
    assert exact["MKL_CBWR"] == MKL_CBWR
    assert exact["CUBLAS_WORKSPACE_CONFIG"] == CUBLAS_WORKSPACE
    assert exact["OMP_NUM_THREADS"] == "1"
    assert environment(job({"cpu": "3500m"}, exact=True))["OMP_NUM_THREADS"] == "3"
    mixed = environment(job(env=[{"name": "OMP_NUM_THREADS", "value": "2"}], exact=True))
    assert (mixed["OMP_NUM_THREADS"], mixed["MKL_CBWR"]) == ("2", MKL_CBWR)
    with pytest.raises(TemplateError, match=r"MKL_CBWR.*exact is for that"):
        environment(job(env=[{"name": "MKL_CBWR", "value": "AUTO"}], exact=True))
    assert environment(job(env=[{"name": "MKL_CBWR", "value": "AUTO"}]))["MKL_CBWR"] == "AUTO"
    plain = environment(job())
    own = {"SPRINGTIDE_LOGICAL_WORKERS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS"}
    assert not own & set(plain)


@pytest.mark.parametrize(
    ("reduce", "maximum", "processes", "says"),
    [
        ({"exact": True, "logicalWorkers": 4}, 4, 1, None),
        ({"exact": True, "logicalWorkers": 4}, 2, 2, None),
        ({"exact": False, "logicalWorkers": 4}, 9, 1, None),
        ({"exact": False, "logicalWorkers": 4}, None, 1, None),
        ({"exact": True, "logicalWorkers": 4}, 5, 1, "maxReplicas x processesPerPod be at most"),
        ({"exact": True, "logicalWorkers": 4}, 2, 3, "maxReplicas x processesPerPod be at most"),
        ({"exact": True, "logicalWorkers": 4}, None, 1, "maxReplicas x processesPerPod be at most"),
    ],
)
def test_there_is_a_logical_part_for_every_worker(
    reduce: dict[str, Any], maximum: int | None, processes: int, says: str | None
) -> None:
    workers = {"processesPerPod": processes} | ({} if maximum is None else {"maxReplicas": maximum})
    found = broken("logicalWorkers", {"strategy": {"allReduce": reduce}, "workers": workers})
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


@pytest.mark.parametrize(
    ("reduce", "kind", "allowed"),
    [
        ({"exact": False, "compression": "PowerSGD"}, "AllReduce", True),
        ({"exact": True, "compression": "None"}, "AllReduce", True),
        ({"exact": True, "compression": "BF16"}, "AllReduce", False),
        ({"exact": False, "compression": "BF16"}, "ParameterServer", False),
        ({"exact": False, "compression": "None"}, "ParameterServer", True),
    ],
)
def test_compression_is_not_exact_and_not_for_servers(
    reduce: dict[str, Any], kind: str, allowed: bool
) -> None:
    strategy = {"allReduce": {"shard": "None", **reduce}, "type": kind}
    assert len(programs("allReduce.compression")) == 4
    assert (broken("allReduce.compression", {"strategy": strategy}) == []) == allowed


def test_compression_reaches_the_worker() -> None:
    assert environment(job(compression="PowerSGD"))["SPRINGTIDE_COMPRESSION"] == "PowerSGD"
    assert "SPRINGTIDE_COMPRESSION" not in environment(job())


@pytest.mark.parametrize("kind", ["Optimizer", "Gradients"])
def test_shard_reaches_the_worker(kind: str) -> None:
    variables = environment(job(shard=kind))
    assert variables["SPRINGTIDE_SHARD"] == kind
    assert read_settings({"SPRINGTIDE_SHARD": variables["SPRINGTIDE_SHARD"]}).shard == kind


def test_worker_without_shard_has_all_of_the_state() -> None:
    assert "SPRINGTIDE_SHARD" not in environment(job())
    assert read_settings({}).shard == "None"
    with pytest.raises(InvalidJob, match=r"spec\.strategy\.allReduce\.shard"):
        job(shard="Parameters")


def test_worker_refuses_an_unknown_kind_of_shard() -> None:
    with pytest.raises(
        SpringtideError, match="SPRINGTIDE_SHARD must be one of None, Optimizer, Gradients, got 'Parameters'"
    ):
        read_settings({"SPRINGTIDE_SHARD": "Parameters"})


def test_the_cut_is_for_life() -> None:
    fields = SPEC["properties"]["strategy"]["properties"]["allReduce"]["properties"]
    cuts = {"exact": (False, True), "logicalWorkers": (8, 4), "compression": ("None", "BF16")}
    for name, (one, other) in (cuts | {"shard": ("None", "Optimizer")}).items():
        old, new = ({"strategy": {"type": "AllReduce", "allReduce": {name: value}}} for value in (one, other))
        for spec in (old, new):
            spec["workers"] = {"maxReplicas": 1}
        told = f"strategy.allReduce.{name} is immutable"
        assert [told in text for text in broken(f"allReduce.{name}", new, old)] == [True], name
        assert broken(f"allReduce.{name}", old, old) == [], name
    assert fields["logicalWorkers"]["maximum"] == names.MAX_WORKERS == MOST_PARTS


def test_an_environment_that_comes_too_late_is_told() -> None:
    with pytest.raises(SpringtideError, match="MKL_CBWR=AVX2,STRICT in the environment"):
        prepare(read_settings({"SPRINGTIDE_LOGICAL_WORKERS": "4", "MKL_CBWR": "AUTO"}))
    with pytest.raises(SpringtideError, match="at most 1000"):
        prepare(read_settings({"SPRINGTIDE_LOGICAL_WORKERS": "1001", "MKL_CBWR": MKL_CBWR}))
