"""Reviews: questions about rights and identities, answered without being stored. Rights are not enforced
here.
"""

from __future__ import annotations

from springtide_local.api.auth import Tokens, User
from springtide_local.ports import Object


def answer(kind: str, body: Object, user: User, tokens: Tokens) -> Object:
    status: Object
    match kind:
        case "SelfSubjectAccessReview" | "SubjectAccessReview":
            status = {"allowed": True, "reason": "the embedded cluster does not enforce rights"}
        case "SelfSubjectRulesReview":
            everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
            urls = {"verbs": ["*"], "nonResourceURLs": ["*"]}
            status = {"resourceRules": [everything], "nonResourceRules": [urls], "incomplete": False}
        case "TokenReview":
            found = tokens.check((body.get("spec") or {}).get("token") or "")
            status = {"authenticated": found is not None}
            if found is not None:
                status["user"] = _info(found)
            else:
                status["error"] = "invalid bearer token"
        case _:
            status = {"userInfo": _info(user)}
    group = (
        "authentication.k8s.io" if kind in ("TokenReview", "SelfSubjectReview") else "authorization.k8s.io"
    )
    return {
        "kind": kind,
        "apiVersion": f"{group}/v1",
        "metadata": {"creationTimestamp": None},
        "spec": body.get("spec") or {},
        "status": status,
    }


def _info(user: User) -> Object:
    info: Object = {"username": user.name, "groups": list(user.groups)}
    if user.uid:
        info["uid"] = user.uid
    return info
