"""Authentication: the common name of a client certificate, or a bearer token that this server has issued.

Tokens are signed JWTs (HS256 with a key of this process), so none has to be stored. Permissions are decided
in `rights`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import uuid
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from springtide_local.api.object_store import ObjectStore
from springtide_local.ports import Object

ISSUER = "https://kubernetes.default.svc.cluster.local"
_DEFAULT_SECONDS = 3600
_PREFIX = "system:serviceaccount:"
AUTHENTICATED = "system:authenticated"


class User(NamedTuple):
    """Somebody who is known, with his groups."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""


def account_groups(namespace: str) -> tuple[str, ...]:
    """Return the groups of the service accounts of a namespace."""
    return ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)


def account_of(user: str) -> tuple[str, str] | None:
    """Return (namespace, name) of the service account that a user name stands for, or None."""
    namespace, colon, name = user.removeprefix(_PREFIX).partition(":")
    return (namespace, name) if user.startswith(_PREFIX) and colon and namespace and name else None


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Tokens:
    """Issues and checks bearer tokens."""

    def __init__(self, store: ObjectStore, longest: float | None = None) -> None:
        """`longest`: no token of a service account lives for more seconds, whatever is asked for."""
        self._store = store
        self._longest = longest
        self._key = secrets.token_bytes(32)

    def issue(
        self,
        namespace: str,
        account: str,
        seconds: float = _DEFAULT_SECONDS,
        audiences: tuple[str, ...] = (ISSUER,),
        pod: Object | None = None,
    ) -> tuple[str, float]:
        """Issue a token for a service account.

        Args:
            namespace: of the account.
            account: its name.
            seconds: for which it is good; cut to what this server allows.
            audiences: for whom it is meant.
            pod: that the token is bound to, which it does not outlive; None: to none.

        Returns:
            The token, and when it expires, in unix seconds.

        Raises:
            ApiError: 404: there is no such account.
        """
        if self._longest is not None:
            seconds = min(seconds, self._longest)
        found = self._store.get("serviceaccounts", account, namespace)
        now = self._store.now()
        about: Object = {
            "namespace": namespace,
            "serviceaccount": {"name": account, "uid": found["metadata"]["uid"]},
        }
        if pod is not None:
            about["pod"] = {"name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        claims = {
            "iss": ISSUER,
            "aud": list(audiences),
            "sub": f"{_PREFIX}{namespace}:{account}",
            "iat": int(now),
            "nbf": int(now),
            "exp": int(now + seconds),
            "jti": str(uuid.uuid4()),
            "kubernetes.io": about,
        }
        return self._sign(claims), float(int(now + seconds))

    def issue_user(self, user: str, groups: tuple[str, ...] = ()) -> str:
        """Return a token without end for a user of this server.

        Args:
            user: the name.
            groups: that the user is in.
        """
        return self._sign({"iss": ISSUER, "sub": user, "groups": list(groups)})

    def _sign(self, claims: Object) -> str:
        head = _b64(json.dumps({"alg": "HS256", "typ": "JWT"}).encode())
        body = _b64(json.dumps(claims).encode())
        return f"{head}.{body}.{self._mac(head, body)}"

    def _mac(self, head: str, body: str) -> str:
        return _b64(hmac.new(self._key, f"{head}.{body}".encode(), hashlib.sha256).digest())

    def check(self, token: str, audiences: Collection[str] = (ISSUER,)) -> User | None:
        """Return the user of a token.

        Args:
            token: as the client sent it.
            audiences: of which the token has to name one.

        Returns:
            None when it is forged, expired or meant for others, or its account (or pod) is gone.
        """
        if not token.isascii():
            return None
        parts = token.split(".")
        if len(parts) != 3 or not hmac.compare_digest(
            self._mac(parts[0], parts[1]).encode(), parts[2].encode()
        ):
            return None
        claims = json.loads(_unb64(parts[1]))
        if "exp" in claims and claims["exp"] <= self._store.now():
            return None
        name = claims["sub"]
        about = claims.get("kubernetes.io")
        if about is None:
            return User(name, (*claims.get("groups", ()), AUTHENTICATED))
        if not set(claims["aud"]) & set(audiences):
            return None
        account, space = about["serviceaccount"], about["namespace"]
        found = self._store.peek("serviceaccounts", account["name"], space)
        if found is None or found["metadata"]["uid"] != account["uid"]:
            return None
        if "pod" in about and about["pod"]["uid"] not in self._store.by_uid:
            return None
        return User(name, account_groups(space), account["uid"])


def certificate_user(certificate: Mapping[str, Any] | None) -> User | None:
    """The user that a verified peer certificate (as `ssl` shows it) names."""
    if not certificate:
        return None
    name, groups = "", []
    for part in certificate.get("subject", ()):
        for key, value in part:
            if key == "commonName":
                name = value
            elif key == "organizationName":
                groups.append(value)
    return User(name, (*groups, AUTHENTICATED)) if name else None
