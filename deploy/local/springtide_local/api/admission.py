"""Admission: what is filled in from other objects, and what is refused because of them."""

from __future__ import annotations

from decimal import Decimal

from springtide_local.api import pod_security, quota
from springtide_local.api.given import ROOT_AUTHORITY
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import lookup, random_suffix
from springtide_local.api.resources import ResourceType
from springtide_local.ports import Object

_SECONDS = 300
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_VOLUME = "kube-api-access-"
_TOKEN_SECONDS = 3607
_DEFAULT_TOLERATIONS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def mutate(store: ObjectStore, resource: ResourceType, obj: Object) -> None:
    """Fill a new pod from its namespace and its priority class, in place.

    Args:
        store: of all objects.
        resource: type of the new object.
        obj: the new object; others than pods are left alone.

    Raises:
        ApiError: 403: what it names is not there.
    """
    if resource.storage == "pods":
        _service_account(store, resource, obj)
        _priority(store, resource, obj)
        _tolerations(obj["spec"])
        for limit_range in store.scan("limitranges", obj["metadata"]["namespace"]):
            quota.apply_limit_range(limit_range, obj["spec"])


def admit(store: ObjectStore, resource: ResourceType, obj: Object, warnings: list[str]) -> None:
    """Refuse a new object that a policy of its namespace forbids.

    Args:
        store: of all objects.
        resource: type of the new object.
        obj: the new object.
        warnings: gets what the namespace wants to be warned of.

    Raises:
        ApiError: 403: a limit range, a security level or a quota is against it.
    """
    if not resource.namespaced:
        return
    namespace = obj["metadata"]["namespace"]
    if resource.storage == "pods":
        for limit_range in store.scan("limitranges", namespace):
            problems = quota.limit_range_problems(limit_range, obj["spec"])
            if problems:
                raise resource.forbidden(obj["metadata"]["name"], ", ".join(problems))
    _pod_security(store, resource, obj, namespace, warnings)
    for item in store.scan("resourcequotas", namespace):
        _quota(store, resource, obj, item)


def _pod_security(
    store: ObjectStore, resource: ResourceType, obj: Object, namespace: str, warnings: list[str]
) -> None:
    space = store.peek("namespaces", namespace)
    labels = space["metadata"].get("labels") or {} if space is not None else {}
    spec = obj.get("spec") if resource.storage == "pods" else lookup(obj, "spec", "template", "spec")
    if not isinstance(spec, dict) or resource.custom:
        return
    for mode in ("enforce", "warn"):
        level = labels.get(pod_security.LABEL + mode, "privileged")
        found = pod_security.violations(spec, level)
        if not found:
            continue
        version = labels.get(f"{pod_security.LABEL}{mode}-version", "latest")
        text = f'violate PodSecurity "{level}:{version}": {", ".join(found)}'
        if mode == "enforce" and resource.storage == "pods":
            raise resource.forbidden(obj["metadata"]["name"], text.replace("violate", "violates", 1))
        warnings.append(f"would {text}")


def _quota(store: ObjectStore, resource: ResourceType, obj: Object, item: Object) -> None:
    names = list(lookup(item, "spec", "hard") or ())
    if resource.storage not in quota.storages(names):
        return
    used = quota_usage(store, item)
    refusal = quota.check(item, resource.storage, obj, used)
    if refusal is not None:
        raise resource.forbidden(obj["metadata"]["name"], refusal.message)


def quota_usage(store: ObjectStore, item: Object) -> dict[str, Decimal]:
    """Return the usage of a quota's namespace, by the quota's names.

    Args:
        store: that holds the namespace's objects.
        item: the ResourceQuota.
    """
    names = list(lookup(item, "spec", "hard") or ())
    namespace = item["metadata"]["namespace"]
    served = set(store.registry.storages())
    objects = {name: store.scan(name, namespace) for name in quota.storages(names) if name in served}
    return quota.total(objects, names)


def _service_account(store: ObjectStore, resource: ResourceType, obj: Object) -> None:
    spec, namespace = obj["spec"], obj["metadata"]["namespace"]
    name = spec.get("serviceAccountName") or "default"
    account = store.peek("serviceaccounts", name, namespace)
    if account is None:
        text = f'error looking up service account {namespace}/{name}: serviceaccount "{name}" not found'
        raise resource.forbidden(obj["metadata"]["name"], text)
    spec["serviceAccountName"] = spec["serviceAccount"] = name
    said = spec.get("automountServiceAccountToken")
    if said is None:
        said = account.get("automountServiceAccountToken")
    if said is not False:
        _mount_token(spec)


def _mount_token(spec: Object) -> None:
    """Show token, authority and namespace to each container that mounts nothing there itself."""
    volumes = spec.get("volumes") or []
    known = (volume["name"] for volume in volumes if str(volume.get("name")).startswith(_TOKEN_VOLUME))
    name = next(known, None)
    used = False
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        mounts = container.get("volumeMounts") or []
        if any(mount.get("mountPath") == TOKEN_PATH for mount in mounts):
            continue
        used, name = True, name or _TOKEN_VOLUME + random_suffix()
        container["volumeMounts"] = [*mounts, {"name": name, "readOnly": True, "mountPath": TOKEN_PATH}]
    if not used or any(volume.get("name") == name for volume in volumes):
        return
    field = {"apiVersion": "v1", "fieldPath": "metadata.namespace"}
    sources = [
        {"serviceAccountToken": {"expirationSeconds": _TOKEN_SECONDS, "path": "token"}},
        {"configMap": {"name": ROOT_AUTHORITY, "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
        {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": field}]}},
    ]
    projected = {"sources": sources, "defaultMode": 0o644}
    spec["volumes"] = [*volumes, {"name": name, "projected": projected}]


def _priority(store: ObjectStore, resource: ResourceType, obj: Object) -> None:
    spec = obj["spec"]
    name = spec.get("priorityClassName")
    found: Object | None
    if name:
        found = store.peek("priorityclasses.scheduling.k8s.io", name)
        if found is None:
            text = f"no PriorityClass with name {name} was found"
            raise resource.forbidden(obj["metadata"]["name"], text)
    else:
        classes = store.scan("priorityclasses.scheduling.k8s.io")
        found = next((item for item in classes if item.get("globalDefault")), None)
        if found is not None:
            spec["priorityClassName"] = found["metadata"]["name"]
    spec["priority"] = found["value"] if found is not None else 0
    policy = found.get("preemptionPolicy") if found is not None else None
    spec.setdefault("preemptionPolicy", policy or "PreemptLowerPriority")


def _tolerations(spec: Object) -> None:
    given = spec.setdefault("tolerations", [])
    for key in _DEFAULT_TOLERATIONS:
        covered = any(
            toleration.get("key") in (key, None, "") and toleration.get("effect") in ("NoExecute", None, "")
            for toleration in given
        )
        if not covered:
            given.append(
                {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _SECONDS}
            )
