"""Acting as somebody else: the Impersonate-* headers, and the right to use them."""

from __future__ import annotations

from multidict import CIMultiDictProxy

from springtide_local.api.auth import AUTHENTICATED, User, account_groups, account_of
from springtide_local.api.rbac import Attributes
from springtide_local.api.rights import Rights
from springtide_local.ports import ApiError

_USER, _GROUP, _UID, _EXTRA = (
    "Impersonate-User",
    "Impersonate-Group",
    "Impersonate-Uid",
    "Impersonate-Extra-",
)
_ANONYMOUS = "system:anonymous"


def impersonated(headers: CIMultiDictProxy[str], user: User, rights: Rights) -> User:
    """Return whom a request acts as: `user` himself unless it says otherwise.

    Args:
        headers: The request's.
        user: The user who has authenticated himself.
        rights: Which say whether he may.

    Raises:
        ApiError: 403 when he may not act as that user, with that group or uid; 500, as on a cluster, when
            groups or a uid come without a user.
    """
    name, uid = headers.get(_USER, ""), headers.get(_UID, "")
    groups = tuple(headers.getall(_GROUP, ()))
    extras = [key for key in headers if key.lower().startswith(_EXTRA.lower())]
    if not name:
        if groups or uid or extras:
            what = "groups, uid or extra fields"
            raise ApiError(500, "InternalError", f"requested {what} without impersonating a user")
        return user
    account = account_of(name)
    if account is not None:
        asked = [Attributes("impersonate", "", "serviceaccounts", namespace=account[0], name=account[1])]
    else:
        asked = [Attributes("impersonate", "", "users", name=name)]
    asked += [Attributes("impersonate", "", "groups", name=group) for group in groups]
    authentication = "authentication.k8s.io"
    if uid:
        asked.append(Attributes("impersonate", authentication, "uids", name=uid))
    for key in extras:
        field = key[len(_EXTRA) :].lower()
        asked += [
            Attributes("impersonate", authentication, "userextras", field, name=value)
            for value in headers.getall(key)
        ]
    for one in asked:
        rights.demand(user, one)
    if account is not None and not groups:
        groups = account_groups(account[0])
    if name != _ANONYMOUS and AUTHENTICATED not in groups:
        groups = (*groups, AUTHENTICATED)
    return User(name, groups, uid)
