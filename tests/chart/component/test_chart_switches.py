"""Every value of the chart does what its comment says, seen in the rendered objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from chart_render import CHART, MONITORING, Object, kinds, pick, render
from chart_rights import granted

OPERATOR = "springtide-operator"
LINUX = {"kubernetes.io/os": "linux"}


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    result: dict[str, Any] = value
    return result


def deployment(objects: list[Object]) -> Object:
    return pick(objects, "Deployment")


def pod(objects: list[Object]) -> Object:
    spec: Object = deployment(objects)["spec"]["template"]["spec"]
    return spec


def container(objects: list[Object]) -> Object:
    result: Object = pod(objects)["containers"][0]
    return result


def environment(objects: list[Object]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container(objects)["env"]}


def hook_pod(objects: list[Object]) -> Object:
    return pick(objects, "Pod")


def test_job(objects: list[Object]) -> Object:
    entry = next(
        e for e in hook_pod(objects)["spec"]["containers"][0]["env"] if e["name"] == "SPRINGTIDE_TEST_JOB"
    )
    job: Object = yaml.safe_load(entry["value"])
    return job


def kueue_rights(objects: list[Object]) -> list[tuple[str, str, str, str]]:
    """(namespace/name, verb, group, resource) that accounts outside of the release are granted."""
    roles = {(x["kind"], x["metadata"]["name"]): x["rules"] for x in objects if x["kind"].endswith("Role")}
    found = []
    for binding in objects:
        if binding["kind"] != "ClusterRoleBinding":
            continue
        for one in binding["subjects"]:
            if one["namespace"] == "springtide-system":
                continue
            for rule in roles["ClusterRole", binding["roleRef"]["name"]]:
                found += [
                    (f"{one['namespace']}/{one['name']}", verb, group, resource)
                    for verb in rule["verbs"]
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                ]
    return found


KUEUE = "kueue-system/kueue-controller-manager"
test_job.__test__ = False  # type: ignore[attr-defined]

TOLERATION = {"key": "a", "operator": "Exists"}
LOST_NODES = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
SPREAD = {"maxSkew": 2, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}
PEER = {"namespaceSelector": {"matchLabels": {"a": "b"}}}
DIGEST = "sha256:" + "2" * 64

# (value, what it is set to, where it is seen, what is there by default, what is there then)
Case = tuple[str, Any, Callable[[list[Object]], Any], Any, Any]
CASES: list[Case] = [
    (
        "nameOverride",
        "train",
        lambda o: deployment(o)["metadata"]["name"],
        OPERATOR,
        "springtide-train-operator",
    ),
    ("fullnameOverride", "lab", lambda o: deployment(o)["metadata"]["name"], OPERATOR, "lab-operator"),
    (
        "commonLabels",
        {"team": "x"},
        lambda o: {x["metadata"]["labels"].get("team") for x in o},
        {None},
        {"x"},
    ),
    (
        "image.registry",
        "r.example.com/m/",
        lambda o: container(o)["image"],
        "springtide/operator:0.1.0",
        "r.example.com/m/springtide/operator:0.1.0",
    ),
    ("image.repository", "a/b", lambda o: container(o)["image"], "springtide/operator:0.1.0", "a/b:0.1.0"),
    (
        "image.tag",
        "9",
        lambda o: environment(o)["SPRINGTIDE_COORDINATOR_IMAGE"],
        "springtide/operator:0.1.0",
        "springtide/operator:9",
    ),
    (
        "image.digest",
        DIGEST,
        lambda o: hook_pod(o)["spec"]["containers"][0]["image"],
        "springtide/operator:0.1.0",
        f"springtide/operator@{DIGEST}",
    ),
    (
        "parameterServerImage",
        "r.example.com/ps:1",
        lambda o: environment(o)["SPRINGTIDE_PARAMETER_SERVER_IMAGE"],
        "springtide/ps:0.1.0",
        "r.example.com/ps:1",
    ),
    ("image.pullPolicy", "Always", lambda o: container(o)["imagePullPolicy"], "IfNotPresent", "Always"),
    ("imagePullSecrets", [{"name": "s"}], lambda o: pod(o).get("imagePullSecrets"), None, [{"name": "s"}]),
    ("crds.enabled", False, lambda o: "CustomResourceDefinition" in kinds(o), True, False),
    (
        "crds.keep",
        False,
        lambda o: [
            one["metadata"].get("annotations") for one in o if one["kind"] == "CustomResourceDefinition"
        ],
        [{"helm.sh/resource-policy": "keep"}] * 3,
        [None] * 3,
    ),
    (
        "watchNamespaces",
        ["a", "b"],
        lambda o: environment(o).get("SPRINGTIDE_WATCH_NAMESPACES"),
        None,
        "a,b",
    ),
    ("replicas", 1, lambda o: deployment(o)["spec"]["replicas"], 2, 1),
    ("logLevel", "debug", lambda o: environment(o)["SPRINGTIDE_LOG_LEVEL"], "info", "debug"),
    ("extraEnv", [{"name": "A", "value": "b"}], lambda o: environment(o).get("A"), None, "b"),
    ("resources.requests.cpu", "2", lambda o: container(o)["resources"]["requests"]["cpu"], "100m", "2"),
    (
        "resources.requests.memory",
        "1Gi",
        lambda o: container(o)["resources"]["requests"]["memory"],
        "128Mi",
        "1Gi",
    ),
    (
        "resources.limits.memory",
        "1Gi",
        lambda o: container(o)["resources"]["limits"]["memory"],
        "512Mi",
        "1Gi",
    ),
    (
        "podLabels",
        {"a": "b"},
        lambda o: deployment(o)["spec"]["template"]["metadata"]["labels"].get("a"),
        None,
        "b",
    ),
    (
        "podAnnotations",
        {"a": "b"},
        lambda o: deployment(o)["spec"]["template"]["metadata"]["annotations"].get("a"),
        None,
        "b",
    ),
    ("nodeSelector", {"a": "b"}, lambda o: pod(o)["nodeSelector"], LINUX, LINUX | {"a": "b"}),
    (
        "tolerations",
        [TOLERATION],
        lambda o: [entry["key"] for entry in pod(o)["tolerations"]],
        LOST_NODES,
        ["a", *LOST_NODES],
    ),
    ("affinity", {"podAffinity": {}}, lambda o: pod(o).get("affinity"), None, {"podAffinity": {}}),
    (
        "topologySpreadConstraints",
        [SPREAD],
        lambda o: [entry["topologyKey"] for entry in pod(o)["topologySpreadConstraints"]],
        ["kubernetes.io/hostname", "topology.kubernetes.io/zone"],
        ["z"],
    ),
    ("priorityClassName", "high", lambda o: pod(o).get("priorityClassName"), None, "high"),
    ("terminationGracePeriodSeconds", 60, lambda o: pod(o)["terminationGracePeriodSeconds"], 15, 60),
    ("serviceAccount.name", "sa", lambda o: pod(o)["serviceAccountName"], OPERATOR, "sa"),
    (
        "serviceAccount.annotations",
        {"a": "b"},
        lambda o: pick(o, "ServiceAccount", OPERATOR)["metadata"].get("annotations"),
        None,
        {"a": "b"},
    ),
    (
        "rbac.create",
        False,
        lambda o: {"RoleBinding", "ClusterRoleBinding", "Role"} & kinds(o),
        {"RoleBinding", "ClusterRoleBinding", "Role"},
        set(),
    ),
    (
        "rbac.gangScheduling",
        False,
        lambda o: ("patch", "scheduling.volcano.sh", "podgroups") in granted(o, OPERATOR),
        True,
        False,
    ),
    (
        "rbac.kueue",
        False,
        lambda o: sorted(right for right in granted(o, OPERATOR) if right[1] == "kueue.x-k8s.io"),
        [
            ("create", "kueue.x-k8s.io", "workloads"),
            ("delete", "kueue.x-k8s.io", "workloads"),
            ("get", "kueue.x-k8s.io", "resourceflavors"),
            ("get", "kueue.x-k8s.io", "workloadpriorityclasses"),
            ("list", "kueue.x-k8s.io", "workloads"),
            ("patch", "kueue.x-k8s.io", "workloads"),
            ("patch", "kueue.x-k8s.io", "workloads/status"),
            ("watch", "kueue.x-k8s.io", "workloads"),
        ],
        [],
    ),
    (
        "rbac.aggregateToUserRoles",
        False,
        lambda o: sorted(x["metadata"]["name"] for x in o if x["kind"] == "ClusterRole"),
        ["springtide-admin", "springtide-edit", f"{OPERATOR}-jobs", "springtide-view"],
        [f"{OPERATOR}-jobs"],
    ),
    (
        "kueue.serviceAccount",
        "kueue-system/kueue-controller-manager",
        kueue_rights,
        [],
        [(KUEUE, verb, "springtide.dev", "trainingjobs") for verb in ("get", "list", "watch")],
    ),
    ("podDisruptionBudget.enabled", False, lambda o: "PodDisruptionBudget" in kinds(o), True, False),
    (
        "podDisruptionBudget.maxUnavailable",
        "50%",
        lambda o: pick(o, "PodDisruptionBudget")["spec"]["maxUnavailable"],
        1,
        "50%",
    ),
    ("flowSchema.enabled", False, lambda o: "FlowSchema" in kinds(o), True, False),
    (
        "jobs.managedBy",
        "example.com/lab",
        lambda o: (environment(o)["SPRINGTIDE_MANAGED_BY"], test_job(o)["spec"].get("managedBy")),
        ("springtide.dev/operator", None),
        ("example.com/lab", "example.com/lab"),
    ),
    (
        "jobs.certificateDays",
        30,
        lambda o: environment(o)["SPRINGTIDE_CERTIFICATE_SECONDS"],
        "7776000",
        "2592000",
    ),
    ("jobs.tls", True, lambda o: environment(o).get("SPRINGTIDE_JOBS_TLS"), None, "true"),
    ("networkPolicy.enabled", False, lambda o: "NetworkPolicy" in kinds(o), True, False),
    (
        "networkPolicy.jobs",
        False,
        lambda o: (
            environment(o).get("SPRINGTIDE_NETWORK_POLICY"),
            ("patch", "networking.k8s.io", "networkpolicies") in granted(o, OPERATOR),
        ),
        ('{"metricsFrom":[]}', True),
        (None, False),
    ),
    (
        "networkPolicy.metricsFrom",
        [PEER],
        lambda o: pick(o, "NetworkPolicy")["spec"]["ingress"][0]["from"],
        [{"podSelector": {}}],
        [PEER],
    ),
    (
        "networkPolicy.egress.enabled",
        True,
        lambda o: pick(o, "NetworkPolicy")["spec"]["policyTypes"],
        ["Ingress"],
        ["Ingress", "Egress"],
    ),
    ("metrics.service.enabled", False, lambda o: "Service" in kinds(o), True, False),
    (
        "metrics.service.annotations",
        {"a": "b"},
        lambda o: pick(o, "Service")["metadata"].get("annotations"),
        None,
        {"a": "b"},
    ),
    ("metrics.serviceMonitor.enabled", True, lambda o: "ServiceMonitor" in kinds(o), False, True),
    ("metrics.podMonitor.enabled", True, lambda o: "PodMonitor" in kinds(o), False, True),
    ("metrics.prometheusRule.enabled", True, lambda o: "PrometheusRule" in kinds(o), False, True),
    ("metrics.dashboard.enabled", True, lambda o: "ConfigMap" in kinds(o), False, True),
    (
        "tracing.endpoint",
        "http://collector:4318",
        lambda o: environment(o).get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        None,
        "http://collector:4318",
    ),
    (
        "jobPods.metadata",
        {"labels": {"a": "b"}},
        lambda o: environment(o).get("SPRINGTIDE_POD_DEFAULTS"),
        None,
        '{"container":{},"metadata":{"labels":{"a":"b"}},"spec":{}}',
    ),
    (
        "jobPods.spec",
        {"priorityClassName": "high"},
        lambda o: environment(o).get("SPRINGTIDE_POD_DEFAULTS"),
        None,
        '{"container":{},"metadata":{},"spec":{"priorityClassName":"high"}}',
    ),
    (
        "jobPods.container",
        {"env": [{"name": "A", "value": "b"}]},
        lambda o: environment(o).get("SPRINGTIDE_POD_DEFAULTS"),
        None,
        '{"container":{"env":[{"name":"A","value":"b"}]},"metadata":{},"spec":{}}',
    ),
    ("helmTest.enabled", False, lambda o: "Pod" in kinds(o), True, False),
    ("helmTest.namespace", "lab", lambda o: test_job(o)["metadata"]["namespace"], "springtide-system", "lab"),
    (
        "helmTest.timeoutSeconds",
        17,
        lambda o: hook_pod(o)["spec"]["containers"][0]["args"],
        ["--timeout-seconds", "300"],
        ["--timeout-seconds", "17"],
    ),
    (
        "helmTest.workerImage",
        "w:1",
        lambda o: test_job(o)["spec"]["workers"]["template"]["spec"]["containers"][0]["image"],
        "springtide/worker:0.1.0",
        "w:1",
    ),
    (
        "extraObjects",
        ["apiVersion: v1\nkind: Secret\nmetadata: {name: '{{ .Release.Name }}-x', labels: {}}"],
        lambda o: [x["metadata"]["name"] for x in o if x["kind"] == "Secret"],
        [],
        ["springtide-x"],
    ),
]

# Values that say something only beside another one.
TOGETHER: list[tuple[str, dict[str, Any], dict[str, Any], Callable[[list[Object]], Any], Any, Any]] = [
    (
        "rbac.otherReleases",
        {"watchNamespaces": ["a"]},
        {"watchNamespaces": ["a"], "rbac": {"otherReleases": False}},
        lambda o: [x["metadata"]["name"] for x in o if "-releases" in x["metadata"]["name"]],
        [f"springtide-system-{OPERATOR}-releases"] * 2,
        [],
    ),
    (
        "rbac.clusterTemplates",
        {"watchNamespaces": ["a"]},
        {"watchNamespaces": ["a"], "rbac": {"clusterTemplates": False}},
        lambda o: [x["metadata"]["name"] for x in o if x["metadata"]["name"].endswith("-templates")],
        [f"springtide-system-{OPERATOR}-templates"] * 2,
        [],
    ),
    (
        "serviceAccount.create",
        {"serviceAccount": {"name": "sa"}},
        {"serviceAccount": {"name": "sa", "create": False}},
        lambda o: sorted(x["metadata"]["name"] for x in o if x["kind"] == "ServiceAccount"),
        ["sa", "springtide-helm-test"],
        ["springtide-helm-test"],
    ),
    (
        "networkPolicy.egress.apiServerPorts",
        {"networkPolicy": {"egress": {"enabled": True}}},
        {"networkPolicy": {"egress": {"enabled": True, "apiServerPorts": [16443]}}},
        lambda o: [entry["port"] for entry in pick(o, "NetworkPolicy")["spec"]["egress"][0]["ports"]],
        [443, 6443],
        [16443],
    ),
]
TOGETHER.append(
    (
        "kueue.multiKueue",
        {"kueue": {"serviceAccount": KUEUE}},
        {"kueue": {"serviceAccount": KUEUE, "multiKueue": True}},
        lambda o: [right[1:] for right in kueue_rights(o) if right[3] == "trainingjobs/status"],
        [],
        [(verb, "springtide.dev", "trainingjobs/status") for verb in ("get", "update", "patch")],
    )
)
for _value, _given, _variable, _without, _with in (
    ("protocol", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "grpc"),
    ("ratio", 0.25, "OTEL_TRACES_SAMPLER_ARG", None, "0.25"),
    ("jobs", False, "SPRINGTIDE_TRACE_JOBS", None, "false"),
):
    TOGETHER.append(
        (
            f"tracing.{_value}",
            {"tracing": {"endpoint": "http://collector:4318"}},
            {"tracing": {"endpoint": "http://collector:4318", _value: _given}},
            lambda o, variable=_variable: environment(o).get(variable),
            _without,
            _with,
        )
    )
for _kind, _key in (
    ("ServiceMonitor", "serviceMonitor"),
    ("PodMonitor", "podMonitor"),
    ("PrometheusRule", "prometheusRule"),
    ("ConfigMap", "dashboard"),
):
    _on = {"metrics": {_key: {"enabled": True}}}
    TOGETHER.append(
        (
            f"metrics.{_key}.labels",
            _on,
            {"metrics": {_key: {"enabled": True, "labels": {"a": "b"}}}},
            lambda o, kind=_kind: pick(o, kind)["metadata"]["labels"].get("a"),
            None,
            "b",
        )
    )
for _kind, _key, _endpoints in (
    ("ServiceMonitor", "serviceMonitor", "endpoints"),
    ("PodMonitor", "podMonitor", "podMetricsEndpoints"),
):
    _on = {"metrics": {_key: {"enabled": True}}}
    TOGETHER.append(
        (
            f"metrics.{_key}.interval",
            _on,
            {"metrics": {_key: {"enabled": True, "interval": "1m"}}},
            lambda o, kind=_kind, endpoints=_endpoints: pick(o, kind)["spec"][endpoints][0]["interval"],
            "15s",
            "1m",
        )
    )
TOGETHER.append(
    (
        "metrics.dashboard.annotations",
        {"metrics": {"dashboard": {"enabled": True}}},
        {"metrics": {"dashboard": {"enabled": True, "annotations": {"f": "g"}}}},
        lambda o: pick(o, "ConfigMap")["metadata"].get("annotations"),
        None,
        {"f": "g"},
    )
)
TOGETHER.append(
    (
        "metrics.dashboard.labels.grafana_dashboard",
        {"metrics": {"dashboard": {"enabled": True}}},
        {"metrics": {"dashboard": {"enabled": True, "labels": {"grafana_dashboard": "2"}}}},
        lambda o: pick(o, "ConfigMap")["metadata"]["labels"].get("grafana_dashboard"),
        "1",
        "2",
    )
)


@pytest.fixture(scope="module")
def default() -> list[Object]:
    return render(api_versions=MONITORING)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_value_has_its_effect(case: Case, default: list[Object]) -> None:
    path, value, seen, before, after = case
    assert seen(default) == before
    assert seen(render(nested(path, value), api_versions=MONITORING)) == after


@pytest.mark.slow
@pytest.mark.parametrize("case", TOGETHER, ids=[case[0] for case in TOGETHER])
def test_value_has_its_effect_beside_another(case: Any) -> None:
    _, without, with_it, seen, before, after = case
    assert seen(render(without, api_versions=MONITORING)) == before
    assert seen(render(with_it, api_versions=MONITORING)) == after


def test_operator_leaves_a_lost_node_after_half_a_minute(default: list[Object]) -> None:
    """Kubernetes' own five minutes are for pods that keep something on their node."""
    for entry in pod(default)["tolerations"]:
        assert (entry["operator"], entry["effect"], entry["tolerationSeconds"]) == ("Exists", "NoExecute", 30)


@pytest.mark.parametrize(
    ("own", "keys"),
    [
        ({"key": LOST_NODES[1], "operator": "Exists"}, [LOST_NODES[1], LOST_NODES[0]]),
        ({"operator": "Exists"}, [None]),
    ],
)
def test_own_toleration_of_lost_nodes_is_the_one_that_counts(own: Object, keys: list[str | None]) -> None:
    found = pod(render({"tolerations": [own]}, api_versions=MONITORING))["tolerations"]
    assert [entry.get("key") for entry in found] == keys
    assert found[0] == own


def test_operator_s_pods_are_spread_by_revision(default: list[Object]) -> None:
    """Count the pods of the last revision no more in a rollout; else both new ones may share a node."""
    for entry in pod(default)["topologySpreadConstraints"]:
        assert entry["matchLabelKeys"] == ["pod-template-hash"]


def leaves(values: Any, prefix: str = "") -> list[str]:
    """Paths of all values that hold no further keys."""
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [leaf for key, child in values.items() for leaf in leaves(child, f"{prefix}.{key}".lstrip("."))]


def test_no_value_is_without_a_case() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    covered = {case[0] for case in CASES} | {case[0] for case in TOGETHER}
    assert set(leaves(values)) - covered == set()
