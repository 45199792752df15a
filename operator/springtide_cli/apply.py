"""Apply objects server-side, and say what that did."""

from __future__ import annotations

from typing import Any

from springtide_cli.errors import Refused
from springtide_cli.kube import KubePort
from springtide_kube.content_types import APPLY_PATCH
from springtide_kube.discovery import Discovery
from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]

FIELD_MANAGER = "springtide"
JOBS = "/apis/springtide.dev/v1alpha1"


class Applier:
    """Applies objects where the API server's discovery says that their kind is."""

    def __init__(self, kube: KubePort, namespace: str, *, force: bool = False) -> None:
        """force: take fields over from other managers (kubectl, say) instead of being refused."""
        self._kube = kube
        self._namespace = namespace
        self._force = force
        self._discovery = Discovery(kube)

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
            after = await self._kube.request("PATCH", path, obj, query, APPLY_PATCH)
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
        try:
            path = await self._discovery.path(obj, self._namespace)
        except ApiRefusal as error:
            raise Refused(f"the API server does not tell its kinds: {error.message}") from error
        if path is None:
            version = str(obj["apiVersion"])
            hint = (
                ". Springtide is not installed in this cluster: apply its CRD and operator first, "
                "or use --local"
                if version.startswith("springtide.dev/")
                else ""
            )
            raise Refused(f"the API server knows no {obj['kind']} in {version}{hint}")
        return path
