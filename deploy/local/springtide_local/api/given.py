"""Objects that every namespace is given: the service account `default`, and the authority by which pods trust
the API server.
"""

from __future__ import annotations

from springtide_local.api.object_store import ObjectStore
from springtide_local.ports import Object

ROOT_AUTHORITY = "kube-root-ca.crt"
GIVEN = (("serviceaccounts", "default"), ("configmaps", ROOT_AUTHORITY))
_ABOUT = (
    "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such "
    "as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions "
    "of Kubernetes clusters."
)


def missing(store: ObjectStore, namespace: str) -> list[tuple[str, Object]]:
    """Return what the namespace lacks, as (resource, object); nothing for a namespace that goes away.

    Args:
        store: of all objects.
        namespace: its name.
    """
    space = store.peek("namespaces", namespace)
    if space is None or space["metadata"].get("deletionTimestamp"):
        return []
    found: list[tuple[str, Object]] = []
    if store.peek("serviceaccounts", "default", namespace) is None:
        found.append(("serviceaccounts", {"metadata": {"name": "default"}}))
    data = {"ca.crt": store.authority}
    known = store.peek("configmaps", ROOT_AUTHORITY, namespace)
    if store.authority and (known is None or known.get("data") != data):
        meta = {"name": ROOT_AUTHORITY, "annotations": {"kubernetes.io/description": _ABOUT}}
        found.append(("configmaps", {"metadata": meta, "data": data}))
    return found
