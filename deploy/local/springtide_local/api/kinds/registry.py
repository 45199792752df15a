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


def _resource(
    group: str,
    version: str,
    plural: str,
    kind: str,
    namespaced: bool = True,
    short: str = "",
    rules: Kind | None = None,
    sub: tuple[str, ...] = (),
    **extra: Any,
) -> ResourceType:
    """Return one built-in type.

    Args:
        group: of the API; "" for the core.
        version: of the group.
        plural: its name in paths.
        kind: its name in objects.
        namespaced: whether its objects are in namespaces.
        short: its short names, parted by spaces.
        rules: what is special about its objects; None: nothing.
        sub: its subresources.
        **extra: other fields of `ResourceType`; "schema_group": the group and version whose schema it has,
            where it is another's.
    """
    schema_group = extra.pop("schema_group", (group, version))
    return ResourceType(
        group=group,
        version=version,
        plural=plural,
        kind=kind,
        namespaced=namespaced,
        short_names=tuple(short.split()),
        rules=rules or Kind(),
        subresources=frozenset(sub),
        make_node=functools.partial(builtin.kind_node, schema_group[0], schema_group[1], kind),
        **extra,
    )


_core = functools.partial(_resource, "", "v1")
_apps = functools.partial(_resource, "apps", "v1")
_STATUS = ("status",)
_ALL = ("all",)


def builtin_resources() -> list[ResourceType]:
    """Fresh resource types for one server."""
    return [
        *_nodes_and_pods(),
        *_stored_objects(),
        *_workloads(),
        *_network_and_leases(),
        _events_of_their_own_group(),
        *_roles(),
        *_cluster_policies(),
    ]


def _nodes_and_pods() -> list[ResourceType]:
    """Return where pods run, pods, and how they are reached."""
    return [
        _core(
            "namespaces",
            "Namespace",
            False,
            "ns",
            core.Namespaces(),
            ("status", "finalize"),
            name_problem=label_problem,
            field_getters={"status.phase": field("status", "phase")},
        ),
        _core(
            "nodes",
            "Node",
            False,
            "no",
            core.Nodes(),
            _STATUS,
            field_getters={"spec.unschedulable": field("spec", "unschedulable", empty="false")},
        ),
        _core(
            "pods",
            "Pod",
            True,
            "po",
            Pods(),
            ("status", "log", "eviction", "binding"),
            categories=_ALL,
            field_getters=_POD_FIELDS,
            deletion_returns_object=True,
            generation=True,
        ),
        _core(
            "services",
            "Service",
            True,
            "svc",
            services.Services(),
            _STATUS,
            categories=_ALL,
            name_problem=label_1035_problem,
            deletion_returns_object=True,
            field_getters={"spec.clusterIP": field("spec", "clusterIP"), "spec.type": field("spec", "type")},
        ),
        _core("endpoints", "Endpoints", True, "ep", singular="endpoints"),
    ]


def _stored_objects() -> list[ResourceType]:
    """Return the rest of the core: what pods read and claim, accounts, events and bounds."""
    return [
        _core("secrets", "Secret", True, "", core.Secrets(), field_getters={"type": field("type")}),
        _core("configmaps", "ConfigMap", True, "cm", core.ConfigMaps()),
        _core("serviceaccounts", "ServiceAccount", True, "sa", sub=("token",), deletion_returns_object=True),
        _core("events", "Event", True, "ev", core.Events(), field_getters=_EVENT_FIELDS),
        _core(
            "persistentvolumeclaims",
            "PersistentVolumeClaim",
            True,
            "pvc",
            core.Claims(),
            _STATUS,
            deletion_returns_object=True,
        ),
        _core(
            "persistentvolumes",
            "PersistentVolume",
            False,
            "pv",
            core.Volumes(),
            _STATUS,
            deletion_returns_object=True,
        ),
        _core(
            "resourcequotas",
            "ResourceQuota",
            True,
            "quota",
            core.Quotas(),
            _STATUS,
            deletion_returns_object=True,
        ),
        _core("limitranges", "LimitRange", True, "limits"),
    ]


def _workloads() -> list[ResourceType]:
    """Return what has pods made, and what decides of how many there are at least or at most."""
    return [
        _apps(
            "deployments",
            "Deployment",
            True,
            "deploy",
            workloads.Deployments(),
            ("status", "scale"),
            categories=_ALL,
            scale=_REPLICAS,
            generation=True,
        ),
        _apps(
            "replicasets",
            "ReplicaSet",
            True,
            "rs",
            workloads.ReplicaSets(),
            ("status", "scale"),
            categories=_ALL,
            scale=_REPLICAS,
            generation=True,
            field_getters={"status.replicas": field("status", "replicas", empty="0")},
        ),
        _resource(
            "policy",
            "v1",
            "poddisruptionbudgets",
            "PodDisruptionBudget",
            True,
            "pdb",
            workloads.DisruptionBudgets(),
            _STATUS,
            generation=True,
        ),
        _resource(
            "autoscaling",
            "v2",
            "horizontalpodautoscalers",
            "HorizontalPodAutoscaler",
            True,
            "hpa",
            workloads.Autoscalers(),
            _STATUS,
            categories=_ALL,
        ),
    ]


def _network_and_leases() -> list[ResourceType]:
    return [
        _resource(
            "networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", True, "netpol", generation=True
        ),
        _resource("coordination.k8s.io", "v1", "leases", "Lease", True, "", core.Leases()),
        _resource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice", True),
    ]


def _events_of_their_own_group() -> ResourceType:
    """Return the other view of the core's events, which are stored once."""
    return _resource(
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


def _roles() -> list[ResourceType]:
    rbac = functools.partial(_resource, "rbac.authorization.k8s.io", "v1", name_problem=path_segment_problem)
    return [
        rbac("roles", "Role", True, "", roles.Roles(True)),
        rbac("rolebindings", "RoleBinding", True, "", roles.RoleBindings(True)),
        rbac("clusterroles", "ClusterRole", False, "", roles.Roles(False)),
        rbac("clusterrolebindings", "ClusterRoleBinding", False, "", roles.RoleBindings(False)),
    ]


def _cluster_policies() -> list[ResourceType]:
    """Return what holds for the whole cluster: priorities, admission, storage, kinds of others."""
    admission = functools.partial(_resource, admission_policies.GROUP, "v1")
    return [
        _resource(
            "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", False, "pc", core.PriorityClasses()
        ),
        # Kept and not obeyed: this server has one queue for all.
        _resource(
            "flowcontrol.apiserver.k8s.io", "v1", "flowschemas", "FlowSchema", False, "", None, _STATUS
        ),
        admission(
            "validatingadmissionpolicies",
            "ValidatingAdmissionPolicy",
            False,
            "",
            admission_policies.Policies(),
            _STATUS,
            generation=True,
        ),
        admission(
            "validatingadmissionpolicybindings",
            "ValidatingAdmissionPolicyBinding",
            False,
            "",
            admission_policies.Bindings(),
        ),
        _resource(
            "storage.k8s.io", "v1", "storageclasses", "StorageClass", False, "sc", core.StorageClasses()
        ),
        _resource(
            "apiextensions.k8s.io",
            "v1",
            "customresourcedefinitions",
            "CustomResourceDefinition",
            False,
            "crd crds",
            crds.Definitions(),
            _STATUS,
            categories=("api-extensions",),
            generation=True,
        ),
    ]
