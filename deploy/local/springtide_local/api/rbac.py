"""Role-based access control as a pure decision: what is granted, and whether a request is among it.

`authorize` follows Kubernetes' RBAC authorizer: rights only add up, nothing denies, and a member of
`system:masters` may do everything. `Policy` is what the stored roles and bindings say; `rights.Rights` keeps
one that is up to date.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from springtide_local.ports import Object

GROUP = "rbac.authorization.k8s.io"
MASTERS = "system:masters"
EVERYTHING = "*"
ACCOUNT_PREFIX = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Attributes:
    """A request as rules see it: either about a resource, or (`resource` empty) about a `path`."""

    verb: str
    group: str = ""
    resource: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def combined(self) -> str:
        """Return `RESOURCE` or `RESOURCE/SUBRESOURCE`, as rules spell it."""
        return f"{self.resource}/{self.subresource}" if self.subresource else self.resource


class Rule(NamedTuple):
    """A PolicyRule; an empty `names` stands for all names."""

    verbs: frozenset[str]
    groups: frozenset[str] = frozenset()
    resources: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    urls: tuple[str, ...] = ()

    def allows(self, asked: Attributes) -> bool:
        """Return whether the rule covers the request."""
        if asked.verb not in self.verbs and EVERYTHING not in self.verbs:
            return False
        if not asked.resource:
            return any(url_matches(url, asked.path) for url in self.urls)
        return (
            (asked.group in self.groups or EVERYTHING in self.groups)
            and self._has_resource(asked)
            and (not self.names or asked.name in self.names)
        )

    def _has_resource(self, asked: Attributes) -> bool:
        if asked.combined in self.resources or EVERYTHING in self.resources:
            return True
        return bool(asked.subresource) and f"*/{asked.subresource}" in self.resources


class Grant(NamedTuple):
    """A binding as it concerns one user: its rules, or why there are none.

    `namespace` is empty where the rules hold everywhere; `source` describes the binding as Kubernetes does.
    """

    namespace: str
    source: str
    rules: tuple[Rule, ...] = ()
    problem: str = ""


class Decision(NamedTuple):
    """Whether a request is allowed, and why: the binding that allows it, or what could not be looked up."""

    allowed: bool
    reason: str = ""


def authorize(grants: Iterable[Grant], groups: Sequence[str], asked: Attributes) -> Decision:
    """Decide on a request by what its user is granted.

    Args:
        grants: Of the user, as `Policy.grants` tells them; those for other namespaces do not count.
        groups: The user's groups.
        asked: The request.
    """
    if MASTERS in groups:
        return Decision(True)
    problems = []
    for grant in grants:
        if grant.namespace and grant.namespace != asked.namespace:
            continue
        if any(rule.allows(asked) for rule in grant.rules):
            return Decision(True, f"RBAC: allowed by {grant.source}")
        if grant.problem:
            problems.append(grant.problem)
    if not problems:
        return Decision(False)
    unique = list(dict.fromkeys(problems))
    return Decision(False, "RBAC: " + (unique[0] if len(unique) == 1 else "[" + ", ".join(unique) + "]"))


def url_matches(pattern: str, path: str) -> bool:
    """Return whether a nonResourceURL of a rule covers a path; only a star at its end is one.

    Args:
        pattern: of the rule.
        path: of the URL.
    """
    if pattern in (EVERYTHING, path):
        return True
    return pattern.endswith("*") and path.startswith(pattern.rstrip("*"))


def parse_rule(rule: Object) -> Rule:
    """Return a PolicyRule in the form in which it is evaluated."""
    return Rule(
        frozenset(rule.get("verbs") or ()),
        frozenset(rule.get("apiGroups") or ()),
        frozenset(rule.get("resources") or ()),
        frozenset(rule.get("resourceNames") or ()),
        tuple(rule.get("nonResourceURLs") or ()),
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """The stored roles and bindings: `roles` by (namespace, name), cluster roles under namespace ""."""

    roles: dict[tuple[str, str], tuple[Rule, ...]]
    bindings: tuple[Object, ...]

    @classmethod
    def of(cls, roles: Iterable[Object], bindings: Iterable[Object]) -> Policy:
        """Read roles and bindings.

        Args:
            roles: all Roles and ClusterRoles.
            bindings: all of both kinds; cluster-wide ones come first in the policy.
        """
        parsed = {
            (role["metadata"].get("namespace") or "", role["metadata"]["name"]): tuple(
                parse_rule(rule) for rule in role.get("rules") or ()
            )
            for role in roles
        }
        ordered = sorted(bindings, key=lambda binding: bool(binding["metadata"].get("namespace")))
        return cls(parsed, tuple(ordered))

    def grants(self, user: str, groups: Sequence[str]) -> tuple[Grant, ...]:
        """Return what all bindings give to a user.

        Args:
            user: the name.
            groups: that the user is in.
        """
        return tuple(self._grants(user, frozenset(groups)))

    def _grants(self, user: str, groups: frozenset[str]) -> Iterator[Grant]:
        for binding in self.bindings:
            namespace = binding["metadata"].get("namespace") or ""
            subject = next(
                (s for s in binding.get("subjects") or () if _is_subject(s, user, groups, namespace)), None
            )
            if subject is None:
                continue
            source = _describe(binding, subject, namespace)
            kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            rules = self.rules_of(kind, name, namespace)
            if rules is None:
                yield Grant(namespace, source, (), f'{kind.lower()}.{GROUP} "{name}" not found')
            else:
                yield Grant(namespace, source, rules)

    def rules_of(self, kind: str, name: str, namespace: str) -> tuple[Rule, ...] | None:
        """Return the rules of a role that a binding names.

        Args:
            kind: Role or ClusterRole.
            name: of the role.
            namespace: of the binding; "" for one that holds everywhere.

        Returns:
            None where there is no such role.
        """
        return self.roles.get(("" if kind == "ClusterRole" else namespace, name))


def _is_subject(subject: Object, user: str, groups: frozenset[str], namespace: str) -> bool:
    match subject.get("kind"):
        case "User":
            return bool(subject.get("name") == user)
        case "Group":
            return subject.get("name") in groups
        case "ServiceAccount":
            home = subject.get("namespace") or namespace
            return bool(home) and user == f"{ACCOUNT_PREFIX}{home}:{subject.get('name')}"
    return False


def _describe(binding: Object, subject: Object, namespace: str) -> str:
    kind = "RoleBinding" if namespace else "ClusterRoleBinding"
    name = binding["metadata"]["name"] + (f"/{namespace}" if namespace else "")
    who = subject["name"]
    if subject["kind"] == "ServiceAccount":
        who += f"/{subject.get('namespace') or namespace}"
    role = binding["roleRef"]
    return f'{kind} "{name}" of {role["kind"]} "{role["name"]}" to {subject["kind"]} "{who}"'


# Escalation: nobody may grant what he does not hold himself.


def missing(held: Iterable[Rule], wanted: Iterable[Rule]) -> list[Rule]:
    """Return the parts of the wanted rules that none of the held rules covers, with their verbs together.

    Args:
        held: rules that hold.
        wanted: rules that are to be given.
    """
    held = tuple(held)
    verbs: dict[Rule, set[str]] = {}
    for rule in wanted:
        for part in _parts(rule):
            if not any(_covers(mine, part) for mine in held):
                verbs.setdefault(part._replace(verbs=frozenset()), set()).update(part.verbs)
    return [part._replace(verbs=frozenset(found)) for part, found in verbs.items()]


def _parts(rule: Rule) -> Iterator[Rule]:
    """Yield the rule as rules of one verb, group, resource and name, or of one verb and URL, each."""
    for verb in sorted(rule.verbs):
        one = frozenset((verb,))
        for group in sorted(rule.groups):
            for resource in sorted(rule.resources):
                for names in [frozenset((name,)) for name in sorted(rule.names)] or [frozenset[str]()]:
                    yield Rule(one, frozenset((group,)), frozenset((resource,)), names)
        for url in rule.urls:
            yield Rule(one, urls=(url,))


def _covers(mine: Rule, part: Rule) -> bool:
    if not (EVERYTHING in mine.verbs or part.verbs <= mine.verbs):
        return False
    if part.urls:
        return any(url_matches(url, part.urls[0]) for url in mine.urls)
    (resource,) = part.resources
    _, slash, sub = resource.partition("/")
    return (
        (EVERYTHING in mine.groups or part.groups <= mine.groups)
        and (
            EVERYTHING in mine.resources
            or resource in mine.resources
            or bool(slash and f"*/{sub}" in mine.resources)
        )
        and (not mine.names or (bool(part.names) and part.names <= mine.names))
    )


def describe_rule(rule: Rule) -> str:
    """Return a rule as the API server writes it into a refusal."""
    named = (
        ("APIGroups", sorted(rule.groups)),
        ("Resources", sorted(rule.resources)),
        ("NonResourceURLs", list(rule.urls)),
        ("ResourceNames", sorted(rule.names)),
        ("Verbs", sorted(rule.verbs)),
    )
    return "{" + ", ".join(f"{name}:{quoted(values)}" for name, values in named if values) + "}"


def quoted(values: Iterable[str]) -> str:
    """Return texts as Go prints a slice of strings: `["a" "b"]`."""
    return "[" + " ".join(f'"{value}"' for value in values) + "]"
