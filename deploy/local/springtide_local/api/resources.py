"""Which resources are served, and what distinguishes them. `Registry` holds the built-in ones and those of
the CRDs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from springtide_local.api import errors
from springtide_local.api.kinds.base import Kind
from springtide_local.api.objects import subdomain_problem
from springtide_local.api.schema import Node
from springtide_local.api.selectors import FieldGetter
from springtide_local.ports import ApiError, Object

ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


@dataclass(frozen=True, slots=True)
class ScalePaths:
    """Paths of field names at which the scale subresource finds its numbers."""

    spec_replicas: tuple[str, ...]
    status_replicas: tuple[str, ...]
    selector: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class View:
    """A second shape of the same stored objects (events.k8s.io shows core events)."""

    show: Callable[[Object], Object]
    store: Callable[[Object], Object]


@dataclass(slots=True)
class ResourceType:
    """One resource in one version. `storage` names the collection (`pods`, `deployments.apps`), shared by
    versions.
    """

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool
    singular: str = ""
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    subresources: frozenset[str] = frozenset()
    storage: str = ""
    make_node: Callable[[], Node] | None = None
    rules: Kind = field(default_factory=Kind)
    custom: bool = False
    generation: bool = False
    scale: ScalePaths | None = None
    view: View | None = None
    name_problem: Callable[[str], str | None] = subdomain_problem
    field_getters: Mapping[str, FieldGetter] = field(default_factory=dict)
    unconditional_update: bool = True
    deletion_returns_object: bool = False
    columns: list[Object] = field(default_factory=list)
    schema: Object | None = None
    _node: Node | None = None

    def __post_init__(self) -> None:
        self.singular = self.singular or self.kind.lower()
        self.storage = self.storage or errors.qualified(self.group, self.plural)

    @property
    def node(self) -> Node | None:
        """The compiled schema, made on first use."""
        if self._node is None and self.make_node is not None:
            self._node = self.make_node()
        return self._node

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def has_status(self) -> bool:
        return "status" in self.subresources

    def not_found(self, name: str) -> ApiError:
        return errors.not_found(self.group, self.plural, name)

    def invalid(self, name: str, found: list[errors.FieldError]) -> ApiError:
        """Return the refusal, 422, of an object.

        Args:
            name: of the object.
            found: one error for each wrong field.
        """
        return errors.invalid(self.group, self.kind, name, found)

    def forbidden(self, name: str, why: str, causes: list[Object] | None = None) -> ApiError:
        """Return the refusal, 403, of a write.

        Args:
            name: of the object.
            why: in words.
            causes: one object for each reason, for `details.causes`.
        """
        return errors.forbidden(self.group, self.plural, name, why, causes or [])


class Registry:
    """All served resources. CRDs come and go; `changed` counts that, for discovery and OpenAPI caches."""

    def __init__(self, builtin: list[ResourceType]) -> None:
        self._by_path: dict[tuple[str, str, str], ResourceType] = {}
        self._by_storage: dict[str, ResourceType] = {}
        self.changed = 0
        for resource in builtin:
            self.add(resource)

    def add(self, resource: ResourceType, stores: bool = True) -> None:
        """Serve a resource.

        Args:
            resource: in one version; it takes the place of the same one.
            stores: it is the version in which objects are kept.
        """
        self._by_path[resource.group, resource.version, resource.plural] = resource
        if stores and resource.view is None:
            self._by_storage[resource.storage] = resource
        self.changed += 1

    def remove(self, group: str, plural: str) -> None:
        """Serve a resource no more, in any version.

        Args:
            group: of the API; "" for core.
            plural: name of the resource in URLs.
        """
        for path in [path for path in self._by_path if path[0] == group and path[2] == plural]:
            removed = self._by_path.pop(path)
            self._by_storage.pop(removed.storage, None)
        self.changed += 1

    def find(self, group: str, version: str, plural: str) -> ResourceType | None:
        """Return the resource of a URL; None when it is not served.

        Args:
            group: of the API; "" for core.
            version: of the API.
            plural: name of the resource in URLs.
        """
        return self._by_path.get((group, version, plural))

    def stored(self, storage: str) -> ResourceType:
        """Raise ApiError 404 for a resource that is not served."""
        found = self._by_storage.get(storage)
        if found is None:
            raise errors.no_such_path()
        return found

    def storages(self) -> list[str]:
        return list(self._by_storage)

    def of_kind(self, api_version: str, kind: str) -> ResourceType | None:
        """Return the resource of a manifest; None when it is not served.

        Args:
            api_version: with the group, as `apps/v1`.
            kind: as manifests spell it.
        """
        for resource in self:
            if resource.kind == kind and resource.api_version == api_version:
                return resource
        return None

    def __iter__(self) -> Iterator[ResourceType]:
        return iter(self._by_path.values())

    def group_versions(self) -> dict[str, list[str]]:
        """Served versions by group, the preferred one first, core (`""`) first."""
        found: dict[str, list[str]] = {}
        for group, version, _ in self._by_path:
            versions = found.setdefault(group, [])
            if version not in versions:
                versions.append(version)
        for versions in found.values():
            versions.sort(key=version_priority, reverse=True)
        return found


def version_priority(version: str) -> tuple[int, int, int]:
    """Kubernetes' order of versions: v2 > v1 > v1beta2 > v1beta1 > v1alpha1."""
    match = re.match(r"v(\d+)(?:(alpha|beta)(\d+))?\Z", version)
    if match is None:
        return (0, 0, 0)
    stage = {None: 3, "beta": 2, "alpha": 1}[match.group(2)]
    return (stage, int(match.group(1)), int(match.group(3) or 0))


def get_path(obj: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path; None where there is none.

    Args:
        obj: decoded JSON.
        path: names of fields, from the outermost on.
    """
    for step in path:
        if not isinstance(obj, dict):
            return None
        obj = obj.get(step)
    return obj


def set_path(obj: Object, path: tuple[str, ...], value: Any) -> None:
    """Set the value at a path, in place; objects on the way are made.

    Args:
        obj: decoded JSON.
        path: names of fields, at least one.
        value: decoded JSON.
    """
    for step in path[:-1]:
        obj = obj.setdefault(step, {})
    obj[path[-1]] = value
