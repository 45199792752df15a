"""The manifests of a job's pods, Service and Secret."""

from __future__ import annotations

import base64
import copy
from itertools import product
from typing import Any

import kubernetes_validate
import pytest
from operator_world import job_object

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.manifests.coordinator import (
    coordinator_pod,
    coordinator_template_hash,
    secret,
    service,
)
from springtide_operator.manifests.worker import TemplateError, template_hash, worker_pod

ADDRESS = "10.0.0.1:7070"
DEVICE = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def job_with(template: dict[str, Any] | None = None, **container: Any) -> Job:
    obj = job_object(3)
    if template is not None:
        obj["spec"]["workers"]["template"] = template
    obj["spec"]["workers"]["template"]["spec"]["containers"][0].update(container)
    return Job.parse(obj)


def environment(pod: dict[str, Any], container: int = 0) -> dict[str, Any]:
    return {
        e["name"]: e.get("value", e.get("valueFrom")) for e in pod["spec"]["containers"][container]["env"]
    }


def sent(obj: dict[str, Any]) -> dict[str, Any]:
    kubernetes_validate.validate(obj, "1.31", strict=True)
    return obj


def test_a_silent_template_is_filled_in() -> None:
    pod = sent(worker_pod(job_with(), 2, 3, ADDRESS))
    meta, spec = pod["metadata"], pod["spec"]
    container = spec["containers"][0]
    assert meta["name"] == "digits-worker-2-3"
    assert meta["labels"] == {
        "app.kubernetes.io/name": "springtide",
        "app.kubernetes.io/managed-by": "springtide-operator",
        "springtide.dev/job": "digits",
        "springtide.dev/role": "worker",
        "springtide.dev/slot": "2",
        "springtide.dev/attempt": "3",
    }
    assert meta["ownerReferences"][0]["controller"] is True
    assert "finalizers" not in meta
    assert spec["restartPolicy"] == "Never"
    assert spec["terminationGracePeriodSeconds"] == 120
    assert spec["automountServiceAccountToken"] is False
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert {"name": "springtide-shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "springtide-shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    env = environment(pod)
    assert env["SPRINGTIDE_COORDINATOR"] == ADDRESS
    assert env["SPRINGTIDE_SLOT"] == "2"
    assert env["SPRINGTIDE_ATTEMPT"] == "3"
    assert (env["SPRINGTIDE_BUCKET_MIB"], env["SPRINGTIDE_BACKEND"]) == ("25", "Auto")
    assert env["SPRINGTIDE_ROLE"] == "worker"
    assert env["SPRINGTIDE_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["SPRINGTIDE_TOKEN"] == {"secretKeyRef": {"name": "digits-token-job-uid-", "key": "token"}}
    assert "OMP_NUM_THREADS" not in env


def test_a_template_that_speaks_is_not_overridden() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "serviceAccountName": "reader",
            "terminationGracePeriodSeconds": 7,
            "hostNetwork": True,
            "securityContext": {"seccompProfile": {"type": "Unconfined"}, "fsGroup": 5},
            "nodeSelector": {"gpu": "yes"},
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
            "containers": [
                {"name": "proxy", "image": "p"},
                {
                    "name": "worker",
                    "image": "w",
                    "terminationMessagePath": "/tmp/message",
                    "terminationMessagePolicy": "File",
                    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm/"}],
                    "env": [
                        {"name": "SPRINGTIDE_STEP_LOG", "value": "/steps"},
                        {"name": "OMP_NUM_THREADS", "value": "3"},
                        {"name": "NCCL_DEBUG", "value": "INFO"},
                    ],
                    "resources": {"limits": {"cpu": "8"}},
                },
            ],
        },
    }
    before = copy.deepcopy(template)
    pod = sent(worker_pod(job_with(template), 0, 0, ADDRESS))
    assert template == before
    spec = pod["spec"]
    container = spec["containers"][1]
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert pod["metadata"]["annotations"]["note"] == "b"
    assert "automountServiceAccountToken" not in spec
    assert spec["terminationGracePeriodSeconds"] == 7
    assert spec["securityContext"] == {"seccompProfile": {"type": "Unconfined"}, "fsGroup": 5}
    assert len(spec["volumes"]) == 1
    assert container["terminationMessagePolicy"] == "File"
    assert "ports" not in container  # a port on the host's network would be a claim on the node
    assert "env" not in spec["containers"][0]
    env = environment(pod, 1)
    assert env["SPRINGTIDE_SLOT"] == "0"
    assert env["SPRINGTIDE_GRACE_SECONDS"] == "7"
    assert env["SPRINGTIDE_TERMINATION_LOG"] == "/tmp/message"
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["NCCL_DEBUG"] == "INFO"


def test_an_init_container_that_fails_leaves_the_end_of_its_log() -> None:
    spec = {
        "containers": [{"name": "worker", "image": "i"}],
        "initContainers": [
            {"name": "fetch", "image": "i"},
            {"name": "check", "image": "i", "terminationMessagePolicy": "File"},
        ],
    }
    pod = worker_pod(job_with({"spec": spec}), 0, 0, ADDRESS)
    policies = [container["terminationMessagePolicy"] for container in pod["spec"]["initContainers"]]
    assert policies == ["FallbackToLogsOnError", "File"]
    assert (
        "initContainers"
        not in worker_pod(job_with({"spec": {"containers": spec["containers"]}}), 0, 0, ADDRESS)["spec"]
    )


@pytest.mark.parametrize(
    ("cpu", "threads"), [("4", "4"), ("2500m", "2"), ("100m", "1"), (2, "2"), ("1.5", "1")]
)
def test_threads_follow_the_cpu_limit(cpu: object, threads: str) -> None:
    pod = worker_pod(job_with(resources={"limits": {"cpu": cpu}}), 0, 0, ADDRESS)
    assert environment(pod)["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spec": {"containers": []}}, "containers: name at least one"),
        ({"spec": {}}, "containers: name at least one"),
        ({"spec": "x"}, "spec: must be an object"),
        ({"spec": {"containers": ["x"]}}, r"containers\[0\]: must be an object"),
        ({"spec": {"containers": [{"name": "worker"}]}}, "container 'worker' has no image"),
        ({"spec": {"containers": [{"image": "x", "env": {"A": 1}}]}}, "env: must be a list"),
        ({"spec": {"containers": [{"image": "x", "env": [{"value": "1"}]}]}}, "without a name"),
        ({"spec": {"restartPolicy": "Always", "containers": [{"image": "x"}]}}, "restartPolicy is 'Always'"),
        (
            {"spec": {"containers": [{"image": "x"}], "volumes": [{"name": "springtide-shm"}]}},
            "'springtide-shm' is taken",
        ),
        ({"metadata": {"labels": [1]}, "spec": {"containers": [{"image": "x"}]}}, "metadata.labels"),
    ],
)
def test_what_cannot_be_worked_with_is_said_with_its_place(change: dict[str, Any], says: str) -> None:
    obj = job_object(1)
    obj["spec"]["workers"]["template"] = change
    with pytest.raises(TemplateError, match=says):
        worker_pod(Job.parse(obj), 0, 0, ADDRESS)


def test_the_template_hash_changes_with_the_template_alone() -> None:
    first = template_hash(job_with())
    scaled = job_object(5)
    assert template_hash(Job.parse(scaled)) == first
    assert template_hash(job_with(image="other")) != first


def test_coordinator_is_restricted_and_has_no_api_token() -> None:
    pod = sent(coordinator_pod(job_with(), 4, "registry/op:1"))
    spec = pod["spec"]
    container = spec["containers"][0]
    assert pod["metadata"]["name"] == "digits-coordinator-4"
    assert spec["restartPolicy"] == "Always"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"] == "registry/op:1"
    assert container["command"] == ["python", "-m", "springtide_coordinator"]
    env = environment(pod)
    assert env["SPRINGTIDE_INCARNATION"] == "4"
    assert (env["SPRINGTIDE_TARGET"], env["SPRINGTIDE_MINIMUM"]) == ("3", "1")
    assert env["SPRINGTIDE_STATE_DIR"] == container["volumeMounts"][0]["mountPath"]
    assert "finalizers" not in pod["metadata"]


def coordinator_with(*, heartbeat_seconds: int | None = None, **asked: Any) -> Job:
    obj = job_object(3)
    if heartbeat_seconds is not None:
        obj["spec"]["failurePolicy"]["heartbeatSeconds"] = heartbeat_seconds
    obj["spec"]["workers"]["template"]["spec"] |= {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [DEVICE],
        "priorityClassName": "batch",
    }
    obj["spec"]["coordinator"] = asked
    return Job.parse(obj)


def test_the_coordinator_is_what_the_manifest_asks_for() -> None:
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    job = coordinator_with(
        resources={"requests": {"cpu": 2}, "limits": {"memory": "2Gi"}},
        nodeSelector={"pool": "cpu"},
        tolerations=[{"key": "spot", "operator": "Exists", "effect": None}],
        affinity=affinity,
        priorityClassName="control",
        image="mirror/coordinator:1",
        heartbeat_seconds=10,
    )
    pod = sent(coordinator_pod(job, 1))
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert spec["tolerations"][0] == {"key": "spot", "operator": "Exists"}
    assert [item["key"] for item in spec["tolerations"]][1:] == [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ]
    assert spec["affinity"] == affinity
    assert spec["priorityClassName"] == "control"
    assert container["image"] == "mirror/coordinator:1"
    # The memory's request is its limit, as Kubernetes takes a limit without one.
    assert container["resources"] == {"requests": {"cpu": 2}, "limits": {"memory": "2Gi"}}
    assert environment(pod)["SPRINGTIDE_KEEPALIVE_SECONDS"] == "10"


def test_an_edit_of_the_coordinator_is_another_template() -> None:
    hashes = {
        coordinator_template_hash(coordinator_with(**asked))
        for asked in (
            {},
            {"image": "a"},
            {"resources": {"requests": {"cpu": 1}}},
            {"nodeSelector": {"a": "b"}},
        )
    }
    assert len(hashes) == 4
    beating = coordinator_with(heartbeat_seconds=5)
    assert coordinator_template_hash(beating) == coordinator_template_hash(coordinator_with())


@pytest.mark.parametrize(
    ("workers", "requests", "limit"),
    [
        ({"replicas": 3}, {"cpu": "50m", "memory": "96Mi"}, "512Mi"),
        ({"replicas": 32}, {"cpu": "50m", "memory": "96Mi"}, "512Mi"),
        (
            {"replicas": 2, "maxReplicas": 64, "processesPerPod": 8},
            {"cpu": "530m", "memory": "216Mi"},
            "992Mi",
        ),
        ({"replicas": 1000, "processesPerPod": 8}, {"cpu": "2000m", "memory": "2088Mi"}, "8480Mi"),
    ],
)
def test_the_coordinators_requests_grow_with_the_job(
    workers: dict[str, Any], requests: dict[str, str], limit: str
) -> None:
    obj = job_object(3)
    obj["spec"]["workers"] |= workers
    [container] = sent(coordinator_pod(Job.parse(obj), 1))["spec"]["containers"]
    assert container["resources"] == {"requests": requests, "limits": {"memory": limit}}


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({"limits": {"memory": "64Mi"}}, ({"cpu": "50m"}, {"memory": "64Mi"})),
        ({"requests": {"memory": "1Gi"}}, ({"cpu": "50m", "memory": "1Gi"}, {})),
        ({"limits": {"cpu": "1"}}, ({"memory": "96Mi"}, {"cpu": "1", "memory": "512Mi"})),
    ],
)
def test_no_default_contradicts_what_was_asked_for(
    asked: dict[str, Any], made: tuple[dict[str, str], dict[str, str]]
) -> None:
    [container] = sent(coordinator_pod(coordinator_with(resources=asked), 1))["spec"]["containers"]
    assert (container["resources"]["requests"], container["resources"]["limits"]) == made


def test_the_coordinator_goes_where_workers_go() -> None:
    template = {
        "spec": {
            "imagePullSecrets": [{"name": "pull"}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "nodeSelector": {"pool": "a"},
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "containers": [{"image": "w", "resources": {"limits": {"cpu": 8, "hugepages-2Mi": "4Mi"}}}],
        }
    }
    spec = sent(coordinator_pod(job_with(template), 1))["spec"]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert spec["nodeSelector"] == {"pool": "a"}
    assert spec["priorityClassName"] == "high"
    assert "runtimeClassName" not in spec
    assert {t["key"] for t in spec["tolerations"]} == {
        "gpu",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }


@pytest.mark.parametrize(
    ("more", "tolerated"),
    [
        ({"nodeSelector": {"pool": "gpus"}}, True),
        ({}, False),  # it goes to other nodes
        ({"nodeSelector": {"pool": "gpus"}, "tolerations": [{"key": "nvidia.com/gpu", "value": "a"}]}, False),
    ],
    ids=["led there", "free", "the template says how"],
)
def test_coordinator_led_to_device_nodes_tolerates_their_taint(more: dict[str, Any], tolerated: bool) -> None:
    """Clouds let pods that ask for a device pass; the coordinator asks for none."""
    resources = {"limits": {"nvidia.com/gpu": 8, "cpu": 4}, "requests": {"rdma/hca": 1}}
    template = {"spec": {**more, "containers": [{"image": "w", "resources": resources}]}}
    spec = sent(coordinator_pod(job_with(template), 1))["spec"]
    passes = [t for t in spec["tolerations"] if t == DEVICE]
    assert passes == ([DEVICE] if tolerated else [])
    assert any(t["key"] == "rdma/hca" for t in spec["tolerations"]) is ("nodeSelector" in more)


def test_the_service_selects_one_incarnation() -> None:
    made = sent(service(job_with(), 4))
    assert made["metadata"]["name"] == "digits-coordinator"
    assert made["spec"]["selector"] == {
        "springtide.dev/job": "digits",
        "springtide.dev/role": "coordinator",
        "springtide.dev/incarnation": "4",
    }
    labels = coordinator_pod(job_with(), 4)["metadata"]["labels"]
    assert made["spec"]["selector"].items() <= labels.items()
    assert made["spec"]["publishNotReadyAddresses"] is True
    assert "clusterIP" not in made["spec"]
    assert service(job_with(), 4, "10.9.8.7")["spec"]["clusterIP"] == "10.9.8.7"


def test_tokens_differ_by_job_by_key_and_by_turn() -> None:
    made = [JobCredentials(*one) for one in product((b"k" * 16, b"l" * 16), ("a", "b"), ("", "again"))]
    for what in ("key", "token", "operator_token"):
        assert len({getattr(one, what) for one in made}) == len(made)
    assert len({one.token for one in made} | {one.operator_token for one in made}) == 2 * len(made)
    assert JobCredentials(b"k" * 16, "a").token == JobCredentials(b"k" * 16, "a").token


def test_secret_of_a_key_has_its_name() -> None:
    made = sent(secret(job_with(), {"token": "abc"}))
    assert base64.b64decode(made["data"]["token"]) == b"abc"
    assert made["metadata"]["name"] == names.secret_name("digits", "job-uid-1234")
