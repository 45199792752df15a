"""The CRD file is what the models say, and a structural schema with limits."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml

from springtide_operator.api import crd, names
from springtide_operator.api.docs import OF_KUBERNETES
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.api.model import TrainingJobSpec

ROOT = Path(__file__).resolve().parents[3]
CRD = crd.custom_resource_definition()
SCHEMA = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    result = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        result += walk(child, f"{path}.{name}")
    if "items" in schema:
        result += walk(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        result += walk(schema["additionalProperties"], f"{path}{{}}")
    return result


@pytest.mark.slow
def test_the_file_is_up_to_date() -> None:
    text = (ROOT / "deploy" / "crd" / "trainingjobs.yaml").read_text(encoding="utf-8")
    assert text == crd.to_yaml(), "run: python -m springtide_operator.api.crd > deploy/crd/trainingjobs.yaml"
    assert yaml.safe_load(text) == CRD


def test_kubernetes_own_schema_accepts_it() -> None:
    kubernetes_validate.validate(yaml.safe_load(crd.to_yaml()), "1.31", strict=True)


def test_everything_has_a_type_a_description_and_limits() -> None:
    for path, schema in walk(SCHEMA):
        assert "$ref" not in schema, path
        assert "anyOf" not in schema, path
        if "type" not in schema:  # a quantity is a string or a number, and nothing that nests
            assert schema["maxLength"] == 64, path
            assert {"pattern", "minimum", "maximum"} <= schema.keys(), path
            assert schema["maxProperties"] == schema["maxItems"] == 0, path
            continue
        # The parts of a pod belong to Kubernetes, which explains them.
        if (
            path.startswith((".spec", ".status"))
            and not path.endswith(("[]", "{}"))
            and not any(part in path and not path.endswith(part) for part in OF_KUBERNETES)
        ):
            assert schema.get("description"), path
        if schema["type"] == "string" and path.startswith((".spec", ".status")):
            assert "maxLength" in schema or "enum" in schema, path
        if schema["type"] == "array":
            assert "maxItems" in schema, path
        if schema["type"] == "object" and "additionalProperties" in schema:
            assert "maxProperties" in schema, path
        if schema["type"] == "integer":
            assert "minimum" in schema or path.endswith("exitCode"), path


def test_no_rule_has_a_message_expression() -> None:
    assert "messageExpression" not in crd.to_yaml()


def test_rules_of_objects_name_a_field_that_is_there() -> None:
    seen = []
    for path, schema in walk(SCHEMA):
        for rule in schema.get("x-kubernetes-validations", []):
            if schema["type"] != "object" or path.endswith("[]"):
                assert "fieldPath" not in rule, path  # the error names the field as it is
                continue
            inner = schema
            for name in rule["fieldPath"].removeprefix(".").split("."):
                inner = inner["properties"][name]
            seen.append(path + rule["fieldPath"])
    assert {".metadata.name", ".spec.workers.replicas", ".spec.strategy.allReduce.exact"} <= set(seen)


def test_status_has_no_defaults() -> None:
    assert all("default" not in schema for _, schema in walk(SCHEMA["properties"]["status"]))


def test_columns_and_subresources() -> None:
    version = CRD["spec"]["versions"][0]
    shown = [c["name"] for c in version["additionalPrinterColumns"] if not c.get("priority")]
    assert shown == ["State", "Workers", "PS", "Step", "Samples/s", "Goodput", "Restarts", "Age"]
    wide = [c for c in version["additionalPrinterColumns"] if c.get("priority")]
    assert [c["name"] for c in wide] == ["Progress", "ETA", "Template", "Message"]
    assert all(c["type"] != "date" for c in wide), "kubectl prints `<invalid>` for a date to come"
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.workers.replicas",
        "statusReplicasPath": ".status.workers.replicas",
        "labelSelectorPath": ".status.workers.selector",
    }
    assert CRD["spec"]["names"]["shortNames"] == ["stj"]


def test_the_models_defaults_and_the_schemas_are_the_same() -> None:
    template = {"spec": {"containers": [{"image": "x"}]}}
    said = TrainingJobSpec.model_validate({"workers": {"template": template}}).model_dump(
        by_alias=True, mode="json", exclude_none=True
    )

    def defaulted(schema: dict[str, Any], value: Any) -> Any:
        if schema.get("type") != "object" or not isinstance(value, dict):
            return value
        result = dict(value)
        for name, child in schema.get("properties", {}).items():
            if name not in result and "default" in child:
                result[name] = child["default"]
            if name in result:
                result[name] = defaulted(child, result[name])
        return result

    assert defaulted(crd.whole_spec(), {"workers": {"template": template}}) == said


@functools.cache
def program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))


def holds(schema: dict[str, Any], value: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
    """Return the messages of the rules that `value` breaks, where it takes the place of `old`, or stays."""
    broken = []
    context = {"self": celpy.json_to_cel(value), "oldSelf": celpy.json_to_cel(value if old is None else old)}
    for rule in schema["x-kubernetes-validations"]:
        if not program(rule["rule"]).evaluate(context):
            broken.append(rule["message"])
    return broken


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"replicas": 3, "minReplicas": 1, "maxReplicas": 6}, []),
        ({"replicas": 3, "minReplicas": 3, "maxReplicas": 3}, []),
        ({"replicas": 900, "minReplicas": 1}, []),
        ({"replicas": 900, "minReplicas": 1, "standby": 100}, []),
        ({"replicas": 901, "minReplicas": 1, "standby": 100}, ["must be 1000 together at most"]),
        (
            {"replicas": 1, "minReplicas": 1, "maxReplicas": 999, "standby": 2},
            ["workers.standby and workers.maxReplicas"],
        ),
        (
            {"replicas": 7, "minReplicas": 1, "maxReplicas": 6},
            ["workers.replicas must lie between workers.minReplicas and workers.maxReplicas"],
        ),
        ({"replicas": 1, "minReplicas": 2}, ["workers.replicas must lie between"]),
        ({"replicas": 3, "minReplicas": 4, "maxReplicas": 2}, ["must not be greater", "replicas must lie"]),
    ],
)
def test_rules_of_sizes(sizes: dict[str, int], says: list[str]) -> None:
    broken = holds(SCHEMA["properties"]["spec"]["properties"]["workers"], sizes)
    assert len(broken) == len(says)
    for text, part in zip(broken, says, strict=True):
        assert part in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digits", None),
        ("d" * 40, None),
        ("d" * 41, "at most 40"),
        ("3d", "begin with a letter"),
        ("a.b", "lower case letters"),
    ],
)
def test_rules_of_names(name: str, says: str | None) -> None:
    broken = holds(SCHEMA, {"metadata": {"name": name}})
    assert (not broken) if says is None else any(says in text for text in broken)


@pytest.mark.parametrize(
    ("entry", "valid"),
    [
        ({"action": "FailJob", "reasons": ["OOMKilled"]}, True),
        ({"action": "Ignore", "exitCodes": {"operator": "NotIn", "values": [1]}}, True),
        ({"action": "Replace", "exceptions": ["torch.AcceleratorError"]}, True),
        ({"action": "FailJob"}, False),
        ({"action": "FailJob", "name": "without a cause"}, False),
    ],
)
def test_a_failure_rule_says_when_it_holds(entry: dict[str, Any], valid: bool) -> None:
    policy = SCHEMA["properties"]["spec"]["properties"]["failurePolicy"]["properties"]
    broken = holds(policy["rules"]["items"], entry)
    assert bool(broken) is not valid
    assert valid or "give exitCodes, reasons or exceptions" in broken[0]


def test_the_longest_name_leaves_room_for_what_derives_from_it() -> None:
    longest = "d" * names.MAX_JOB_NAME
    for name in (
        names.worker_name(longest, 999, 99999),
        names.coordinator_name(longest, 99999),
        names.server_name(longest, 63, 99999),
        names.service_name(longest),
    ):
        assert len(name) <= 63


IMMUTABLE = {
    "strategy.type": ("AllReduce", "Hybrid"),
    "strategy.allReduce.compression": ("None", "BF16"),
    "strategy.allReduce.shard": ("None", "Optimizer"),
    "strategy.allReduce.exact": (False, True),
    "strategy.allReduce.logicalWorkers": (8, 16),
    "strategy.parameterServer.compression": ("None", "BF16"),
    "strategy.parameterServer.topKRatio": (0.01, 0.5),
    "strategy.parameterServer.earlyValues": (True, False),
    "strategy.parameterServer.replication": (1, 2),
    "workers.processesPerPod": (1, 2),
    "workers.groupSize": (1, 2),
}


def with_field(path: str, *value: Any, template: bool = False) -> dict[str, Any]:
    """Return a spec as the API server stores it, with one field where a value is given."""
    spec: dict[str, Any] = {
        "strategy": {"allReduce": {}, "parameterServer": {}},
        "workers": {"replicas": 1, "template": {"spec": {"containers": [{"image": "x"}]}}},
        "elasticity": {},
        "security": {},
    }
    if template:
        spec["templateRef"] = {"kind": "ClusterTrainingTemplate", "name": "gpu"}
    inner = spec
    *above, name = path.split(".")
    for step in above:
        inner = inner[step]
    for one in value:
        inner[name] = one
    return spec


@pytest.mark.slow
@pytest.mark.parametrize("path", IMMUTABLE)
def test_an_immutable_field_keeps_its_value(path: str) -> None:
    schema, message = SCHEMA["properties"]["spec"], f"{path} is immutable: create a new job"
    default, other = IMMUTABLE[path]
    absent, said, changed = with_field(path), with_field(path, default), with_field(path, other)
    for old, new, refused in (
        (absent, absent, False),
        (absent, said, False),  # what was the operator's default all along
        (said, absent, False),
        (absent, changed, True),
        (changed, absent, True),
        (said, changed, True),
        (changed, changed, False),
    ):
        assert (message in holds(schema, new, old)) is refused, (old, new)
    # With a template an absent field is the template's, so that even the default is another value.
    absent, said, changed = (with_field(path, *value, template=True) for value in ((), (default,), (other,)))
    for old, new in ((absent, said), (said, absent), (absent, changed), (said, changed)):
        assert message in holds(schema, new, old), (old, new)
    assert message not in holds(schema, changed, changed)


def test_a_template_can_neither_change_nor_come_nor_go() -> None:
    schema, message = SCHEMA["properties"]["spec"], "templateRef is immutable, and can be neither added"
    plain, templated = with_field("strategy.type"), with_field("strategy.type", template=True)
    other = with_field("strategy.type", template=True)
    other["templateRef"]["name"] = "cpu"
    kind = with_field("strategy.type", template=True)
    kind["templateRef"]["kind"] = "TrainingTemplate"
    for old, new in ((plain, templated), (templated, plain), (templated, other), (templated, kind)):
        assert any(message in text for text in holds(schema, new, old))
    assert not holds(schema, templated, templated)


def test_the_uri_of_checkpoints_stays() -> None:
    schema = SCHEMA["properties"]["spec"]
    without, a = with_field("strategy.type"), {**with_field("strategy.type"), "checkpoint": {"uri": "/a"}}
    b, none = {**a, "checkpoint": {"uri": "/b"}}, {**a, "checkpoint": {"keep": 3}}
    assert holds(schema, a, without) == holds(schema, a, a) == []
    assert any("checkpoint.uri is immutable" in text for text in holds(schema, b, a))
    assert any("checkpoint cannot be removed" in text for text in holds(schema, without, a))
    assert any("checkpoint.uri is needed" in text for text in holds(schema, none))
    template = {"templateRef": {"kind": "ClusterTrainingTemplate", "name": "gpu"}}
    without, a, none = ({**spec, **template} for spec in (without, a, none))
    assert holds(schema, none, without) == []  # the template's uri
    for old in (without, none):
        assert any("checkpoint.uri cannot be added" in text for text in holds(schema, a, old))


def test_no_field_that_a_template_may_have_is_filled_in() -> None:
    filled = {
        path: schema["default"]
        for path, schema in walk(SCHEMA["properties"]["spec"])
        if "default" in schema and schema["default"] != {}
    }
    assert filled == {
        ".workers.replicas": 1,
        ".suspend": False,
        ".templateRef.kind": "ClusterTrainingTemplate",
    }
    whole = {
        path: schema for path, schema in walk(crd.whole_spec()) if schema.get("default") not in (None, {})
    }
    for path in whole.keys() - filled.keys():
        assert "Default: " in dict(walk(SCHEMA["properties"]["spec"]))[path]["description"], path


def test_the_class_of_a_job_can_neither_change_nor_come_nor_go() -> None:
    rules = SCHEMA["properties"]["spec"]["x-kubernetes-validations"]
    (found,) = [rule["rule"] for rule in rules if "managedBy" in rule["rule"]]
    assert found.startswith("has(self.managedBy) == has(oldSelf.managedBy) && ")
    assert "self.managedBy == oldSelf.managedBy" in found


def test_the_consistency_of_a_job_can_be_edited() -> None:
    strategy = SCHEMA["properties"]["spec"]["properties"]["strategy"]["properties"]
    schemas = strategy["parameterServer"]["properties"]
    for name in ("consistency", "staleness"):
        assert "x-kubernetes-validations" not in schemas[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({}, None),
        ({"strategy": {"type": "ParameterServer"}}, None),
        ({"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 3}}, None),
        (
            {
                "strategy": {"type": "ParameterServer", "parameterServer": {"replication": 2}},
                "parameterServers": {"replicas": 2},
            },
            None,
        ),
        (
            {"strategy": {"type": "ParameterServer", "parameterServer": {"replication": 2}}},
            "must not be greater than parameterServers.replicas",
        ),
        ({"parameterServers": {"replicas": 1}}, "for strategy.type ParameterServer and Hybrid only"),
        ({"strategy": {"type": "Hybrid"}, "parameterServers": {"replicas": 2}}, None),
        (
            {"strategy": {"type": "Hybrid", "parameterServer": {"replication": 2}}},
            "must not be greater than parameterServers.replicas",
        ),
        (
            {"strategy": {"type": "Hybrid", "parameterServer": {"consistency": "Asynchronous"}}},
            "Hybrid has consistency Synchronous only",
        ),
        (
            {
                "strategy": {
                    "type": "Hybrid",
                    "allReduce": {"compression": "PowerSGD"},
                    "parameterServer": {"compression": "BF16"},
                }
            },
            None,
        ),
        (
            {"strategy": {"type": "Hybrid", "parameterServer": {"compression": "TopK"}}},
            "TopK is not for strategy.type Hybrid",
        ),
        (
            {"strategy": {"type": "ParameterServer", "allReduce": {"compression": "BF16"}}},
            "allReduce.compression is for strategy.type AllReduce and Hybrid only",
        ),
        (
            {"strategy": {"parameterServer": {"compression": "BF16"}}},
            "parameterServer.compression is for strategy.type ParameterServer and Hybrid only",
        ),
        ({"strategy": {"type": "ParameterServer"}, "checkpoint": {"uri": "file:///data"}}, None),
        ({"strategy": {"type": "ParameterServer"}, "workers": {"groupSize": 2}}, None),
        (
            {
                "strategy": {"type": "ParameterServer", "parameterServer": {"consistency": "Asynchronous"}},
                "workers": {"groupSize": 2},
            },
            None,
        ),
        ({"strategy": {"type": "Hybrid"}, "workers": {"groupSize": 2}}, "groupSize is for strategy.type"),
        ({"workers": {"groupSize": 2}}, "groupSize is for strategy.type ParameterServer"),
        (
            {"strategy": {"type": "ParameterServer", "allReduce": {"exact": True}}},
            "exact is for strategy.type AllReduce only",
        ),
        ({"strategy": {"allReduce": {"shard": "Optimizer"}}}, None),
        ({"strategy": {"allReduce": {"shard": "Gradients"}}}, None),
        (
            {"strategy": {"type": "ParameterServer", "allReduce": {"shard": "Optimizer"}}},
            "allReduce.shard is for strategy.type AllReduce only",
        ),
        (
            {"strategy": {"type": "Hybrid", "allReduce": {"shard": "Gradients"}}},
            "allReduce.shard is for strategy.type AllReduce only",
        ),
        ({"strategy": {"allReduce": {"shard": "Optimizer", "exact": True}}}, None),
        (
            {"strategy": {"allReduce": {"shard": "Gradients", "compression": "BF16"}}},
            "allReduce.shard and compression exclude each other",
        ),
    ],
)
def test_parameter_servers_and_their_strategy_belong_together(spec: dict[str, Any], text: str | None) -> None:
    template = {"spec": {"containers": [{"image": "x"}]}}
    workers = {"template": template, "maxReplicas": 4, **spec.get("workers", {})}
    whole = TrainingJobSpec.model_validate({**spec, "workers": workers})
    value = whole.model_dump(by_alias=True, mode="json", exclude_none=True)
    broken = holds(SCHEMA["properties"]["spec"], value)
    assert (not broken) if text is None else any(text in found for found in broken), broken


def test_an_unreadable_spec_names_its_fields() -> None:
    meta = {"name": "a", "namespace": "b", "uid": "c"}
    with pytest.raises(InvalidJob, match=r"spec\.workers\.template: Field required"):
        Job.parse({"metadata": meta, "spec": {"workers": {}}})
    with pytest.raises(InvalidJob, match=r"spec\.workers\.replicas"):
        Job.parse({"metadata": meta, "spec": {"workers": {"replicas": "three", "template": {}}}})


def test_the_sample_is_read_and_fits_the_schema() -> None:
    sample = yaml.safe_load(
        (ROOT / "deploy" / "samples" / "digits-allreduce.yaml").read_text(encoding="utf-8")
    )
    spec = TrainingJobSpec.model_validate(sample["spec"])
    assert (spec.workers.replicas, spec.workers.min_replicas, spec.workers.max_replicas) == (3, 1, 6)
    workers = {"minReplicas": 1, **sample["spec"]["workers"]}
    assert holds(SCHEMA["properties"]["spec"]["properties"]["workers"], workers) == []
