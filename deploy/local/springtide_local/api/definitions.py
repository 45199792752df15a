"""CRDs come and go: their resources are served from the write that makes them, and their objects go with
them.
"""

from __future__ import annotations

from springtide_local.api.kinds.crds import resources_of
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import clone
from springtide_local.ports import Object

FINALIZER = "customresourcecleanup.apiextensions.k8s.io"
STORAGE = "customresourcedefinitions.apiextensions.k8s.io"


def serve(store: ObjectStore, definition: Object) -> None:
    """Serve every version that the definition says, in place of what it said before.

    Args:
        store: of all objects.
        definition: the CustomResourceDefinition.
    """
    spec = definition["spec"]
    store.registry.remove(spec["group"], spec["names"]["plural"])
    for resource, stores in resources_of(clone(definition)):
        store.registry.add(resource, stores)


def withdraw(store: ObjectStore, definition: Object) -> None:
    """Stop to serve the definition's resource; its watches end.

    Args:
        store: of all objects.
        definition: the CustomResourceDefinition.
    """
    spec = definition["spec"]
    name = f"{spec['names']['plural']}.{spec['group']}"
    store.drop_collection(name)
    store.registry.remove(spec["group"], spec["names"]["plural"])


def hold(definition: Object) -> None:
    """A deleted definition stays, in place, until its objects are gone; their finalizers hold it too."""
    finalizers = definition["metadata"].setdefault("finalizers", [])
    if FINALIZER not in finalizers:
        finalizers.append(FINALIZER)


def is_terminating(store: ObjectStore, name: str) -> bool:
    """Return whether a definition is there and being deleted.

    Args:
        store: of all objects.
        name: of the definition.
    """
    definition = store.peek(STORAGE, name)
    return definition is not None and bool(definition["metadata"].get("deletionTimestamp"))
