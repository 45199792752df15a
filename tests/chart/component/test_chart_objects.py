"""Objects of the chart over a matrix of value files: right by Kubernetes' schemas and by our promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_podsecurity import restricted_violations
from chart_render import (
    CHART,
    KUBERNETES_VERSIONS,
    MONITORING,
    ROOT,
    VALUE_FILES,
    Object,
    helm,
    kinds,
    parse,
    pick,
    render,
    schema_errors,
)

from springtide_operator.api import names
from springtide_operator.api.crd import DEFINITIONS

EACH_FILE = pytest.mark.parametrize("file", VALUE_FILES, ids=[file.stem for file in VALUE_FILES])
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "FlowSchema",
    "PriorityClass",
}
MONITORING_KINDS = {name.rpartition("/")[2] for name in MONITORING}


def selects(labels: dict[str, str], selector: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_lint_is_clean() -> None:
    for file in VALUE_FILES:
        helm("lint", "--strict", str(CHART), "--values", str(file))


@pytest.mark.slow
@EACH_FILE
def test_objects_follow_the_schemas(file: Path) -> None:
    objects = render(file=file, api_versions=MONITORING)
    for obj in objects:
        if obj["kind"] in MONITORING_KINDS:
            continue
        for version in KUBERNETES_VERSIONS:
            assert schema_errors(obj, version) == [], (obj["kind"], obj["metadata"]["name"], version)


@EACH_FILE
def test_objects_say_where_they_belong(file: Path) -> None:
    for obj in render(file=file, api_versions=MONITORING):
        meta = obj["metadata"]
        if obj["kind"] in CLUSTER_SCOPED:
            assert "namespace" not in meta, obj["kind"]
        else:
            assert meta.get("namespace"), (obj["kind"], meta["name"])
        assert len(meta["name"]) <= 63


@EACH_FILE
def test_pods_meet_restricted(file: Path) -> None:
    objects = render(file=file, api_versions=MONITORING)
    specs = [pick(objects, "Deployment")["spec"]["template"]["spec"]]
    if "Pod" in kinds(objects):
        hook = pick(objects, "Pod")["spec"]
        job = yaml.safe_load(
            next(e["value"] for e in hook["containers"][0]["env"] if e["name"] == "SPRINGTIDE_TEST_JOB")
        )
        specs += [hook, job["spec"]["workers"]["template"]["spec"]]
    for spec in specs:
        assert restricted_violations(spec) == []


def test_restricted_check_finds_violations() -> None:
    assert restricted_violations(
        {"hostNetwork": True, "containers": [{}], "volumes": [{"name": "v", "hostPath": {}}]}
    ) == [
        "hostNetwork",
        "volume v",
        "allowPrivilegeEscalation",
        "capabilities.drop",
        "runAsNonRoot",
        "seccompProfile",
    ]


@EACH_FILE
def test_selectors_find_the_operator_and_no_pod_of_a_job(file: Path) -> None:
    objects = render(file=file, api_versions=MONITORING)
    deployment = pick(objects, "Deployment")
    pod = deployment["spec"]["template"]["metadata"]["labels"]
    of_a_job = names.labels("digits", names.ROLE_WORKER) | {"app.kubernetes.io/instance": "springtide"}
    service = next((o for o in objects if o["kind"] == "Service"), None)
    selectors = [deployment["spec"]["selector"]["matchLabels"]]
    selectors += [service["spec"]["selector"]] if service else []
    for kind, path in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        selectors += [o["spec"][path]["matchLabels"] for o in objects if o["kind"] == kind]
    for selector in selectors:
        assert selects(pod, selector)
        assert not selects(of_a_job, selector)
    for monitor in (o for o in objects if o["kind"] == "PodMonitor"):
        # Only by our own label: users may call their application otherwise.
        assert monitor["spec"]["selector"] == {
            "matchExpressions": [{"key": names.LABEL_JOB, "operator": "Exists"}]
        }
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["honorLabels"] is False  # a worker's page says nothing about others' jobs
        assert {one["targetLabel"] for one in endpoint["relabelings"]} == {"training_job", "job_namespace"}
        assert names.LABEL_JOB in of_a_job
        assert names.LABEL_JOB not in pod
    for monitor in (o for o in objects if o["kind"] == "ServiceMonitor"):
        assert service is not None
        assert selects(service["metadata"]["labels"], monitor["spec"]["selector"]["matchLabels"])


def test_crds_are_those_of_the_models() -> None:
    rendered = [one for one in render() if one["kind"] == "CustomResourceDefinition"]
    assert [one["spec"]["names"]["kind"] for one in rendered] == list(DEFINITIONS)
    for one in rendered:
        assert one["spec"] == DEFINITIONS[one["spec"]["names"]["kind"]]()["spec"]
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://collector.monitoring:4318", 4318),
        ("https://otel.example.com/v1", 443),
        ("http://10.1.2.3", 80),
    ],
)
def test_limited_operator_reaches_the_collector_of_traces(endpoint: str, port: int) -> None:
    values = {"networkPolicy": {"egress": {"enabled": True}}, "tracing": {"endpoint": endpoint}}
    policy = pick(render(values), "NetworkPolicy")
    assert {"ports": [{"port": port, "protocol": "TCP"}]} in policy["spec"]["egress"]


def test_network_policy_lets_operator_reach_coordinators_only() -> None:
    policy = pick(
        render({"networkPolicy": {"egress": {"enabled": True}}, "watchNamespaces": ["a"]}), "NetworkPolicy"
    )
    rule = policy["spec"]["egress"][2]
    assert rule["ports"] == [{"port": names.COORDINATOR_PORT, "protocol": "TCP"}]
    chosen = rule["to"][0]["podSelector"]["matchLabels"]
    assert selects(names.labels("j", names.ROLE_COORDINATOR), chosen)
    assert chosen.keys() == {names.LABEL_ROLE}, "others are the user's to choose"
    assert not selects(names.labels("j", names.ROLE_WORKER), rule["to"][0]["podSelector"]["matchLabels"])
    assert rule["to"][0]["namespaceSelector"]["matchExpressions"][0]["values"] == ["a"]


def bindings(objects: list[Object], account: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """{(kind of role, namespace): rules} that an account has."""
    result: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for binding in objects:
        if binding["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        if not any(subject["name"] == account for subject in binding["subjects"]):
            continue
        namespace = binding["metadata"].get("namespace", "")
        role = next(
            o
            for o in objects
            if o["kind"] == binding["roleRef"]["kind"]
            and o["metadata"]["name"] == binding["roleRef"]["name"]
            and o["metadata"].get("namespace", "") == namespace
        )
        result.setdefault((role["kind"], namespace), []).extend(role["rules"])
    return result


def test_named_namespaces_need_no_cluster_wide_right() -> None:
    everywhere = bindings(render(), "springtide-operator")
    named = bindings(
        render(
            {
                "watchNamespaces": ["a", "b"],
                "rbac": {
                    "aggregateToUserRoles": False,
                    "otherReleases": False,
                    "clusterTemplates": False,
                },
            }
        ),
        "springtide-operator",
    )
    assert set(everywhere) == {
        ("ClusterRole", ""),
        ("Role", "kube-node-lease"),
        ("Role", "springtide-system"),
    }
    releases = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": ["springtide-operator"],
        "verbs": ["list"],
    }
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get"]}
    assert everywhere["Role", "kube-node-lease"] == [leases]
    assert set(named) == {("Role", "a"), ("Role", "b"), ("Role", "springtide-system")}
    crds = {
        "apiGroups": ["apiextensions.k8s.io"],
        "resources": ["customresourcedefinitions"],
        "verbs": ["list", "watch"],
    }
    nodes = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list", "watch"]}
    assert named["Role", "a"] == named["Role", "b"]
    flavors = {
        "apiGroups": ["kueue.x-k8s.io"],
        "resources": ["resourceflavors", "workloadpriorityclasses"],
        "verbs": ["get"],
    }
    classes = {"apiGroups": ["scheduling.k8s.io"], "resources": ["priorityclasses"], "verbs": ["get"]}
    templates = {
        "apiGroups": ["springtide.dev"],
        "resources": ["clustertrainingtemplates"],
        "verbs": ["get"],
    }
    besides = [templates, nodes, flavors, classes, releases, crds]
    assert everywhere["ClusterRole", ""] == [*named["Role", "a"], *besides]
    seeing = bindings(render({"watchNamespaces": ["a", "b"]}), "springtide-operator")
    assert seeing == named | {("ClusterRole", ""): [templates, releases]}


@EACH_FILE
def test_rights_are_listed_one_by_one(file: Path) -> None:
    for role in render(file=file, api_versions=MONITORING):
        for rule in role.get("rules", []) if role["kind"] in {"Role", "ClusterRole"} else []:
            assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]], role["metadata"][
                "name"
            ]


@pytest.mark.parametrize(
    ("copy", "source"),
    [
        ("trainingjobs.yaml", "deploy/crd/trainingjobs.yaml"),
        ("trainingtemplates.yaml", "deploy/crd/trainingtemplates.yaml"),
        ("clustertrainingtemplates.yaml", "deploy/crd/clustertrainingtemplates.yaml"),
        ("alerts.yaml", "deploy/prometheus/alerts.yaml"),
        ("dashboard.json", "deploy/grafana/springtide.json"),
    ],
)
def test_copies_in_the_chart_equal_their_source(copy: str, source: str) -> None:
    assert (CHART / "files" / copy).read_text() == (ROOT / source).read_text(), (
        "run: python charts/generate.py"
    )


def test_monitoring_files_arrive_unchanged() -> None:
    objects = render(file=CHART / "ci" / "monitoring-values.yaml", api_versions=MONITORING)
    assert pick(objects, "PrometheusRule")["spec"] == yaml.safe_load(
        (CHART / "files" / "alerts.yaml").read_text()
    )
    assert (
        pick(objects, "ConfigMap")["data"]["springtide.json"]
        == (CHART / "files" / "dashboard.json").read_text()
    )


def test_parse_refuses_a_key_given_twice() -> None:
    with pytest.raises(yaml.YAMLError, match="given twice"):
        parse("a: 1\na: 2\n")
