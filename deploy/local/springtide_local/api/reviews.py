"""Reviews: questions about rights and identities, answered without being stored."""

from __future__ import annotations

from dataclasses import replace

from springtide_local.api import errors
from springtide_local.api.auth import ISSUER, Tokens, User
from springtide_local.api.bodies import of_type
from springtide_local.api.rbac import Attributes, Rule
from springtide_local.api.rights import Rights
from springtide_local.ports import Object

ACCESS = ("SelfSubjectAccessReview", "SubjectAccessReview", "LocalSubjectAccessReview")


class Reviews:
    """Answers reviews by what is known and granted now."""

    def __init__(self, rights: Rights, tokens: Tokens) -> None:
        self._rights = rights
        self._tokens = tokens

    def answer(self, kind: str, body: Object, user: User, namespace: str = "") -> Object:
        """Return the review with its status.

        Args:
            kind: Which review.
            body: The review as it was sent.
            user: The asker.
            namespace: Where a LocalSubjectAccessReview was sent to.

        Raises:
            ApiError: 400 or 422 for a question that cannot be answered.
        """
        spec = of_type(body, kind, "spec", "object") or {}
        if kind in ACCESS:
            status = self._access(kind, spec, user, namespace)
        elif kind == "SelfSubjectRulesReview":
            namespace = of_type(spec, f"{kind}Spec", "namespace", "string")
            if not namespace:
                raise errors.bad_request("no namespace on request")
            status = _shown(self._rights.rules(user, namespace))
        elif kind == "TokenReview":
            status = self._token(spec)
        else:
            status = {"userInfo": _info(user)}
        about_tokens = kind in ("TokenReview", "SelfSubjectReview")
        group = "authentication.k8s.io" if about_tokens else "authorization.k8s.io"
        return {
            "kind": kind,
            "apiVersion": f"{group}/v1",
            "metadata": {"creationTimestamp": None},
            "spec": spec,
            "status": status,
        }

    def _access(self, kind: str, spec: Object, user: User, namespace: str) -> Object:
        about, other = (
            of_type(spec, f"{kind}Spec", name, "object")
            for name in ("resourceAttributes", "nonResourceAttributes")
        )
        if (about is None) == (other is None):
            text = "exactly one of nonResourceAttributes or resourceAttributes must be specified"
            wrong = errors.field_invalid("spec.resourceAttributes", about, text)
            raise errors.invalid("authorization.k8s.io", kind, "", [wrong])
        if kind != ACCESS[0]:
            user = _named(kind, spec)
        if about is not None:
            asked = _resource(about)
            if kind == ACCESS[2] and asked.namespace != namespace:
                wrong = errors.field_invalid(
                    "spec.resourceAttributes.namespace", asked.namespace, "must match metadata.namespace"
                )
                raise errors.invalid("authorization.k8s.io", kind, "", [wrong])
        else:
            asked = Attributes(*_texts(other or {}, "NonResourceAttributes", ("verb",)))
            asked = replace(asked, path=_texts(other or {}, "NonResourceAttributes", ("path",))[0])
        decision = self._rights.decide(user, asked)
        return {"allowed": decision.allowed, **({"reason": decision.reason} if decision.reason else {})}

    def _token(self, spec: Object) -> Object:
        audiences = of_type(spec, "TokenReviewSpec", "audiences", "[]string") or [ISSUER]
        found = self._tokens.check(of_type(spec, "TokenReviewSpec", "token", "string") or "", audiences)
        if found is None:
            return {"user": {}, "error": "invalid bearer token"}
        return {"authenticated": True, "user": _info(found), "audiences": audiences}


def _named(kind: str, spec: Object) -> User:
    """Return the user that a SubjectAccessReview is about."""
    name = of_type(spec, f"{kind}Spec", "user", "string") or ""
    groups = of_type(spec, f"{kind}Spec", "groups", "[]string") or []
    if not name and not groups:
        wrong = errors.field_invalid("spec.user", name, "at least one of user or group must be specified")
        raise errors.invalid("authorization.k8s.io", kind, "", [wrong])
    return User(name, tuple(groups))


def _resource(about: Object) -> Attributes:
    names = ("verb", "group", "resource", "subresource", "namespace", "name")
    return Attributes(*_texts(about, "ResourceAttributes", names))


def _texts(about: Object, where: str, names: tuple[str, ...]) -> list[str]:
    return [of_type(about, where, name, "string") or "" for name in names]


def _shown(rules: list[Rule]) -> Object:
    resources, urls = [], []
    for rule in rules:
        if rule.urls:
            urls.append({"verbs": sorted(rule.verbs), "nonResourceURLs": list(rule.urls)})
            continue
        shown = {
            "verbs": sorted(rule.verbs),
            "apiGroups": sorted(rule.groups),
            "resources": sorted(rule.resources),
        }
        if rule.names:
            shown["resourceNames"] = sorted(rule.names)
        resources.append(shown)
    return {"resourceRules": resources, "nonResourceRules": urls, "incomplete": False}


def _info(user: User) -> Object:
    info: Object = {"username": user.name, "groups": list(user.groups)}
    if user.uid:
        info["uid"] = user.uid
    return info
