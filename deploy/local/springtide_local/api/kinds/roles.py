"""Roles and bindings: what they must say."""

from __future__ import annotations

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind
from springtide_local.ports import Object

_GROUP = "rbac.authorization.k8s.io"


class Roles(Kind):
    """Checks the rules of a Role, or of a ClusterRole."""

    def __init__(self, namespaced: bool) -> None:
        self._namespaced = namespaced

    def check(self, obj: Object) -> list[FieldError]:
        found: list[FieldError] = []
        for index, rule in enumerate(obj.get("rules") or ()):
            path = f"rules[{index}]"
            if not rule.get("verbs"):
                found.append(errors.field_required(f"{path}.verbs", "verbs must contain at least one value"))
            if urls := rule.get("nonResourceURLs"):
                found += self._check_urls(rule, urls, path)
                continue
            for name in ("apiGroups", "resources"):
                if not rule.get(name):
                    what = "api group" if name == "apiGroups" else "resource"
                    text = f"resource rules must supply at least one {what}"
                    found.append(errors.field_required(f"{path}.{name}", text))
        return found

    def _check_urls(self, rule: Object, urls: list[str], path: str) -> list[FieldError]:
        where = f"{path}.nonResourceURLs"
        if self._namespaced:
            text = "namespaced rules cannot apply to non-resource URLs"
            return [errors.field_invalid(where, urls, text)]
        if any(rule.get(name) for name in ("apiGroups", "resources", "resourceNames")):
            text = "rules cannot apply to both regular resources and non-resource URLs"
            return [errors.field_invalid(where, urls, text)]
        return []


class RoleBindings(Kind):
    """Checks whom a RoleBinding, or a ClusterRoleBinding, names."""

    def __init__(self, namespaced: bool) -> None:
        self._namespaced = namespaced

    def default(self, obj: Object) -> None:
        reference = obj.get("roleRef")
        if isinstance(reference, dict):
            reference.setdefault("apiGroup", _GROUP)
        for subject in obj.get("subjects") or ():
            if isinstance(subject, dict) and subject.get("kind") in ("User", "Group"):
                subject.setdefault("apiGroup", _GROUP)

    def check(self, obj: Object) -> list[FieldError]:
        found: list[FieldError] = []
        kinds = ("ClusterRole", "Role") if self._namespaced else ("ClusterRole",)
        reference = obj["roleRef"]
        if reference.get("kind") not in kinds:
            found.append(errors.field_unsupported("roleRef.kind", reference.get("kind", ""), kinds))
        if not reference.get("name"):
            found.append(errors.field_required("roleRef.name"))
        for index, subject in enumerate(obj.get("subjects") or ()):
            path = f"subjects[{index}]"
            if not subject.get("name"):
                found.append(errors.field_required(f"{path}.name"))
            kind = subject.get("kind", "")
            if kind not in ("ServiceAccount", "User", "Group"):
                supported = ("Group", "ServiceAccount", "User")
                found.append(errors.field_unsupported(f"{path}.kind", kind, supported))
            elif kind == "ServiceAccount" and not self._namespaced and not subject.get("namespace"):
                found.append(errors.field_required(f"{path}.namespace"))
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error if the role is changed, which may not be.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        if obj.get("roleRef") != old.get("roleRef"):
            return [errors.field_invalid("roleRef", obj.get("roleRef"), "cannot change roleRef")]
        return []
