"""Paths of objects by their kind, as the API server tells them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]


class Asks(Protocol):
    """The part of a client that is used here."""

    def request(self, method: str, path: str) -> Awaitable[Object]:
        """Send a request, and return the answer's JSON.

        Args:
            method: of HTTP.
            path: of the URL.
        """
        ...


class Discovery:
    """Remembers the kinds that were found; one that was not may have come since, and is asked for again."""

    def __init__(self, kube: Asks) -> None:
        self._kube = kube
        self._found: dict[str, dict[str, Object]] = {}  # by apiVersion's path, then kind

    async def path(self, obj: Object, namespace: str) -> str | None:
        """Return the path of an object's URL; None where the server knows no such kind.

        Args:
            obj: with apiVersion, kind and name.
            namespace: it is in this one where it does not say another.

        Raises:
            ApiError: the server does not tell its kinds.
        """
        version, kind = str(obj["apiVersion"]), str(obj["kind"])
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resource = self._found.get(prefix, {}).get(kind) or (await self._look(prefix)).get(kind)
        if resource is None:
            return None
        meta = obj["metadata"]
        inside = f"/namespaces/{meta.get('namespace') or namespace}" if resource["namespaced"] else ""
        return f"{prefix}{inside}/{resource['name']}/{meta['name']}"

    async def _look(self, prefix: str) -> dict[str, Object]:
        try:
            answer = await self._kube.request("GET", prefix)
        except ApiRefusal as error:
            if error.code == 404:
                return {}
            raise
        resources = answer.get("resources") or []
        self._found[prefix] = {item["kind"]: item for item in resources if "/" not in item["name"]}
        return self._found[prefix]
