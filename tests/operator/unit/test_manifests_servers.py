"""The pod of a parameter server: what it is given, what it takes from workers, what a template may say."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from chart_podsecurity import restricted_violations
from operator_world import job_object

from springtide.settings import read_settings
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests import kueue
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.protection import server_disruption_budget
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import TemplateError, worker_pod
from springtide_operator.plan import gang


def job(
    template: dict[str, Any] | None = None, workers: dict[str, Any] | None = None, **strategy: Any
) -> Job:
    obj = job_object()
    obj["spec"] |= {"strategy": {"type": "ParameterServer", **strategy}, "parameterServers": {"replicas": 2}}
    if template is not None:
        obj["spec"]["parameterServers"]["template"] = template
    obj["spec"]["workers"]["template"]["spec"] |= workers or {}
    return Job.parse(obj)


def environment(pod: dict[str, Any]) -> dict[str, Any]:
    container = next(c for c in pod["spec"]["containers"] if c["name"] in ("server", "worker", "coordinator"))
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_the_pod_is_valid_restricted_and_knows_its_place() -> None:
    pod = server_pod(job(), 1, 3, "10.0.0.1:7070")
    kubernetes_validate.validate(pod, "1.31", strict=True)
    assert restricted_violations(pod["spec"]) == []
    assert pod["metadata"]["name"] == "digits-ps-1-3"
    assert names.parse_server_name("digits-ps-1-3") == (1, 3)
    assert names.parse_server_name("digits-worker-1-3") is None
    assert pod["spec"]["restartPolicy"] == "Always"
    assert pod["spec"]["automountServiceAccountToken"] is False
    env = environment(pod)
    assert env["SPRINGTIDE_COORDINATOR"] == "10.0.0.1:7070"
    assert (env["SPRINGTIDE_SLOT"], env["SPRINGTIDE_ATTEMPT"]) == ("1", "3")
    assert env["SPRINGTIDE_ROLE"] == "parameter-server"
    assert env["SPRINGTIDE_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert env["SPRINGTIDE_TOKEN"]["secretKeyRef"]["key"] == "token"
    container = pod["spec"]["containers"][0]
    assert container["image"] == "springtide/ps:0.1.0"
    assert container["command"] == ["python", "-m", "springtide_ps"]
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {
        "parameters": 7080,
        "metrics": 9402,
    }
    spread = pod["spec"]["topologySpreadConstraints"][0]
    assert spread["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    budget = server_disruption_budget(job(), 2)
    assert budget["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_it_is_scheduled_where_workers_are_unless_told_otherwise() -> None:
    workers = {
        "nodeSelector": {"pool": "train"},
        "imagePullSecrets": [{"name": "mirror"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
    }
    spec = server_pod(job(workers=workers), 0, 0, "")["spec"]
    assert spec["nodeSelector"] == {"pool": "train"}
    assert spec["priorityClassName"] == "high"
    assert spec["imagePullSecrets"] == [{"name": "mirror"}]
    assert {toleration["key"] for toleration in spec["tolerations"]} == {
        "gpu",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    }
    gpus = {**workers, "containers": [{"image": "w", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}
    device = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert device in server_pod(job(workers=gpus), 0, 0, "")["spec"]["tolerations"]
    elsewhere = {"spec": {"nodeSelector": {"pool": "memory"}}}
    assert device not in server_pod(job(elsewhere, gpus), 0, 0, "")["spec"]["tolerations"]
    own = {"spec": {"nodeSelector": {"pool": "memory"}, "tolerations": []}}
    spec = server_pod(job(own, workers), 0, 0, "")["spec"]
    assert spec["nodeSelector"] == {"pool": "memory"}
    assert len(spec["tolerations"]) == 2
    assert spec["priorityClassName"] == "high"


def test_a_template_adds_what_it_names() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
        "spec": {
            "terminationGracePeriodSeconds": 90,
            "containers": [
                {"name": "helper", "image": "h"},
                {
                    "name": "server",
                    "image": "mine",
                    "resources": {"limits": {"memory": "8Gi"}},
                    "env": [
                        {"name": "SPRINGTIDE_PS_THREADS", "value": "4"},
                    ],
                },
            ],
        },
    }
    pod = server_pod(job(template), 2, 0, "a:1", image="other")
    helper, server = pod["spec"]["containers"]
    assert helper == {"name": "helper", "image": "h"}
    assert server["image"] == "mine"
    assert server["resources"] == {"limits": {"memory": "8Gi"}}
    assert environment(pod)["SPRINGTIDE_PS_THREADS"] == "4"
    assert environment(pod)["SPRINGTIDE_SLOT"] == "2"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"]["note"] == "b"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 90
    assert environment(pod)["SPRINGTIDE_PS_LEAVE_SECONDS"] == "85"
    unnamed = {"spec": {"containers": [{"resources": {"requests": {"cpu": "2"}}}]}}
    assert server_pod(job(unnamed), 0, 0, "a:1", image="other")["spec"]["containers"][0]["image"] == "other"


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"restartPolicy": "Never"}, "restartPolicy is 'Never'"),
        ({"containers": "no"}, "containers: must be a list, not a string"),
        ({"containers": [{"env": []}, 1]}, "containers[1]: must be an object"),
        ({"containers": [{"env": {"a": 1}}]}, "containers[0].env: must be a list"),
        ({"containers": [{"env": [{"value": "x"}]}]}, "an entry without a name"),
        ({"tolerations": {"key": "x"}}, "tolerations: must be a list"),
        ({"terminationGracePeriodSeconds": "long"}, "terminationGracePeriodSeconds: must be a whole number"),
        ({"securityContext": []}, ""),
        ({"securityContext": [1]}, "securityContext: must be an object"),
    ],
)
def test_a_template_that_cannot_be_read_is_named(spec: dict[str, Any], text: str) -> None:
    if not text:
        server_pod(job({"spec": {key: value or {} for key, value in spec.items()}}), 0, 0, "")
        return
    with pytest.raises(TemplateError, match=r"spec\.parameterServers\.template") as caught:
        server_pod(job({"spec": spec}), 0, 0, "")
    assert text in str(caught.value)


def test_workers_and_the_coordinator_are_told_of_the_strategy() -> None:
    env = environment(worker_pod(job(parameterServer={"replication": 2}), 0, 0, ""))
    assert (env["SPRINGTIDE_STRATEGY"], env["SPRINGTIDE_REPLICATION"]) == ("ParameterServer", "2")
    assert (env["SPRINGTIDE_CONSISTENCY"], env["SPRINGTIDE_STALENESS"]) == ("Synchronous", "4")
    bounded = {"consistency": "BoundedStaleness", "staleness": 2}
    env = environment(worker_pod(job(parameterServer=bounded), 0, 0, ""))
    assert (env["SPRINGTIDE_CONSISTENCY"], env["SPRINGTIDE_STALENESS"]) == ("BoundedStaleness", "2")
    assert "SPRINGTIDE_GROUP_SIZE" not in env
    spec = job().spec
    teams = spec.model_copy(update={"workers": spec.workers.model_copy(update={"group_size": 2})})
    env = environment(worker_pod(dataclasses.replace(job(), spec=teams), 0, 0, ""))
    assert env["SPRINGTIDE_GROUP_SIZE"] == "2"
    assert environment(coordinator_pod(job(), 1))["SPRINGTIDE_SERVERS"] == "2"
    env = environment(coordinator_pod(job(parameterServer=bounded), 1))
    assert (env["SPRINGTIDE_CONSISTENCY"], env["SPRINGTIDE_STALENESS"]) == ("BoundedStaleness", "2")
    plain = Job.parse(job_object())
    env = environment(worker_pod(plain, 0, 0, ""))
    assert env["SPRINGTIDE_STRATEGY"] == "AllReduce"
    assert "SPRINGTIDE_REPLICATION" not in env
    assert environment(coordinator_pod(plain, 1))["SPRINGTIDE_SERVERS"] == "0"
    assert plain.spec.servers == 0


@pytest.mark.parametrize("wanted", [True, False])
def test_workers_ask_for_early_values_unless_the_job_says_no(wanted: bool) -> None:
    found = environment(worker_pod(job(parameterServer={"earlyValues": wanted}), 0, 0, ""))
    told = {name: value for name, value in found.items() if name == "SPRINGTIDE_EARLY_VALUES"}
    assert read_settings(told).early_values is wanted


def test_one_server_where_the_number_is_not_said() -> None:
    obj = job_object()
    obj["spec"]["strategy"] = {"type": "ParameterServer"}
    assert Job.parse(obj).spec.servers == 1


def test_gang_and_queue_count_the_servers() -> None:
    asked = job()
    pods = kueue.JobPods(worker_pod(asked, 0, 0, ""), coordinator_pod(asked, 1), server_pod(asked, 0, 0, ""))
    spec = kueue.workload(asked, pods, kueue.Ask(names.KUEUE_V1BETA2))["spec"]
    assert [(one["name"], one["count"]) for one in spec["podSets"]] == [
        ("coordinator", 1),
        ("workers", 3),
        ("parameter-servers", 2),
    ]
    assert gang.members(asked) == 1 + 1 + 2
    placed = {"queue": {"podSets": {"parameter-servers": {"nodeSelector": {"flavor": "spot"}}}}}
    assert server_pod(replace(asked, status=placed), 0, 0, "")["spec"]["nodeSelector"] == {"flavor": "spot"}
    assert kueue.workload_version(asked) != kueue.workload_version(Job.parse(job_object()))
