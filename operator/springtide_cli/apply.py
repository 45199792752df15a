"""Apply objects server-side, and say what that did."""

from __future__ import annotations

from typing import Any

from springtide_cli.errors import Refused
from springtide_cli.kube import ApiRefusal, KubePort

Object = dict[str, Any]

FIELD_MANAGER = "springtide"
JOBS = "/apis/springtide.dev/v1alpha1"


class Applier:
    """Knows, from the API server's discovery, which path a kind has."""

    def __init__(self, kube: KubePort, namespace: str, *, force: bool = False) -> None:
        """force: take fields over from other managers (kubectl, say) instead of being refused."""
        self._kube = kube
        self._namespace = namespace
        self._force = force
        self._resources: dict[str, dict[str, Object]] = {}

    async def apply(self, obj: Object) -> tuple[Object, str]:
        """(stored object, "created", "configured" or "unchanged"). Raise Refused: the server's message."""
        path = await self._path(obj)
        name = f"{obj['kind']} {obj['metadata']['name']}"
        before = await self._before(path)
        query = {
            "fieldManager": FIELD_MANAGER,
            "fieldValidation": "Strict",
            "force": str(self._force).lower(),
        }
        try:
            after = await self._kube.request("PATCH", path, obj, query, "application/apply-patch+yaml")
        except ApiRefusal as error:
            hint = "; --force-conflicts takes these fields over" if error.reason == "Conflict" else ""
            raise Refused(f"{name} was refused: {error.message}{hint}") from error
        if before is None:
            return after, "created"
        same = before["metadata"].get("resourceVersion") == after["metadata"].get("resourceVersion")
        return after, "unchanged" if same else "configured"

    async def _before(self, path: str) -> Object | None:
        try:
            return await self._kube.request("GET", path)
        except ApiRefusal as error:
            if error.code == 404:
                return None
            raise Refused(f"{path}: {error.message}") from error

    async def _path(self, obj: Object) -> str:
        version, kind = obj["apiVersion"], obj["kind"]
        prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"
        resource = (await self._discover(prefix)).get(kind)
        if resource is None:
            hint = (
                ". Springtide is not installed in this cluster: apply its CRD and operator first, "
                "or use --local"
                if str(version).startswith("springtide.dev/")
                else ""
            )
            raise Refused(f"the API server knows no {kind} in {version}{hint}")
        inside = ""
        if resource["namespaced"]:
            inside = f"/namespaces/{obj['metadata'].get('namespace') or self._namespace}"
        return f"{prefix}{inside}/{resource['name']}/{obj['metadata']['name']}"

    async def _discover(self, prefix: str) -> dict[str, Object]:
        # A kind that is not there yet may have come with an earlier object: only hits are kept.
        known = self._resources.get(prefix)
        if known is not None:
            return known
        try:
            answer = await self._kube.request("GET", prefix)
        except ApiRefusal as error:
            if error.code == 404:
                return {}
            raise Refused(f"the API server does not tell its kinds: {error.message}") from error
        found = {item["kind"]: item for item in answer.get("resources", []) if "/" not in item["name"]}
        self._resources[prefix] = found
        return found
