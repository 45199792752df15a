"""The real kubectl, and the policies that are in the repository as a beginning for a platform's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_api import Api, Kubectl

pytest_plugins = ["local_api_fixtures"]

ROOT = Path(__file__).resolve().parents[3]
CRDS = sorted((ROOT / "deploy" / "crd").glob("*.yaml"))
POLICIES = ROOT / "deploy" / "policies" / "platform.yaml"
SAMPLE = ROOT / "deploy" / "samples" / "digits-template.yaml"
PLAIN = ROOT / "deploy" / "samples" / "digits-allreduce.yaml"

Object = dict[str, Any]


@pytest.fixture(scope="module")
def platform(api: Api) -> Iterator[Api]:
    """A cluster with the CRDs and the policies."""
    if api.server is None:
        pytest.skip("this would change what somebody else's cluster takes")
    for path in CRDS:
        api.do("apply", "--server-side", "-f", str(path))
    names = [f"crd/{path.stem}.springtide.dev" for path in CRDS]
    api.do("wait", "--for=condition=Established", *names)
    api.do("apply", "-f", str(POLICIES))
    yield api
    api.do("delete", "-f", str(POLICIES))
    api.do("delete", *names)


def sample(path: Path = SAMPLE) -> list[Object]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def job(queue: str = "team-a", **spec: Any) -> Object:
    """Return the sample's job with a queue, and with other fields."""
    [made] = [one for one in sample() if one["kind"] == "TrainingJob"]
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    made["spec"] |= spec
    return made


def pod(**fields: Any) -> Object:
    return {"workers": {"template": {"spec": fields}}}


def create(platform: Api, namespace: str, made: Object) -> Kubectl:
    return platform.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(made))


def test_the_sample_is_taken_with_a_queue(platform: Api, namespace: str) -> None:
    [template] = [one for one in sample() if one["kind"] != "TrainingJob"]
    platform.do("apply", "-f", "-", stdin=json.dumps(template))
    shown = platform.do("get", "cstt", template["metadata"]["name"])
    assert shown.split() == ["NAME", "STRATEGY", "IMAGE", "MOST", "AGE", *shown.split()[5:]]
    assert "springtide/worker:0.1.0" in shown
    assert create(platform, namespace, job()).code == 0
    platform.do("delete", "cstt", template["metadata"]["name"])


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (job(queue=""), "name a queue in the label kueue.x-k8s.io/queue-name"),
        (
            job(templateRef={"kind": "TrainingTemplate", "name": "mine"}),
            "name one of the platform's templates",
        ),
        (job(**pod(serviceAccountName="admin")), "pods may have the service account default or training"),
        (job(**pod(hostNetwork=True)), "pods may not use the network, the processes or the memory"),
        (job(**pod(nodeName="node-1")), "pods may not choose their node by nodeName"),
        (job(**pod(priorityClassName="system-node-critical")), "the priority class training-low or"),
        (
            job(
                strategy={"type": "ParameterServer"},
                parameterServers={"template": {"spec": {"hostPID": True}}},
            ),
            "pods may not use the network, the processes or the memory",
        ),
        (job(coordinator={"priorityClassName": "high"}), "the priority class training-low or"),
    ],
)
def test_what_a_platform_forbids_is_refused(platform: Api, namespace: str, made: Object, says: str) -> None:
    done = create(platform, namespace, made)
    assert done.code == 1
    assert (
        "ValidatingAdmissionPolicy 'springtide-jobs' with binding 'springtide-jobs' denied request"
        in done.err
    )
    assert says in done.err


def test_a_job_without_a_template_is_refused(platform: Api, namespace: str) -> None:
    [made] = [one for one in sample(PLAIN) if one["kind"] == "TrainingJob"]
    made["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team-a"}
    assert "name one of the platform's templates" in create(platform, namespace, made).err
    # The release's own test is let alone.
    platform.do("create", "namespace", "springtide-system")
    assert create(platform, "springtide-system", made).code == 0
    platform.do("delete", "namespace", "springtide-system", "--wait=false")


def test_a_job_is_scaled_suspended_and_not_broken(platform: Api, namespace: str) -> None:
    assert create(platform, namespace, job()).code == 0
    platform.do("scale", "stj/digits-template", "--replicas=4", "-n", namespace)
    patch = ("patch", "stj/digits-template", "-n", namespace, "--type=merge", "-p")
    platform.do(*patch, '{"spec": {"suspend": true}}')
    worse = json.dumps({"spec": pod(hostIPC=True)})
    assert "pods may not use the network" in platform.kubectl(*patch, worse).err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TrainingTemplate", "ClusterTrainingTemplate"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, ""),
        ({"limits": {"images": ["springtide/*"]}}, "says in limits.maxReplicas"),
        (
            {"limits": {"maxReplicas": 65, "images": ["springtide/*"]}},
            "says in limits.maxReplicas",
        ),
        ({"limits": {"maxReplicas": 4}}, "says in limits.images"),
        ({"limits": {"maxReplicas": 4, "images": ["*"]}}, "says in limits.images"),
        ({"defaults": pod(hostNetwork=True)}, "no template gives a job the network"),
    ],
)
def test_templates_have_limits(platform: Api, namespace: str, kind: str, change: Object, says: str) -> None:
    limits = {"maxReplicas": 4, "images": ["springtide/*", "registry.example.com/ml/*"]}
    made = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": f"t-{namespace}"},
        "spec": {"defaults": {"strategy": {"type": "AllReduce"}}, "limits": limits, **change},
    }
    done = create(platform, namespace, made)
    assert (done.code == 0) is (says == ""), done.err
    assert says in done.err
    if not says:
        platform.do("delete", kind, made["metadata"]["name"], "-n", namespace)  # type: ignore[index]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"defaults": {"workers": {"replicas": 3}}}, 'unknown field "spec.defaults.workers.replicas"'),
        ({"defaults": {"managedBy": "a"}}, 'unknown field "spec.defaults.managedBy"'),
        ({"defaults": {"suspend": True}}, 'unknown field "spec.defaults.suspend"'),
        ({"defaults": {"strategy": {"type": "Gossip"}}}, "Unsupported value"),
        ({"limits": {"fixedFields": ["workers.replicas"]}}, "fixedFields names what only a job can say"),
        ({"limits": {"images": ["a[b]"]}}, "spec.limits.images[0]"),
        ({"limits": {"maxResources": {"cpu": "much"}}}, "spec.limits.maxResources.cpu"),
    ],
)
def test_a_template_that_means_nothing_is_refused(
    platform: Api, namespace: str, spec: Object, says: str
) -> None:
    made = {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingTemplate",
        "metadata": {"name": "t"},
        "spec": spec,
    }
    done = create(platform, namespace, made)
    assert done.code == 1
    assert says in done.err
