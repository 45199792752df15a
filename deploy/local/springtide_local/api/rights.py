"""Rights by the stored roles and bindings, and the questions that the API server asks of them."""

from __future__ import annotations

from collections.abc import Sequence

from springtide_local.api import errors, rbac
from springtide_local.api.auth import User
from springtide_local.api.collection import Change
from springtide_local.api.object_store import ObjectStore
from springtide_local.api.objects import clone
from springtide_local.api.rbac import GROUP, MASTERS, Attributes, Decision, Grant, Policy, Rule, parse_rule
from springtide_local.api.resources import ResourceType
from springtide_local.api.selectors import selector_of
from springtide_local.ports import Object

ROLES = (f"roles.{GROUP}", f"clusterroles.{GROUP}")
BINDINGS = (f"rolebindings.{GROUP}", f"clusterrolebindings.{GROUP}")
_MOST_USERS = 1000  # whose grants are remembered
_ALL = (
    Rule(frozenset("*"), frozenset("*"), frozenset("*")),
    Rule(frozenset("*"), urls=("*",)),
)


class Rights:
    """Answers by a policy that is read again when a role or binding has changed.

    A user's grants are remembered until then, so a request costs a look at his own rules only.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._policy: Policy | None = None
        self._grants: dict[tuple[str, tuple[str, ...]], tuple[Grant, ...]] = {}
        store.listeners.append(self._changed)

    def _changed(self, storage: str, change: Change) -> None:
        if storage in ROLES or storage in BINDINGS:
            self._policy = None
            self._grants.clear()

    @property
    def policy(self) -> Policy:
        """Return what the stored roles and bindings say."""
        if self._policy is None:
            self._policy = Policy.of(
                [role for storage in ROLES for role in self._store.scan(storage)],
                [binding for storage in BINDINGS for binding in self._store.scan(storage)],
            )
        return self._policy

    def grants(self, user: User) -> tuple[Grant, ...]:
        """Return what all bindings give to the user."""
        key = (user.name, user.groups)
        found = self._grants.get(key)
        if found is None:
            if len(self._grants) >= _MOST_USERS:
                self._grants.clear()
            found = self._grants[key] = self.policy.grants(user.name, user.groups)
        return found

    def decide(self, user: User, asked: Attributes) -> Decision:
        """Decide whether the user may do something.

        Args:
            user: of the request.
            asked: what the request wants to do.
        """
        if MASTERS in user.groups:
            return Decision(True)
        return rbac.authorize(self.grants(user), user.groups, asked)

    def demand(self, user: User, asked: Attributes) -> None:
        """Refuse what the user may not do.

        Args:
            user: of the request.
            asked: what the request wants to do.

        Raises:
            ApiError: 403, in the API server's words.
        """
        decision = self.decide(user, asked)
        if not decision.allowed:
            raise errors.not_allowed(user.name, asked, decision.reason)

    def rules(self, user: User, namespace: str) -> list[Rule]:
        """Return all rules that hold for the user in a namespace.

        Args:
            user: of the request.
            namespace: its name; "": only those that hold everywhere.
        """
        if MASTERS in user.groups:
            return list(_ALL)
        return [
            rule
            for grant in self.grants(user)
            if not grant.namespace or grant.namespace == namespace
            for rule in grant.rules
        ]

    def check_escalation(self, user: User, resource: ResourceType, obj: Object, old: Object | None) -> None:
        """Raise ApiError 403 when somebody grants what he does not hold, unless he may escalate or bind.

        Args:
            user: The writer.
            resource: Of which kind the object is; others than those of RBAC are not looked at.
            obj: The object to be written.
            old: The object as it was, or None for a new one.
        """
        if resource.group != GROUP or MASTERS in user.groups:
            return
        if resource.storage in ROLES:
            self._check_role(user, resource, obj, old)
        elif old is None or any(obj.get(part) != old.get(part) for part in ("subjects", "roleRef")):
            self._check_binding(user, resource, obj)

    def _check_role(self, user: User, resource: ResourceType, obj: Object, old: Object | None) -> None:
        parts = ("rules", "aggregationRule")
        if old is not None and all((obj.get(part) or None) == (old.get(part) or None) for part in parts):
            return
        meta = obj["metadata"]
        namespace = meta.get("namespace") or ""
        asked = Attributes("escalate", GROUP, resource.plural, namespace=namespace, name=meta["name"])
        if self.decide(user, asked).allowed:
            return
        if obj.get("aggregationRule") and rbac.missing(self.rules(user, ""), _ALL):
            raise resource.forbidden(
                meta["name"], "must have cluster-admin privileges to use the aggregationRule"
            )
        wanted = [parse_rule(rule) for rule in obj.get("rules") or ()]
        self._confirm(user, resource, obj, wanted, namespace)

    def _check_binding(self, user: User, resource: ResourceType, obj: Object) -> None:
        namespace = obj["metadata"].get("namespace") or ""
        kind, name = obj["roleRef"]["kind"], obj["roleRef"]["name"]
        plural = "clusterroles" if kind == "ClusterRole" else "roles"
        if self.decide(user, Attributes("bind", GROUP, plural, namespace=namespace, name=name)).allowed:
            return
        wanted = self.policy.rules_of(kind, name, namespace)
        if wanted is None:
            raise errors.not_found(GROUP, kind.lower(), name)
        self._confirm(user, resource, obj, wanted, namespace)

    def _confirm(
        self, user: User, resource: ResourceType, obj: Object, wanted: Sequence[Rule], namespace: str
    ) -> None:
        lacking = rbac.missing(self.rules(user, namespace), wanted)
        if lacking:
            lines = "\n".join(sorted({rbac.describe_rule(rule) for rule in lacking}))
            text = (
                f'user "{user.name}" (groups={rbac.quoted(user.groups)}) is attempting to grant RBAC '
                f"permissions not currently held:\n{lines}"
            )
            raise resource.forbidden(obj["metadata"]["name"], text)


def aggregated(store: ObjectStore) -> dict[str, list[Object]]:
    """Return, by name, the rules of cluster roles whose aggregationRule selects others than they have.

    A role that is selected may be such a role itself, so ask again once these are written.
    """
    found: dict[str, list[Object]] = {}
    roles = sorted(store.scan(ROLES[1]), key=lambda role: str(role["metadata"]["name"]))
    for role in roles:
        rule = role.get("aggregationRule")
        if not rule:
            continue
        selectors = [selector_of(selector) for selector in rule.get("clusterRoleSelectors") or ()]
        rules: list[Object] = []
        for selector in selectors:
            for other in roles:
                if other is not role and selector.matches(other["metadata"].get("labels")):
                    rules += [one for one in other.get("rules") or () if one not in rules]
        if rules != (role.get("rules") or []):
            found[role["metadata"]["name"]] = clone({"rules": rules})["rules"]
    return found
