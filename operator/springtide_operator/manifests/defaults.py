"""Defaults that the operator's installer gives to the pods of all jobs, filled in where a pod is silent."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from typing import Any

from springtide_operator.api import names

Object = dict[str, Any]

# What the operator decides itself; a default for it would be of no effect, or break the job.
_RESERVED = {
    "metadata": {"name", "generateName", "namespace", "ownerReferences", "finalizers"},
    "spec": {"containers", "initContainers", "restartPolicy", "nodeName"},
    "container": {"name", "image", "command", "args", "terminationMessagePath"},
}
_OUR_LABELS = {names.LABEL_NAME, names.LABEL_MANAGED_BY}


@dataclass(frozen=True)
class PodDefaults:
    """`metadata` and `spec` are parts of a pod; `container` is for the container that runs our process."""

    metadata: Object = field(default_factory=dict)
    spec: Object = field(default_factory=dict)
    container: Object = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> PodDefaults:
        """Parse JSON. Raise ValueError that says where it is wrong."""
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError("must be an object with metadata, spec and container")
        for part, value in given.items():
            if part not in _RESERVED:
                raise ValueError(f"has no part {part!r}: it may have metadata, spec and container")
            if not isinstance(value, dict):
                raise ValueError(f"{part} must be an object")
            reserved = sorted(_RESERVED[part] & set(value))
            if reserved:
                raise ValueError(
                    f"{part}.{reserved[0]} cannot have a default: the job or the operator decides it"
                )
        for kind in ("labels", "annotations"):
            keys = given.get("metadata", {}).get(kind) or {}
            ours = sorted(key for key in keys if key.split("/")[0] == names.GROUP or key in _OUR_LABELS)
            if ours:
                raise ValueError(f"metadata.{kind} names {ours[0]!r}, which is the operator's own")
        return cls(**given)


def with_defaults(pod: Object, defaults: PodDefaults, container: str) -> Object:
    """Return a pod with what it lacks.

    Objects are filled in key by key. To a list those items are added whose `name` no item has (env, volumes,
    pull secrets), or, without names, which are not in it (tolerations). Everything else stays as it is where
    the pod says something.

    Args:
        pod: the Pod; it stays as it is.
        defaults: of the operator's installer.
        container: name of the one that `defaults.container` is for.
    """
    result = copy.deepcopy(pod)
    _fill(result["metadata"], defaults.metadata)
    _fill(result["spec"], defaults.spec)
    for item in result["spec"]["containers"]:
        if item["name"] == container:
            _fill(item, defaults.container)
    return result


def on_linux(pod: Object) -> Object:
    """Send a pod to nodes with Linux, which all images are for, where it does not choose by itself.

    Args:
        pod: the Pod, which is changed in place.

    Returns:
        The same.
    """
    pod["spec"].setdefault("nodeSelector", {}).setdefault("kubernetes.io/os", "linux")
    return pod


def _fill(target: Object, default: Object) -> None:
    for key, value in default.items():
        own = target.get(key)
        if own is None:
            target[key] = copy.deepcopy(value)
        elif isinstance(own, dict) and isinstance(value, dict):
            _fill(own, value)
        elif isinstance(own, list) and isinstance(value, list):
            taken = [item.get("name") for item in own if isinstance(item, dict) and "name" in item]
            own += [copy.deepcopy(item) for item in value if item not in own and _name(item) not in taken]


def _name(item: Any) -> Any:
    return item.get("name", item) if isinstance(item, dict) else item
