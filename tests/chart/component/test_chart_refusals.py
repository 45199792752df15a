"""Values that cannot work are refused with a message that says what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_render import CHART, MONITORING, HelmError, render, render_notes

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replica": 2}, "Additional property replica is not allowed"),
    ({"image": {"tags": "x"}}, "Additional property tags is not allowed"),
    ({"metrics": {"podMonitor": {"enable": True}}}, "Additional property enable is not allowed"),
    ({"replicas": 0}, "replicas: Must be greater than or equal to 1"),
    ({"replicas": "2"}, "replicas: Invalid type"),
    ({"logLevel": "loud"}, "logLevel"),
    ({"image": {"digest": "sha256:12"}}, "image.digest"),
    ({"image": {"digest": "sha256:" + "1" * 64, "tag": "1"}}, "image.tag and image.digest are both given"),
    ({"image": {"repository": "a/b:1"}}, "image.repository"),
    ({"imagePullSecrets": ["name"]}, "imagePullSecrets.0"),
    ({"commonLabels": {"app.kubernetes.io/name": "x"}}, "commonLabels"),
    ({"watchNamespaces": ["a", "a"]}, "watchNamespaces names a namespace twice"),
    ({"watchNamespaces": ["A"]}, "watchNamespaces.0"),
    (
        {"watchNamespaces": ["a"], "helmTest": {"namespace": "b"}},
        "helmTest.namespace is b, but the operator watches only a",
    ),
    ({"serviceAccount": {"create": False}}, "name the service account that the operator shall use"),
    (
        {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
        "needs metrics.service.enabled",
    ),
    ({"metrics": {"serviceMonitor": {"enabled": True, "interval": "15"}}}, "metrics.serviceMonitor.interval"),
    ({"podDisruptionBudget": {"maxUnavailable": "half"}}, "podDisruptionBudget.maxUnavailable"),
    ({"jobPods": {"spec": {"containers": []}}}, "jobPods.spec"),
    ({"jobPods": {"container": {"image": "x"}}}, "jobPods.container"),
    ({"jobPods": {"metadata": {"labels": {"springtide.dev/job": "x"}}}}, "jobPods.metadata.labels"),
    ({"fullnameOverride": "1st"}, "a Service's name must begin with a letter"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render(values, api_versions=MONITORING)
    assert message in str(refusal.value)


@pytest.mark.parametrize("key", ["serviceMonitor", "podMonitor", "prometheusRule"])
def test_monitoring_without_its_api_is_refused(key: str) -> None:
    with pytest.raises(HelmError) as refusal:
        render({"metrics": {key: {"enabled": True}}})
    text = str(refusal.value)
    assert f"metrics.{key}.enabled" in text
    assert "install the Prometheus operator first" in text


def test_every_level_of_the_schema_refuses_unknown_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def open_levels(node: dict[str, Any], path: str) -> list[str]:
        result = [] if node.get("additionalProperties") is False or "properties" not in node else [path]
        for name, child in node.get("properties", {}).items():
            result += open_levels(child, f"{path}.{name}")
        return result

    assert open_levels(schema, "values") == []


def test_schema_and_values_name_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def differences(node: dict[str, Any], value: Any, path: str) -> list[str]:
        if "properties" not in node or not value:
            return []
        known, given = set(node["properties"]) - {"global", "claims"}, set(value)
        result = [f"{path}.{name}" for name in known ^ given]
        for name in known & given:
            result += differences(node["properties"][name], value[name], f"{path}.{name}")
        return result

    assert differences(schema, values, "values") == []


def test_notes_name_what_is_installed(tmp_path: Path) -> None:
    notes = render_notes(tmp_path)
    assert "kubectl -n springtide-system rollout status deployment/springtide-operator" in notes
    assert "helm test springtide -n springtide-system" in notes
    assert "service/springtide-operator-metrics 9402" in notes
    assert "kubectl get stj --all-namespaces" in notes
    off = {
        "watchNamespaces": ["lab"],
        "helmTest": {"enabled": False},
        "metrics": {"service": {"enabled": False}},
    }
    named = render_notes(tmp_path, off, release="r")
    assert "kubectl get stj -n lab" in named
    assert "deployment/r-springtide-operator" in named
    assert "helm test" not in named
    assert "port-forward" not in named
