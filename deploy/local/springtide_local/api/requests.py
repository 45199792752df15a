"""Parsing of requests: path, verb and options, apart from any HTTP library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from springtide_local.api import bodies, errors
from springtide_local.api.errors import FieldError
from springtide_local.api.rbac import Attributes
from springtide_local.api.resources import Registry, ResourceType
from springtide_local.api.writes import Deletion, Options
from springtide_local.ports import ApiError

_MANAGER_BYTES = 128


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
    """Return what the path of a URL names.

    Args:
        registry: the resources that are served.
        path: `/api/v1/...` or `/apis/GROUP/VERSION/...`.

    Returns:
        None when no served resource lies there.
    """
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


_VERBS = {
    "GET": "get",
    "HEAD": "get",
    "POST": "create",
    "PUT": "update",
    "PATCH": "patch",
    "DELETE": "delete",
}


def attributes_of(method: str, path: str, query: Mapping[str, str], target: Target | None) -> Attributes:
    """Return what rules say about a request, as Kubernetes' RequestInfo does.

    Args:
        method: The HTTP method.
        path: The decoded path.
        query: The decoded query.
        target: The resource that is served there, or None: rights are asked for also where nothing is served.
    """
    parts = path.strip("/").split("/")
    first = {"api": 2, "apis": 3}.get(parts[0], len(parts))
    if len(parts) <= first:
        return Attributes(method.lower(), path=path)
    verb = _VERBS.get(method, "")
    if target is not None:
        resource = target.resource
        group, plural, namespace = resource.group, resource.plural, target.namespace or ""
        name, subresource = target.name, target.subresource
        if (group, plural) == ("", "namespaces"):
            namespace = name
    else:
        group, rest = ("" if first == 2 else parts[1]), parts[first:]
        if rest[0] == "watch" and len(rest) > 1:
            verb, rest = "watch", rest[1:]
        namespace = rest[1] if rest[0] == "namespaces" and len(rest) > 1 else ""
        if namespace and len(rest) > 2 and rest[2] not in ("status", "finalize"):
            rest = rest[2:]
        plural, name, subresource = [*rest, "", ""][:3]
        if not plural:
            return Attributes(method.lower(), path=path)
    if not name and verb == "get":
        verb = "watch" if flag(query, "watch") else "list"
        name = _only_name(query.get("fieldSelector", ""))
    elif not name and verb == "delete":
        verb = "deletecollection"
    return Attributes(verb, group, plural, subresource, namespace, name)


def _only_name(selector: str) -> str:
    """Return the one name that a field selector allows, so that a right to that name is enough."""
    for term in selector.split(","):
        key, equals, value = term.partition("=")
        if equals and key.strip() == "metadata.name":
            return value.removeprefix("=").strip()
    return ""


def verb_of(method: str, target: Target, watch: bool) -> str:
    """Return the verb of a request, as RBAC and audit name it.

    Args:
        method: of HTTP.
        target: of the request.
        watch: it asks for changes, not for a list.

    Raises:
        ApiError: 405: the method is not served there.
    """
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
    """Return whether a parameter is set.

    Args:
        query: parameters of the URL.
        name: of the parameter.
    """
    return query.get(name, "").lower() in ("1", "true", "t")


def number(query: Mapping[str, str], name: str) -> int | None:
    """Return a parameter that is a number.

    Args:
        query: parameters of the URL.
        name: of the parameter.

    Returns:
        None without it.

    Raises:
        ApiError: 400: it is no integer of 64 bits.
    """
    text = query.get(name, "")
    if not text:
        return None
    value = decimal(text)
    if value is None or not -(2**63) <= value < 2**63:
        problem = "invalid syntax" if value is None else "value out of range"
        raise errors.bad_request(f'strconv.ParseInt: parsing "{text}": {problem} (parameter {name})')
    return value


def decimal(text: str) -> int | None:
    """Return the number that a text of plain digits is, or None; beyond 64 bits, some number beyond them."""
    if re.fullmatch("[+-]?[0-9]+", text) is None:
        return None
    digits = text.lstrip("+-0")[:21] or "0"  # all of them would be refused by int(), or take their time
    return -int(digits) if text[0] == "-" else int(digits)


def deletion(body: Mapping[str, Any], query: Mapping[str, str]) -> Deletion:
    """Return what a DELETE asks for.

    Args:
        body: DeleteOptions; empty without.
        query: parameters of the URL, which count where the body says nothing.

    Raises:
        ApiError: 400: a field has another type; 422: it has a value that does not exist.
    """
    options = dict(body)
    where = "DeleteOptions"
    for name, expected in (("kind", where), ("apiVersion", None)):
        given = bodies.of_type(options, where, name, "string")
        if expected and given not in (None, "", expected):
            raise errors.bad_request(f"no kind {given!r} is registered for options of a deletion")
    preconditions = bodies.of_type(options, where, "preconditions", "object") or {}
    uid = bodies.of_type(preconditions, "Preconditions", "uid", "string")
    version = bodies.of_type(preconditions, "Preconditions", "resourceVersion", "string")
    grace = bodies.of_type(options, where, "gracePeriodSeconds", "int64")
    if grace is None:
        grace = number(query, "gracePeriodSeconds")
    policy = bodies.of_type(options, where, "propagationPolicy", "string")
    policy = policy or query.get("propagationPolicy") or ""
    if policy not in ("", "Orphan", "Background", "Foreground"):
        supported = ("Foreground", "Background", "Orphan", "nil")
        found = [errors.field_unsupported("propagationPolicy", policy, supported)]
        raise errors.invalid("meta.k8s.io", where, "", found)
    orphan = bodies.of_type(options, where, "orphanDependents", "bool")
    return Deletion(grace, uid, version, policy == "Orphan" or bool(orphan))


def write_options(query: Mapping[str, str], user_agent: str, subresource: str = "") -> Options:
    """Return the options of a write.

    Args:
        query: parameters of the URL.
        user_agent: of the request; it names the manager where the query does not.
        subresource: that is written; "" for the object itself.

    Raises:
        ApiError: 422: a value of dryRun, fieldManager or fieldValidation cannot be.
    """
    dry_run = query.get("dryRun", "")
    validation = query.get("fieldValidation", "") or "Warn"
    found: list[FieldError] = []
    if dry_run not in ("", "All"):
        found.append(errors.field_unsupported("dryRun", dry_run, ("All",)))
    if validation not in ("Ignore", "Warn", "Strict"):
        found.append(
            errors.field_unsupported("fieldValidation", validation, ("", "Ignore", "Strict", "Warn"))
        )
    manager = query.get("fieldManager", "")
    if len(manager.encode(errors="replace")) > _MANAGER_BYTES:
        text = f"Too long: may not be more than {_MANAGER_BYTES} bytes"
        found.append(FieldError("fieldManager", errors.TOO_LONG, text))
    for at, char in enumerate(manager):
        if not char.isprintable():
            text = f"invalid character U+{ord(char):04X} (at position {at})"
            found.append(errors.field_invalid("fieldManager", manager, text))
            break
    manager = manager or _manager(user_agent) or "unknown"
    if found:
        raise errors.invalid("meta.k8s.io", "PatchOptions", "", found)
    return Options(manager, subresource or None, bool(dry_run), validation)


def _manager(user_agent: str) -> str:
    """Return the name of a program, as far as it can be printed: who manages fields without saying so."""
    name = "".join(char for char in user_agent.partition("/")[0] if char.isprintable())
    return name.encode()[:_MANAGER_BYTES].decode(errors="ignore")


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
        """Count a request.

        Args:
            user: who asks.
            verb: as `verb_of` names it.
            target: of the request.
            user_agent: the header's value.
        """
        resource = target.resource
        self.counts[Use(user, verb, resource.group, resource.plural, target.subresource, user_agent)] += 1

    def clear(self) -> None:
        self.counts.clear()

    def report(self) -> list[dict[str, object]]:
        return [{**use._asdict(), "count": count} for use, count in sorted(self.counts.items())]
