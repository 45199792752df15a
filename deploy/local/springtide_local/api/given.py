"""What every namespace is given: the service account `default`, and the authority by which pods trust the API
server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from springtide_local.ports import Object

if TYPE_CHECKING:
    from springtide_local.api.store import Store

ROOT_AUTHORITY = "kube-root-ca.crt"
GIVEN = (("serviceaccounts", "default"), ("configmaps", ROOT_AUTHORITY))
_ABOUT = (
    "Contains a CA bundle that can be used to verify the kube-apiserver when using internal endpoints such "
    "as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across distributions "
    "of Kubernetes clusters."
)


def provide(store: Store, namespace: str) -> None:
    """Make what the namespace lacks; one that is going away, or has gone, gets nothing.

    Raises:
        ApiError: A quota of the namespace is full.
    """
    space = store.peek("namespaces", namespace)
    if space is None or space["metadata"].get("deletionTimestamp"):
        return
    if store.peek("serviceaccounts", "default", namespace) is None:
        store.create("serviceaccounts", {"metadata": {"name": "default"}}, namespace)
    if not store.authority:
        return
    data = {"ca.crt": store.authority}
    found = store.peek("configmaps", ROOT_AUTHORITY, namespace)
    if found is None:
        meta = {"name": ROOT_AUTHORITY, "annotations": {"kubernetes.io/description": _ABOUT}}
        store.create("configmaps", {"metadata": meta, "data": data}, namespace)
    elif found.get("data") != data:

        def change(obj: Object) -> None:
            obj["data"] = data

        store.mutate("configmaps", ROOT_AUTHORITY, namespace, change)
