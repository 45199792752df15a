"""Defaults for the pods of all jobs fill in, never override, and cannot touch what the operator decides."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from chart_podsecurity import restricted_violations
from chart_render import KUBERNETES_VERSIONS, schema_errors

from springtide_operator.api.job import Job
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.defaults import PodDefaults, with_defaults
from springtide_operator.manifests.maker import ManifestMaker
from springtide_operator.manifests.worker import worker_pod

MANY = PodDefaults.parse(
    json.dumps(
        {
            "metadata": {"labels": {"team": "ml"}, "annotations": {"a": "default"}},
            "spec": {
                "imagePullSecrets": [{"name": "mirror"}],
                "priorityClassName": "training",
                "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                "nodeSelector": {"pool": "default", "disk": "ssd"},
                "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "Localhost"}},
                "volumes": [{"name": "cache", "emptyDir": {}}],
            },
            "container": {
                "env": [{"name": "TZ", "value": "UTC"}, {"name": "LANG", "value": "C"}],
                "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
            },
        }
    )
)


def job(**spec: Any) -> Job:
    containers = [
        {"name": "sidecar", "image": "s"},
        {"name": "worker", "image": "w", "env": [{"name": "TZ", "value": "CET"}]},
    ]
    template = {"metadata": {"annotations": {"a": "own"}}, "spec": {"containers": containers, **spec}}
    return Job.parse(
        {
            "metadata": {"name": "j", "namespace": "n", "uid": "12345678"},
            "spec": {"workers": {"template": template}},
        }
    )


def worker(defaults: PodDefaults = MANY, **spec: Any) -> dict[str, Any]:
    return with_defaults(worker_pod(job(**spec), 0, 0, "10.0.0.1:7070"), defaults, "worker")


def test_pods_go_to_linux_unless_they_choose() -> None:
    made = ManifestMaker(partial(JobCredentials.of, b"k" * 16), "img")
    for pod in (
        made.worker(job(), 0, 0, "a:1"),
        made.coordinator(job(), 1),
        made.server(job(), 0, 0, "a:1"),
        made.worker(job(nodeSelector={"pool": "own"}), 0, 0, "a:1"),
    ):
        assert pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
    chosen = made.worker(job(nodeSelector={"kubernetes.io/os": "other"}), 0, 0, "a:1")
    assert chosen["spec"]["nodeSelector"] == {"kubernetes.io/os": "other"}


def test_silence_is_filled() -> None:
    pod = worker()
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert pod["spec"]["priorityClassName"] == "training"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "mirror"}]
    assert pod["spec"]["nodeSelector"] == {"pool": "default", "disk": "ssd"}
    assert {"name": "LANG", "value": "C"} in pod["spec"]["containers"][1]["env"]


def test_what_the_template_says_stays() -> None:
    pod = worker(
        priorityClassName="own",
        nodeSelector={"pool": "own"},
        tolerations=[{"key": "x", "operator": "Exists"}, {"key": "dedicated", "operator": "Exists"}],
    )
    assert pod["metadata"]["annotations"]["a"] == "own"
    assert pod["spec"]["priorityClassName"] == "own"
    assert pod["spec"]["nodeSelector"] == {"pool": "own", "disk": "ssd"}
    assert [t["key"] for t in pod["spec"]["tolerations"]] == ["x", "dedicated"]
    zones = [entry["value"] for entry in pod["spec"]["containers"][1]["env"] if entry["name"] == "TZ"]
    assert zones == ["CET"]
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_other_containers_are_left_alone() -> None:
    assert worker()["spec"]["containers"][0] == worker_pod(job(), 0, 0, "a:1")["spec"]["containers"][0]


def test_without_defaults_nothing_changes() -> None:
    assert worker(PodDefaults()) == worker_pod(job(), 0, 0, "10.0.0.1:7070")


def test_coordinators_get_them_and_stay_restricted() -> None:
    before = coordinator_pod(job(), 3)
    pod = with_defaults(before, MANY, "coordinator")
    assert pod["spec"]["priorityClassName"] == "training"
    assert {"key": "dedicated", "operator": "Exists"} in pod["spec"]["tolerations"]
    assert pod["spec"]["containers"][0]["command"] == before["spec"]["containers"][0]["command"]
    assert restricted_violations(pod["spec"]) == []
    for version in KUBERNETES_VERSIONS:
        assert schema_errors(pod, version) == []


def test_defaults_can_make_a_plain_template_restricted() -> None:
    container = {"name": "worker", "image": "w"}
    assert restricted_violations(worker(PodDefaults(), containers=[container])["spec"]) != []
    assert restricted_violations(worker(containers=[container])["spec"]) == []


def test_pods_do_not_share_what_was_filled_in() -> None:
    one, two = worker(), worker()
    one["spec"]["volumes"][-1]["emptyDir"]["medium"] = "Memory"
    assert two["spec"]["volumes"][-1]["emptyDir"] == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[]", "must be an object"),
        ("{", "is not JSON"),
        ('{"pod": {}}', "has no part 'pod'"),
        ('{"spec": []}', "spec must be an object"),
        ('{"spec": {"containers": []}}', r"spec\.containers cannot have a default"),
        ('{"container": {"command": []}}', r"container\.command cannot have a default"),
        ('{"metadata": {"labels": {"springtide.dev/job": "x"}}}', "the operator's own"),
        ('{"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}', "the operator's own"),
    ],
)
def test_what_cannot_have_a_default_is_refused(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PodDefaults.parse(given)
