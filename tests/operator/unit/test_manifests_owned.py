"""Fields that the operator sets are refused in templates by name; those that users may set go through."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from operator_world import World, job_object

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.coordinator import coordinator_pod, service
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.protection import Doors, network_policy, server_disruption_budget
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod

Object = dict[str, Any]

# Whatever the job is like; CI and users rely on the others.
FOR_USERS = [
    "SPRINGTIDE_STEP_LOG",
    "SPRINGTIDE_FAULT",
    "SPRINGTIDE_COLLECTIVE_SECONDS",
    "SPRINGTIDE_CONNECT_SECONDS",
    "SPRINGTIDE_MINE",
    "MKL_CBWR",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
]


def raw(**spec: Any) -> Object:
    obj = job_object(2)
    obj["spec"] |= spec
    return obj


def on_servers(template: Object | None = None, **parameter_server: Any) -> Object:
    strategy = {"type": "ParameterServer", "parameterServer": parameter_server}
    servers = {"replicas": 2} | ({"template": template} if template else {})
    return raw(strategy=strategy, parameterServers=servers)


def with_variable(obj: Object, name: str) -> Job:
    obj = copy.deepcopy(obj)
    obj["spec"]["workers"]["template"]["spec"]["containers"][0]["env"] = [{"name": name, "value": "7"}]
    return Job.parse(obj)


def variables(pod: Object) -> dict[str, str]:
    return {e["name"]: e.get("value", "") for e in pod["spec"]["containers"][0]["env"]}


RICH = [
    raw(),
    raw(security={"tls": True}, checkpoint={"uri": "/c"}, failurePolicy={"hangTimeoutSeconds": 5000}),
    raw(strategy={"type": "AllReduce", "allReduce": {"exact": True, "logicalWorkers": 8}}),
    on_servers(compression="TopK"),
    raw(strategy={"type": "AllReduce", "allReduce": {"shard": "Optimizer"}}),
]


@pytest.mark.parametrize("obj", RICH, ids=["plain", "rich", "exact", "servers", "sharded"])
def test_every_variable_that_the_operator_writes_is_refused(obj: Object) -> None:
    written = variables(worker_pod(Job.parse(obj), 0, 0, "a:1"))
    assert len(written) > 10
    for name in written:
        if name == "OMP_NUM_THREADS":
            continue  # a default that a template may replace
        with pytest.raises(TemplateError, match=rf"env of 'worker' has {name}, which the operator sets"):
            worker_pod(with_variable(obj, name), 0, 0, "a:1")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("SPRINGTIDE_COMPRESSION", r"strategy\.allReduce\.compression"),
        ("SPRINGTIDE_BALANCE", r"elasticity\.balance"),
        ("SPRINGTIDE_SHARD", r"strategy\.allReduce\.shard"),
        ("SPRINGTIDE_CHECKPOINT_URI", r"spec\.checkpoint\.uri"),
        ("SPRINGTIDE_PROCESSES", r"workers\.processesPerPod"),
        ("SPRINGTIDE_TERMINATION_LOG", "terminationMessagePath"),
        ("SPRINGTIDE_GRACE_SECONDS", "terminationGracePeriodSeconds"),
    ],
)
def test_dedicated_field_is_named_although_the_job_sets_it_not(name: str, field: str) -> None:
    with pytest.raises(TemplateError, match=rf"take it out; .*{field}.* is for that"):
        worker_pod(with_variable(raw(), name), 0, 0, "a:1")


@pytest.mark.parametrize("name", FOR_USERS)
def test_what_users_may_set_goes_through(name: str) -> None:
    assert variables(worker_pod(with_variable(raw(), name), 0, 0, "a:1"))[name] == "7"


@pytest.mark.parametrize("name", ["SPRINGTIDE_COLLECTIVE_SECONDS", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"])
def test_what_operator_writes_in_some_jobs_is_refused_in_those(name: str) -> None:
    obj = raw(
        strategy={"type": "AllReduce", "allReduce": {"exact": True, "logicalWorkers": 8}},
        failurePolicy={"hangTimeoutSeconds": 5000},
    )
    with pytest.raises(TemplateError, match="is for that"):
        worker_pod(with_variable(obj, name), 0, 0, "a:1")


def test_other_containers_set_what_they_like() -> None:
    obj = raw()
    helper = {"name": "helper", "image": "h", "env": [{"name": "SPRINGTIDE_ROLE", "value": "none"}]}
    obj["spec"]["workers"]["template"]["spec"]["containers"].append(helper)
    assert worker_pod(Job.parse(obj), 0, 0, "a:1")["spec"]["containers"][1] == helper


def test_a_servers_template_is_held_to_the_same() -> None:
    def template(name: str) -> Object:
        return {"spec": {"containers": [{"name": "server", "env": [{"name": name, "value": "7"}]}]}}

    written = variables(server_pod(Job.parse(on_servers()), 0, 0, "a:1"))
    for name in written:
        with pytest.raises(TemplateError, match=rf"parameterServers.*env of 'server' has {name}, which"):
            server_pod(Job.parse(on_servers(template(name))), 0, 0, "a:1")
    free = server_pod(Job.parse(on_servers(template("SPRINGTIDE_PS_THREADS"))), 0, 0, "a:1")
    assert variables(free)["SPRINGTIDE_PS_THREADS"] == "7"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"labels": {"springtide.dev/slot": "0"}}, "labels has springtide.dev/slot: names that begin with"),
        ({"labels": {"springtide.dev/mine": "x"}}, "labels has springtide.dev/mine"),
        ({"annotations": {"springtide.dev/deleted-because": "x"}}, "annotations has springtide.dev/deleted"),
    ],
)
def test_our_labels_and_annotations_are_refused_everywhere(metadata: Object, said: str) -> None:
    obj = raw()
    obj["spec"]["workers"]["template"]["metadata"] = metadata
    with pytest.raises(TemplateError, match=rf"spec\.workers\.template\.metadata\.{said}"):
        worker_pod(Job.parse(obj), 0, 0, "a:1")
    with pytest.raises(TemplateError, match=rf"spec\.podMetadata\.{said}"):
        worker_pod(Job.parse(raw(podMetadata=metadata)), 0, 0, "a:1")
    with pytest.raises(TemplateError, match=rf"spec\.parameterServers\.template\.metadata\.{said}"):
        server_pod(Job.parse(on_servers({"metadata": metadata})), 0, 0, "a:1")


def test_the_users_own_labels_and_annotations_go_through() -> None:
    labels = {"app.kubernetes.io/name": "shop", "app.kubernetes.io/managed-by": "Helm", "team": "a"}
    annotations = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "note": "b"}
    obj = raw(podMetadata={"labels": {"cost": "c"}})
    obj["spec"]["workers"]["template"]["metadata"] = {"labels": labels, "annotations": annotations}
    meta = worker_pod(Job.parse(obj), 0, 0, "a:1")["metadata"]
    assert {**labels, "cost": "c"}.items() <= meta["labels"].items()
    assert annotations.items() <= meta["annotations"].items()


def test_selectors_find_pods_whatever_users_call_their_app() -> None:
    labels = {"app.kubernetes.io/name": "shop", "app.kubernetes.io/managed-by": "Helm"}
    obj = on_servers()
    obj["spec"]["podMetadata"] = {"labels": labels}
    job = Job.parse(obj)
    worker, server = worker_pod(job, 0, 0, "a:1"), server_pod(job, 0, 0, "a:1")
    coordinator = coordinator_pod(job, 1)
    pods = [worker, server, coordinator]
    assert all(labels.items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert all(names.OURS in pod["metadata"]["labels"] for pod in pods)

    def found(selector: Object) -> list[Object]:
        return [pod for pod in pods if selector.items() <= pod["metadata"]["labels"].items()]

    policy = network_policy(job, Doors("springtide-system"))["spec"]
    assert found(policy["podSelector"]["matchLabels"]) == pods
    assert found(service(job, 1)["spec"]["selector"]) == [coordinator]
    assert found(server_disruption_budget(job, 2)["spec"]["selector"]["matchLabels"]) == [server]
    by_scale = dict(pair.split("=") for pair in names.worker_selector(job.name).split(","))
    assert found(by_scale) == [worker]


def test_kubectl_logs_means_our_container_unless_user_says_so() -> None:
    obj = on_servers()
    containers = obj["spec"]["workers"]["template"]["spec"]["containers"]
    containers[0]["name"] = "train"
    containers.append({"name": "helper", "image": "h"})
    job = Job.parse(obj)
    pods = [worker_pod(job, 0, 0, "a:1"), server_pod(job, 0, 0, "a:1"), coordinator_pod(job, 1)]
    for pod, name in zip(pods, ("train", "server", "coordinator"), strict=True):
        assert pod["metadata"]["annotations"][names.ANNOTATION_DEFAULT_CONTAINER] == name
        own = next(c for c in pod["spec"]["containers"] if c["name"] == name)
        assert names.TOKEN in {entry["name"] for entry in own["env"]}
    obj["spec"]["workers"]["template"]["metadata"] = {
        "annotations": {names.ANNOTATION_DEFAULT_CONTAINER: "helper"}
    }
    said = worker_pod(Job.parse(obj), 0, 0, "a:1")["metadata"]["annotations"]
    assert said[names.ANNOTATION_DEFAULT_CONTAINER] == "helper"


def test_the_job_fails_at_once_and_says_which() -> None:
    world = World(job=raw())
    container = world.job["spec"]["workers"]["template"]["spec"]["containers"][0]
    container["env"] = [{"name": "SPRINGTIDE_COMPRESSION", "value": "BF16"}]
    world.round()
    failed = next(c for c in world.status["conditions"] if c["type"] == reasons.FAILED)
    assert (failed["status"], failed["reason"]) == ("True", reasons.INVALID_TEMPLATE)
    assert "env of 'worker' has SPRINGTIDE_COMPRESSION" in failed["message"]
    assert "spec.strategy.allReduce.compression" in failed["message"]
    assert world.pods == {}
