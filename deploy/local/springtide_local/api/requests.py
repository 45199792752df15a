"""What a request asks for: its path, verb and options, apart from any HTTP library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.resources import Registry, ResourceType
from springtide_local.api.writes import Options
from springtide_local.ports import ApiError


@dataclass(frozen=True, slots=True)
class Target:
    """A resource, an object of it or a part of one. `namespace` is None for cluster scope and for all
    namespaces.
    """

    resource: ResourceType
    namespace: str | None = None
    name: str = ""
    subresource: str = ""

    def invalid_verb(self) -> ApiError:
        return errors.method_not_allowed()


def parse_target(registry: Registry, path: str) -> Target | None:
    """The target of `/api/v1/...` or `/apis/GROUP/VERSION/...`; None when no served resource lies there."""
    parts = path.strip("/").split("/")
    if parts[0] == "api" and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[0] == "apis" and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        return None
    namespace: str | None = None
    inside = len(rest) > 2 and not (len(rest) == 3 and rest[2] in ("status", "finalize") and not group)
    if rest[0] == "namespaces" and (inside or group):
        if len(rest) < 3:
            return None
        namespace, rest = rest[1], rest[2:]
    resource = registry.find(group, version, rest[0])
    if resource is None or len(rest) > 3 or ((namespace is not None) and not resource.namespaced):
        return None
    name, subresource = (rest[1] if len(rest) > 1 else ""), (rest[2] if len(rest) > 2 else "")
    if name and resource.namespaced and namespace is None:
        return None
    return Target(resource, namespace, name, subresource)


def verb_of(method: str, target: Target, watch: bool) -> str:
    """The verb as RBAC and audit name it. Raise ApiError 405."""
    if method in ("GET", "HEAD"):
        if target.name:
            return "get"
        return "watch" if watch else "list"
    if method == "DELETE":
        return "delete" if target.name else "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch"}
    if method not in verbs or (method in ("PUT", "PATCH") and not target.name):
        raise errors.method_not_allowed()
    return verbs[method]


def flag(query: Mapping[str, str], name: str) -> bool:
    return query.get(name, "").lower() in ("1", "true", "t")


def number(query: Mapping[str, str], name: str) -> int | None:
    """Raise ApiError 400 for text that is no number."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise errors.bad_request(
            f'strconv.ParseInt: parsing "{text}": invalid syntax (parameter {name})'
        ) from None


def write_options(query: Mapping[str, str], user_agent: str, subresource: str = "") -> Options:
    """Raise ApiError 422 for values of dryRun and fieldValidation that do not exist."""
    dry_run = query.get("dryRun", "")
    validation = query.get("fieldValidation", "") or "Warn"
    found: list[FieldError] = []
    if dry_run not in ("", "All"):
        found.append(errors.field_unsupported("dryRun", dry_run, ("All",)))
    if validation not in ("Ignore", "Warn", "Strict"):
        found.append(
            errors.field_unsupported("fieldValidation", validation, ("", "Ignore", "Strict", "Warn"))
        )
    if found:
        raise errors.invalid("meta.k8s.io", "PatchOptions", "", found)
    manager = query.get("fieldManager", "") or user_agent.partition("/")[0] or "unknown"
    return Options(manager, subresource or None, bool(dry_run), validation)


class Use(NamedTuple):
    """One way in which the API was used."""

    user: str
    verb: str
    group: str
    resource: str
    subresource: str
    user_agent: str


class Audit:
    """Counts every request by who did what; `cleared()` starts anew."""

    def __init__(self) -> None:
        self.counts: Counter[Use] = Counter()

    def count(self, user: str, verb: str, target: Target, user_agent: str) -> None:
        resource = target.resource
        self.counts[Use(user, verb, resource.group, resource.plural, target.subresource, user_agent)] += 1

    def clear(self) -> None:
        self.counts.clear()

    def report(self) -> list[dict[str, object]]:
        return [{**use._asdict(), "count": count} for use, count in sorted(self.counts.items())]
