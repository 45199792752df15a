"""The table of the built-in resources."""

from __future__ import annotations

import functools
from typing import Any

from springtide_local.api import builtin
from springtide_local.api.kinds import admission_policies, core, crds, event_view, roles, services, workloads
from springtide_local.api.kinds.base import Kind
from springtide_local.api.kinds.pods import Pods
from springtide_local.api.objects import label_1035_problem, label_problem, path_segment_problem
from springtide_local.api.resources import ResourceType, ScalePaths, View
from springtide_local.api.selectors import field

_REPLICAS = ScalePaths(("spec", "replicas"), ("status", "replicas"), ("spec", "selector"))
_EVENT_FIELDS = {
    "involvedObject.kind": field("involvedObject", "kind"),
    "involvedObject.namespace": field("involvedObject", "namespace"),
    "involvedObject.name": field("involvedObject", "name"),
    "involvedObject.uid": field("involvedObject", "uid"),
    "involvedObject.apiVersion": field("involvedObject", "apiVersion"),
    "involvedObject.resourceVersion": field("involvedObject", "resourceVersion"),
    "involvedObject.fieldPath": field("involvedObject", "fieldPath"),
    "reason": field("reason"),
    "reportingComponent": field("reportingComponent"),
    "source": field("source", "component"),
    "type": field("type"),
}
_REGARDING = {name.replace("involvedObject", "regarding"): getter for name, getter in _EVENT_FIELDS.items()}
_POD_FIELDS = {
    "spec.nodeName": field("spec", "nodeName"),
    "spec.restartPolicy": field("spec", "restartPolicy"),
    "spec.schedulerName": field("spec", "schedulerName"),
    "spec.serviceAccountName": field("spec", "serviceAccountName"),
    "spec.hostNetwork": field("spec", "hostNetwork", empty="false"),
    "status.phase": field("status", "phase"),
    "status.podIP": field("status", "podIP"),
    "status.nominatedNodeName": field("status", "nominatedNodeName"),
}


def _made(
    group: str,
    version: str,
    plural: str,
    kind: str,
    namespaced: bool,
    short: str,
    rules: Kind,
    subresources: tuple[str, ...],
    extra: dict[str, Any],
) -> ResourceType:
    schema_group = extra.pop("schema_group", (group, version))
    return ResourceType(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        namespaced=namespaced,
        short_names=tuple(short.split()),
        rules=rules,
        subresources=frozenset(subresources),
        make_node=functools.partial(builtin.kind_node, schema_group[0], schema_group[1], kind),
        **extra,
    )


def builtin_resources() -> list[ResourceType]:
    """Fresh resource types for one server."""
    table: list[ResourceType] = []

    def add(
        group: str,
        version: str,
        plural: str,
        kind: str,
        namespaced: bool = True,
        short: str = "",
        rules: Kind | None = None,
        sub: tuple[str, ...] = (),
        **extra: Any,
    ) -> None:
        table.append(_made(group, version, plural, kind, namespaced, short, rules or Kind(), sub, extra))

    status = ("status",)
    everything = ("all",)
    add(
        "",
        "v1",
        "namespaces",
        "Namespace",
        False,
        "ns",
        core.Namespaces(),
        ("status", "finalize"),
        name_problem=label_problem,
        field_getters={"status.phase": field("status", "phase")},
    )
    add(
        "",
        "v1",
        "nodes",
        "Node",
        False,
        "no",
        core.Nodes(),
        status,
        field_getters={"spec.unschedulable": field("spec", "unschedulable", empty="false")},
    )
    add(
        "",
        "v1",
        "pods",
        "Pod",
        True,
        "po",
        Pods(),
        ("status", "log", "eviction", "binding"),
        categories=everything,
        field_getters=_POD_FIELDS,
        deletion_returns_object=True,
        generation=True,
    )
    add(
        "",
        "v1",
        "services",
        "Service",
        True,
        "svc",
        services.Services(),
        status,
        categories=everything,
        name_problem=label_1035_problem,
        deletion_returns_object=True,
        field_getters={"spec.clusterIP": field("spec", "clusterIP"), "spec.type": field("spec", "type")},
    )
    add("", "v1", "endpoints", "Endpoints", True, "ep", singular="endpoints")
    add("", "v1", "secrets", "Secret", True, "", core.Secrets(), field_getters={"type": field("type")})
    add("", "v1", "configmaps", "ConfigMap", True, "cm", core.ConfigMaps())
    add(
        "",
        "v1",
        "serviceaccounts",
        "ServiceAccount",
        True,
        "sa",
        sub=("token",),
        deletion_returns_object=True,
    )
    add("", "v1", "events", "Event", True, "ev", core.Events(), field_getters=_EVENT_FIELDS)
    add(
        "",
        "v1",
        "persistentvolumeclaims",
        "PersistentVolumeClaim",
        True,
        "pvc",
        core.Claims(),
        status,
        deletion_returns_object=True,
    )
    add(
        "",
        "v1",
        "persistentvolumes",
        "PersistentVolume",
        False,
        "pv",
        core.Volumes(),
        status,
        deletion_returns_object=True,
    )
    add(
        "",
        "v1",
        "resourcequotas",
        "ResourceQuota",
        True,
        "quota",
        core.Quotas(),
        status,
        deletion_returns_object=True,
    )
    add("", "v1", "limitranges", "LimitRange", True, "limits")
    add(
        "apps",
        "v1",
        "deployments",
        "Deployment",
        True,
        "deploy",
        workloads.Deployments(),
        ("status", "scale"),
        categories=everything,
        scale=_REPLICAS,
        generation=True,
    )
    add(
        "apps",
        "v1",
        "replicasets",
        "ReplicaSet",
        True,
        "rs",
        workloads.ReplicaSets(),
        ("status", "scale"),
        categories=everything,
        scale=_REPLICAS,
        generation=True,
        field_getters={"status.replicas": field("status", "replicas", empty="0")},
    )
    add(
        "policy",
        "v1",
        "poddisruptionbudgets",
        "PodDisruptionBudget",
        True,
        "pdb",
        workloads.DisruptionBudgets(),
        status,
        generation=True,
    )
    add(
        "autoscaling",
        "v2",
        "horizontalpodautoscalers",
        "HorizontalPodAutoscaler",
        True,
        "hpa",
        workloads.Autoscalers(),
        status,
        categories=everything,
    )
    add("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True, "netpol", generation=True)
    add("coordination.k8s.io", "v1", "leases", "Lease", True, "", core.Leases())
    add("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", True)
    add(
        "events.k8s.io",
        "v1",
        "events",
        "Event",
        True,
        "ev",
        core.Events(),
        storage="events",
        schema_group=("", "v1"),
        view=View(event_view.show, event_view.store),
        field_getters={**_EVENT_FIELDS, **_REGARDING},
    )
    for plural, kind, namespaced in (
        ("roles", "Role", True),
        ("rolebindings", "RoleBinding", True),
        ("clusterroles", "ClusterRole", False),
        ("clusterrolebindings", "ClusterRoleBinding", False),
    ):
        rules = roles.RoleBindings(namespaced) if kind.endswith("Binding") else roles.Roles(namespaced)
        add(
            "rbac.authorization.k8s.io",
            "v1",
            plural,
            kind,
            namespaced,
            "",
            rules,
            name_problem=path_segment_problem,
        )
    add("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False, "pc", core.PriorityClasses())
    # Kept and not obeyed: this server has one queue for all.
    add("flowcontrol.apiserver.k8s.io", "v1", "flowschemas", "FlowSchema", False, "", None, status)
    for plural, kind, checks in (
        ("validatingadmissionpolicies", "ValidatingAdmissionPolicy", admission_policies.Policies()),
        (
            "validatingadmissionpolicybindings",
            "ValidatingAdmissionPolicyBinding",
            admission_policies.Bindings(),
        ),
    ):
        policy = kind == "ValidatingAdmissionPolicy"
        sub = status if policy else ()
        add(admission_policies.GROUP, "v1", plural, kind, False, "", checks, sub, generation=policy)
    add("storage.k8s.io", "v1", "storageclasses", "StorageClass", False, "sc", core.StorageClasses())
    add(
        "apiextensions.k8s.io",
        "v1",
        "customresourcedefinitions",
        "CustomResourceDefinition",
        False,
        "crd crds",
        crds.Definitions(),
        status,
        categories=("api-extensions",),
        generation=True,
    )
    return table
