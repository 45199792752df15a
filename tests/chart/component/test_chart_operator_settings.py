"""Variables that the chart writes into the operator's environment: the operator reads the same ones."""

from __future__ import annotations

from typing import Any

import pytest
from chart_render import pick, render

from springtide_operator.cluster import KubeCluster
from springtide_operator.guarded_http import Page
from springtide_operator.kube import Kube
from springtide_operator.manifests.defaults import PodDefaults
from springtide_operator.manifests.protection import Doors
from springtide_operator.settings import BadEnvironmentError, Settings, read_settings

FIELDS = {"metadata.namespace": "ns", "metadata.name": "pod-1", "metadata.uid": "u1"}


def settings_of(values: dict[str, Any]) -> Settings:
    """Settings of an operator that the chart started."""
    entries = pick(render(values), "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    return read_settings(
        {
            e["name"]: e["value"] if "value" in e else FIELDS[e["valueFrom"]["fieldRef"]["fieldPath"]]
            for e in entries
        }
    )


def test_defaults_arrive() -> None:
    found = settings_of({})
    assert (found.namespace, found.identity) == ("ns", "pod-1_u1")
    assert found.coordinator_image == "springtide/operator:0.1.0"
    assert found.server_image == "springtide/ps:0.1.0"
    assert (found.watched, found.log_level) == ((), "INFO")
    assert found.coordinator_pull_policy == "IfNotPresent"
    assert found.doors == Doors("ns")
    assert not found.jobs_tls
    assert found.certificate_seconds == 90 * 86_400
    assert (found.release, found.managed_by) == ("springtide", "springtide.dev/operator")


def test_defaults_of_job_pods_arrive() -> None:
    assert settings_of({}).pod_defaults == PodDefaults()
    given = {"spec": {"priorityClassName": "high"}, "metadata": {"labels": {"a": "b"}}}
    assert settings_of({"jobPods": given}).pod_defaults == PodDefaults(**given)


def test_tracing_arrives_and_reaches_pods_of_jobs() -> None:
    tracing = {"endpoint": "http://collector:4317", "protocol": "grpc", "ratio": 0.5}
    given = {"container": {"env": [{"name": "TZ", "value": "UTC"}]}}
    env = settings_of({"tracing": tracing, "jobPods": given}).pod_defaults.container["env"]
    assert {entry["name"]: entry["value"] for entry in env} == {
        "TZ": "UTC",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
    }
    assert settings_of({"tracing": {**tracing, "jobs": False}}).pod_defaults == PodDefaults()
    assert settings_of({"tracing": None}).pod_defaults == PodDefaults()  # --reuse-values of an older release


@pytest.mark.slow
def test_switches_arrive() -> None:
    image = {"registry": "r.example.com", "digest": "sha256:" + "3" * 64, "pullPolicy": "Always"}
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    values = {"watchNamespaces": ["a", "b-1"], "logLevel": "warning", "image": image}
    found = settings_of({**values, "networkPolicy": {"metricsFrom": [peer]}})
    assert found.coordinator_pull_policy == "Always"
    assert found.doors == Doors("ns", (peer,))
    assert settings_of({"networkPolicy": {"jobs": False}}).doors is None
    assert settings_of({"jobs": {"tls": True}}).jobs_tls
    assert settings_of({"jobs": {"managedBy": "example.com/lab"}}).managed_by == "example.com/lab"
    assert not settings_of({"jobs": None}).jobs_tls  # as from --reuse-values of an older release
    assert found.watched == ("a", "b-1")
    assert found.log_level == "WARNING"
    assert found.coordinator_image == "r.example.com/springtide/operator@sha256:" + "3" * 64
    assert found.server_image == "r.example.com/springtide/ps:0.1.0"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("SPRINGTIDE_WATCH_NAMESPACES", "a,A"),
        ("SPRINGTIDE_WATCH_NAMESPACES", "a,a"),
        ("SPRINGTIDE_LOG_LEVEL", "loud"),
        ("SPRINGTIDE_JOBS_TLS", "yes"),
        ("SPRINGTIDE_TRACE_JOBS", "no"),
        ("SPRINGTIDE_CERTIFICATE_SECONDS", "29"),
        ("SPRINGTIDE_POD_DEFAULTS", "{"),
        ("SPRINGTIDE_COORDINATOR_PULL_POLICY", "Sometimes"),
        ("SPRINGTIDE_NETWORK_POLICY", "["),
        ("SPRINGTIDE_NETWORK_POLICY", '{"metricsTo": []}'),
        ("SPRINGTIDE_NETWORK_POLICY", '{"metricsFrom": [{"namespace": "a"}]}'),
        ("SPRINGTIDE_NETWORK_POLICY", '{"metricsFrom": {"a": 1}}'),
    ],
)
def test_wrong_environment_is_named(variable: str, text: str) -> None:
    with pytest.raises(BadEnvironmentError, match=f"{variable} is"):
        read_settings({variable: text})


class Answers(Kube):
    """Lists of two namespaces, and every path that was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    async def page(self, path: str, *_: Any) -> Page:
        self.paths.append(path)
        item = {"metadata": {"name": path.split("/")[-2]}}
        return Page([item], {"metadata": {"resourceVersion": "7" if "/a/" in path else "12"}})


async def test_watched_namespaces_are_listed_one_by_one() -> None:
    answers = Answers()
    items, version = await KubeCluster(answers, ("b", "a")).list_waiting_pods()
    assert answers.paths == ["/api/v1/namespaces/b/pods", "/api/v1/namespaces/a/pods"]
    assert [item["metadata"]["name"] for item in items] == ["b", "a"]
    # An object that both lists lack and that is older than either is gone; a younger one may just be new.
    assert version == "7"


async def test_without_names_one_list_is_enough() -> None:
    answers = Answers()
    await KubeCluster(answers).list_waiting_pods()
    assert answers.paths == ["/api/v1/pods"]
