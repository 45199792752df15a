"""Every sample is what the CRD takes, and becomes pods that Kubernetes and PodSecurity `restricted` take."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chart_podsecurity import restricted_violations
from chart_render import KUBERNETES_VERSIONS, ROOT, Object, parse, pick, render, schema_errors

from springtide_local.quantities import parse_quantity
from springtide_operator.api.crd import DEFINITIONS
from springtide_operator.api.effective_spec import reference
from springtide_operator.api.job import Job
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod

FILES = sorted((ROOT / "deploy" / "samples").glob("*.yaml"))
EACH = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema in which unknown fields are errors, as for kubectl."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {name: closed(child) for name, child in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            result["additionalProperties"] = False
    if "items" in schema:
        result["items"] = closed(schema["items"])
    return result


TEMPLATES = ("TrainingTemplate", "ClusterTrainingTemplate")


def own_errors(obj: Object) -> list[str]:
    """Return what the CRD of an object's kind has against it."""
    version = DEFINITIONS[obj["kind"]]()["spec"]["versions"][0]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(obj)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]


def with_identity(job: Object, objects: list[Object]) -> Object:
    """Return a job as the operator sees it, with the template of the same file that it names."""
    made = {**job, "metadata": {**job["metadata"], "namespace": "n", "uid": "0" * 8}}
    for obj in objects:
        if obj["kind"] in TEMPLATES and obj["metadata"]["name"] == (reference(job) or ("", ""))[1]:
            named = {"kind": obj["kind"], "name": obj["metadata"]["name"], "time": "2026-01-01T00:00:00Z"}
            made["status"] = {"template": {**named, "spec": obj["spec"]}}
    return made


@pytest.mark.slow
@EACH
def test_objects_follow_their_schemas(file: Path) -> None:
    objects = parse(file.read_text())
    assert "TrainingJob" in {obj["kind"] for obj in objects}
    for obj in objects:
        if obj["kind"] in DEFINITIONS:
            assert own_errors(obj) == []
            continue
        for version in KUBERNETES_VERSIONS:
            assert schema_errors(obj, version) == []


@EACH
def test_pods_are_taken_everywhere(file: Path) -> None:
    objects = parse(file.read_text())
    for obj in objects:
        if obj["kind"] != "TrainingJob":
            continue
        job = Job.parse(with_identity(obj, objects))
        workers = job.spec.workers
        assert workers.min_replicas <= workers.replicas <= workers.maximum
        for pod in (worker_pod(job, 0, 0, "10.0.0.1:7070"), coordinator_pod(job, 1)):
            for version in KUBERNETES_VERSIONS:
                assert schema_errors(pod, version) == []
            assert restricted_violations(pod["spec"]) == []


# Two machines of 2 cores and 4 GiB, less what the kubelet keeps and what the cluster's own pods ask for.
SMALL_NODE = {"cpu": 1.9 - 0.4, "memory": 3.5 * 2**30 - 0.5 * 2**30}
NEEDS_LARGE_NODES = {"digits-gpu"}


def asked(spec: Object) -> dict[str, float]:
    """Return what a pod's containers ask for."""
    requests = [(one.get("resources") or {}).get("requests") or {} for one in spec["containers"]]
    return {
        name: float(sum(parse_quantity(str(request.get(name, "0"))) for request in requests))
        for name in SMALL_NODE
    }


def fits(pods: list[dict[str, float]], nodes: int) -> bool:
    """Put each pod, the largest first, on the first node with room."""
    free = [dict(SMALL_NODE) for _ in range(nodes)]
    for pod in sorted(pods, key=lambda pod: (pod["cpu"], pod["memory"]), reverse=True):
        room = next((node for node in free if all(node[name] >= pod[name] for name in pod)), None)
        if room is None:
            return False
        for name in pod:
            room[name] -= pod[name]
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem not in NEEDS_LARGE_NODES], ids=lambda file: file.stem
)
def test_a_sample_and_its_operator_fit_two_small_nodes(file: Path) -> None:
    deployment = pick(render(), "Deployment")
    pods = [asked(deployment["spec"]["template"]["spec"])] * deployment["spec"]["replicas"]
    objects = parse(file.read_text())
    for obj in objects:
        if obj["kind"] == "TrainingJob":
            job = Job.parse(with_identity(obj, objects))
            pods.append(asked(coordinator_pod(job, 1)["spec"]))
            pods += [asked(worker_pod(job, 0, 0, "10.0.0.1:7070")["spec"])] * job.spec.workers.replicas
            pods += [
                asked(server_pod(job, slot, 0, "10.0.0.1:7070")["spec"]) for slot in range(job.spec.servers)
            ]
    assert len(pods) >= 4
    assert fits(pods, 2), pods
    assert not fits(pods * 10, 2)


@EACH
def test_references_are_in_the_same_file(file: Path) -> None:
    objects = parse(file.read_text())
    there = {(obj["kind"], obj["metadata"]["name"]) for obj in objects}
    for obj in objects:
        if obj["kind"] == "HorizontalPodAutoscaler":
            target = obj["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in there
            job = next(
                o for o in objects if o["metadata"]["name"] == target["name"] and o["kind"] == "TrainingJob"
            )
            workers = job["spec"]["workers"]
            assert "replicas" not in workers
            assert (obj["spec"]["minReplicas"], obj["spec"]["maxReplicas"]) == (
                workers["minReplicas"],
                workers["maxReplicas"],
            )
        if obj["kind"] == "TrainingJob":
            for volume in obj["spec"]["workers"]["template"]["spec"].get("volumes", []):
                if "configMap" in volume:
                    assert ("ConfigMap", volume["configMap"]["name"]) in there
                if "persistentVolumeClaim" in volume:
                    assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there


@EACH
def test_scripts_are_python_and_commands_exist(file: Path) -> None:
    for obj in parse(file.read_text()):
        if obj["kind"] == "ConfigMap":
            for name, text in obj["data"].items():
                ast.parse(text, name)
        if obj["kind"] == "TrainingJob":
            for container in obj["spec"]["workers"]["template"]["spec"]["containers"]:
                script = container["command"][-1]
                assert script.startswith("/script/") or (ROOT / script).is_file()


def test_job_errors_finds_mistakes() -> None:
    wrong = {"apiVersion": "springtide.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}}
    wrong["spec"] = {"worker": {}, "workers": {"replicas": "3", "template": {"spec": {"containers": []}}}}
    text = " ".join(own_errors(wrong))
    assert "'worker' was unexpected" in text
    assert "'3' is not of type 'integer'" in text
