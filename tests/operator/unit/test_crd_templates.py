"""Pod templates in the CRD: everything that Kubernetes knows passes, and nothing that could hurt."""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from springtide_local.api import schema
from springtide_local.api.errors import FieldError
from springtide_operator.api.crd import custom_resource_definition, to_yaml
from springtide_operator.api.job import Job

ROOT = Path(__file__).resolve().parents[3]
VERSIONS = range(29, 38)
RAW = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
NODE = schema.compile_schema(RAW)
WORKERS = RAW["properties"]["spec"]["properties"]["workers"]["properties"]["template"]
SERVERS = RAW["properties"]["spec"]["properties"]["parameterServers"]["properties"]["template"]
Object = dict[str, Any]


@functools.cache
def definitions(minor: int) -> Object:
    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v1.{minor}.0-local"
    found: Object = json.loads((folder / "_definitions.json").read_text())
    return found.get("definitions") or found["$defs"]


def type_of(field: Object, known: Object) -> str:
    if "$ref" in field:
        return type_of(known[field["$ref"].rpartition("/")[2]], known)
    given = field.get("type", "")
    return next(name for name in given if name != "null") if isinstance(given, list) else given


def job(template: Object, **workers: Any) -> Object:
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "digits", "namespace": "team", "uid": "12345678"},
        "spec": {"workers": {"template": template, **workers}},
    }


def pod(**container: Any) -> Object:
    return {"spec": {"containers": [{"image": "me/train:1", **container}]}}


def problems(made: Object) -> list[str]:
    """Return what the API server says about a job: unknown fields, and values that are wrong."""
    made, unknown = copy.deepcopy(made), list[str]()
    schema.prune(NODE, made, "", unknown, root=True)
    schema.apply_defaults(NODE, made)
    found: list[FieldError] = []
    schema.validate(NODE, made, "", found)
    return [f'unknown field "{path}"' for path in unknown] + [str(error) for error in found]


@pytest.mark.slow
@pytest.mark.parametrize("minor", VERSIONS)
@pytest.mark.parametrize("template", [WORKERS, SERVERS], ids=["workers", "servers"])
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("PodSpec", ()),
        ("Container", ("containers", "items")),
        ("Container", ("initContainers", "items")),
        ("EnvVar", ("containers", "items", "env", "items")),
        ("ContainerPort", ("containers", "items", "ports", "items")),
        ("ResourceRequirements", ("containers", "items", "resources")),
        ("Toleration", ("tolerations", "items")),
    ],
)
def test_every_field_of_a_pod_is_known(
    minor: int, template: Object, kind: str, path: tuple[str, ...]
) -> None:
    place = template["properties"]["spec"]
    for name in path:
        place = place["items"] if name == "items" else place["properties"][name]
    known = definitions(minor)
    for name, field in known[f"io.k8s.api.core.v1.{kind}"]["properties"].items():
        assert name in place["properties"], f"{kind}.{name} of 1.{minor} would be pruned"
        assert place["properties"][name]["type"] == type_of(field, known), name


def test_definition_stays_far_below_the_limit_of_apply() -> None:
    assert len(json.dumps(yaml.safe_load(to_yaml()))) < 128 * 1024 < 256 * 1024


def jobs_in(path: Path) -> list[Object]:
    """Return all jobs of a file of ours: YAML, or the YAML blocks of a page."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.S) if path.suffix == ".md" else [text]
    found = []
    for block in blocks:
        if "{{" in block or "kind: TrainingJob" not in block:
            continue
        found += [each for each in yaml.safe_load_all(block) if each and each.get("kind") == "TrainingJob"]
    return found


PAGES = [
    *(ROOT / "deploy" / "samples").glob("*.yaml"),
    *(ROOT / "examples").rglob("*.yaml"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "README.md",
]


def test_jobs_of_samples_and_pages_are_valid() -> None:
    found = [(path.name, each) for path in PAGES for each in jobs_in(path) if "spec" in each]
    assert len(found) > 15
    for name, each in found:
        if "..." not in yaml.safe_dump(each):
            assert problems(each) == [], name


RICH = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"a.dev/b": "c" * 5000}},
    "spec": {
        "containers": [
            {
                "name": "worker",
                "image": "me/train:1",
                "command": ["python", "train.py"],
                "args": ["--lr", "0.1"],
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                ],
                "ports": [{"name": "http", "containerPort": 80, "protocol": "TCP"}],
                "resources": {
                    "requests": {"cpu": "500m", "memory": "1.5Gi", "nvidia.com/gpu": 1},
                    "limits": {"cpu": 2, "memory": "1e9", "ephemeral-storage": "10Gi"},
                    "claims": [{"name": "gpu", "request": "one"}],
                },
                "livenessProbe": {"exec": {"command": ["true"]}, "periodSeconds": 5},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "initContainers": [{"name": "fetch", "image": "me/fetch:1", "restartPolicy": "Always"}],
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"any": [{}]}}},
        "nodeSelector": {"pool": "a"},
        "priorityClassName": "team-a.high",
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "pull"}],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}],
        "terminationGracePeriodSeconds": 60,
        "hostNetwork": True,
    },
}


def test_full_template_stays_as_it_was_written() -> None:
    made = job(RICH)
    assert problems(made) == []
    schema.prune(NODE, made, "", [], root=True)
    assert made["spec"]["workers"]["template"] == RICH


def test_nulls_are_no_fields() -> None:
    template = pod(env=None, resources=None, command=None, ports=None)
    template["spec"] |= {"tolerations": None, "nodeSelector": None, "affinity": None, "volumes": None}
    template["metadata"] = None
    assert problems(job(template)) == []
    read = Job.parse(job(template)).spec.workers.template
    assert read == {"spec": {"containers": [{"image": "me/train:1"}]}}


@pytest.mark.parametrize(
    "value", ["1", "500m", "1.5Gi", ".5", "+3", "1e9", "1E-3", "2e+30", "1e0030", 1, 0.5]
)
def test_quantity_of_ordinary_size_is_accepted(value: Any) -> None:
    made = job(pod(resources={"limits": {"cpu": value}}))
    assert problems(made) == []
    assert Job.parse(made)


@pytest.mark.parametrize(
    "value", ["1e999999", "1e31", "1E-31", "1e300000", "9" * 65, 1e300, -1e300, {"a": 1}, [1]]
)
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_quantity_nobody_can_reckon_with_is_refused(value: Any, kind: str) -> None:
    template = pod()
    template["spec"].setdefault(kind, [{"image": "x"}])[0]["resources"] = {"requests": {"a.dev/b": value}}
    place = f"spec.workers.template.spec.{kind}[0].resources.requests.a.dev/b"
    assert any(text.startswith(place) for text in problems(job(template)))


@pytest.mark.parametrize("value", ["Gi", "1.2.3", "0x10", "1 Gi", "1e", ""])
def test_what_is_no_quantity_is_refused(value: str) -> None:
    assert problems(job(pod(resources={"limits": {"cpu": value}})))


def nested(depth: int) -> Object:
    made: Object = {}
    for _ in range(depth):
        made = {"a": made}
    return made


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metadata": {"more": nested(100)}}, 'unknown field "spec.workers.template.metadata.more"'),
        ({"metadata": {"finalizers": ["x"]}}, 'unknown field "spec.workers.template.metadata.finalizers"'),
        ({"spec": {"contianers": []}}, 'unknown field "spec.workers.template.spec.contianers"'),
        (
            {"spec": {"priorityClassName": "../../../x"}},
            "spec.workers.template.spec.priorityClassName: Invalid",
        ),
        ({"spec": {"serviceAccountName": "a/b"}}, "spec.workers.template.spec.serviceAccountName: Invalid"),
        ({"spec": {"tolerations": [{}] * 129}}, "spec.workers.template.spec.tolerations: Too many: 129"),
        ({"spec": {"hostNetwork": "yes"}}, "spec.workers.template.spec.hostNetwork: Invalid value"),
    ],
)
def test_template_outside_its_limits_is_refused(change: Object, said: str) -> None:
    template = pod()
    for part, value in change.items():
        template.setdefault(part, {}).update(value)
    assert any(text.startswith(said) for text in problems(job(template)))


def test_typing_error_in_a_container_is_named() -> None:
    assert problems(job(pod(comand=["x"]))) == [
        'unknown field "spec.workers.template.spec.containers[0].comand"'
    ]


def test_servers_take_the_fields_of_a_pod() -> None:
    made = job(pod())
    made["spec"]["parameterServers"] = {"template": {"spec": {"nodeSelector": {"pool": "cpu"}}}}
    assert problems(made) == []
    made["spec"]["parameterServers"]["template"]["spec"]["restartPolicy"] = "x" * 33
    assert problems(made)


@pytest.mark.parametrize(
    ("field", "value"),
    [("podGroup", "../../../namespaces/other/pods/victim"), ("apiVersion", "x/y"), ("scheduler", "Mine")],
)
def test_forged_gang_in_status_is_refused(field: str, value: str) -> None:
    gang = {
        "scheduler": "Volcano",
        "apiVersion": "scheduling.volcano.sh/v1beta1",
        "podGroup": "digits-1234",
        "minMember": 3,
    }
    made = job(pod())
    made["status"] = {"gang": gang}
    assert problems(made) == []
    made["status"]["gang"] = {**gang, field: value}
    (text,) = problems(made)
    assert text.startswith(f"status.gang.{field}: Invalid value")
