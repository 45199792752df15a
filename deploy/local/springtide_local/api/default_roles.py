"""The cluster roles and bindings that every cluster has: for administrators, for users, and for whoever is
known at all.

Left out are those of Kubernetes' own components (`system:node`, `system:controller:...`): here they are parts
of this process, which ask nobody.
"""

from __future__ import annotations

from springtide_local.api.rbac import GROUP, MASTERS
from springtide_local.ports import Object

_READ = ("get", "list", "watch")
_WRITE = ("create", "delete", "deletecollection", "patch", "update")
_ALL = (*_WRITE, *_READ)
_AGGREGATE = "rbac.authorization.k8s.io/aggregate-to-"
_HEALTH = ("/healthz", "/livez", "/readyz", "/version", "/version/")
_DISCOVERY = ("/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", *_HEALTH)
_WITH_STATUS = ("deployments", "replicasets", "statefulsets", "daemonsets")


def _rule(verbs: tuple[str, ...], group: str, *resources: str) -> Object:
    return {"apiGroups": [group], "resources": sorted(resources), "verbs": sorted(verbs)}


def _parts(names: tuple[str, ...], *parts: str) -> list[str]:
    return [f"{name}/{part}" if part else name for name in names for part in parts]


_VIEW = [
    _rule(
        _READ, "", "configmaps", "endpoints", "persistentvolumeclaims", "persistentvolumeclaims/status",
        "pods", "replicationcontrollers", "replicationcontrollers/scale", "serviceaccounts", "services",
        "services/status",
    ),
    _rule(
        _READ, "", "bindings", "events", "limitranges", "namespaces/status", "pods/log", "pods/status",
        "replicationcontrollers/status", "resourcequotas", "resourcequotas/status",
    ),
    _rule(_READ, "", "namespaces"),
    _rule(_READ, "discovery.k8s.io", "endpointslices"),
    _rule(
        _READ, "apps", "controllerrevisions", *_parts(_WITH_STATUS, "", "status"),
        *_parts(("deployments", "replicasets", "statefulsets"), "scale"),
    ),
    _rule(_READ, "autoscaling", *_parts(("horizontalpodautoscalers",), "", "status")),
    _rule(_READ, "batch", *_parts(("cronjobs", "jobs"), "", "status")),
    _rule(_READ, "policy", *_parts(("poddisruptionbudgets",), "", "status")),
    _rule(_READ, "networking.k8s.io", *_parts(("ingresses",), "", "status"), "networkpolicies"),
]  # fmt: skip

_STREAMS = ("pods/attach", "pods/exec", "pods/portforward", "pods/proxy")
_EDIT = [
    _rule(_READ, "", *_STREAMS, "secrets", "services/proxy"),
    _rule(("impersonate",), "", "serviceaccounts"),
    _rule(_WRITE, "", "pods", *_STREAMS),
    _rule(("create",), "", "pods/eviction"),
    _rule(
        _WRITE, "", "configmaps", "events", "persistentvolumeclaims", "replicationcontrollers",
        "replicationcontrollers/scale", "secrets", "serviceaccounts", "services", "services/proxy",
    ),
    _rule(("create",), "", "serviceaccounts/token"),
    _rule(
        _WRITE, "apps", *_WITH_STATUS, "deployments/rollback",
        *_parts(("deployments", "replicasets", "statefulsets"), "scale"),
    ),
    _rule(_WRITE, "autoscaling", "horizontalpodautoscalers"),
    _rule(_WRITE, "batch", "cronjobs", "jobs"),
    _rule(_WRITE, "policy", "poddisruptionbudgets"),
    _rule(_WRITE, "networking.k8s.io", "ingresses", "networkpolicies"),
    _rule(_ALL, "coordination.k8s.io", "leases"),
]  # fmt: skip

_ADMIN = [
    _rule(("create",), "authorization.k8s.io", "localsubjectaccessreviews"),
    _rule(_ALL, GROUP, "rolebindings", "roles"),
]


def _urls(*urls: str) -> list[Object]:
    return [{"nonResourceURLs": list(urls), "verbs": ["get"]}]


def _role(name: str, rules: list[Object], labels: tuple[str, ...] = ()) -> Object:
    marks = {"kubernetes.io/bootstrapping": "rbac-defaults"}
    return {
        "metadata": {
            "name": name,
            "labels": marks | {_AGGREGATE + label: "true" for label in labels},
            "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"},
        },
        "rules": rules,
    }


def _aggregated(name: str, labels: tuple[str, ...] = ()) -> Object:
    selector = {"matchLabels": {_AGGREGATE + name: "true"}}
    return {**_role(name, [], labels), "aggregationRule": {"clusterRoleSelectors": [selector]}}


def cluster_roles() -> list[Object]:
    """Return fresh ClusterRoles."""
    everything: Object = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    reviews = ("selfsubjectaccessreviews", "selfsubjectrulesreviews")
    return [
        _role("cluster-admin", [everything, {"nonResourceURLs": ["*"], "verbs": ["*"]}]),
        _aggregated("admin"),
        _aggregated("edit", ("admin",)),
        _aggregated("view", ("edit",)),
        _role("system:aggregate-to-admin", _ADMIN, ("admin",)),
        _role("system:aggregate-to-edit", _EDIT, ("edit",)),
        _role("system:aggregate-to-view", _VIEW, ("view",)),
        _role("system:discovery", _urls(*_DISCOVERY)),
        _role("system:public-info-viewer", _urls(*_HEALTH)),
        _role(
            "system:basic-user",
            [
                _rule(("create",), "authorization.k8s.io", *reviews),
                _rule(("create",), "authentication.k8s.io", "selfsubjectreviews"),
            ],
        ),
        _role(
            "system:auth-delegator",
            [
                _rule(("create",), "authentication.k8s.io", "tokenreviews"),
                _rule(("create",), "authorization.k8s.io", "subjectaccessreviews"),
            ],
        ),
    ]


def cluster_role_bindings() -> list[Object]:
    """Return fresh ClusterRoleBindings."""
    given = {
        "cluster-admin": (MASTERS,),
        "system:discovery": ("system:authenticated",),
        "system:basic-user": ("system:authenticated",),
        "system:public-info-viewer": ("system:authenticated", "system:unauthenticated"),
    }
    return [
        {
            "metadata": _role(name, [])["metadata"],
            "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": name},
            "subjects": [{"apiGroup": GROUP, "kind": "Group", "name": group} for group in groups],
        }
        for name, groups in given.items()
    ]
