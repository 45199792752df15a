"""PersistentVolumeClaims: each gets a volume of its own, which is a folder, at once; the folder goes with
the claim unless its policy is Retain.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from springtide_local.controllers.loop import Controller
from springtide_local.events import EventRecorder
from springtide_local.informer import Change, Informers
from springtide_local.kubelet.services import claim_folder
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
_CLAIMS, _VOLUMES = "persistentvolumeclaims", "persistentvolumes"


class Claims:
    def __init__(self, store: StorePort, informers: Informers, root: Path) -> None:
        self._store = store
        self._root = root
        self._claims = informers.of(_CLAIMS)
        self._events = EventRecorder(store, "springtide.dev/local-folder")
        self.controller = Controller("claims", self._reconcile)
        self._claims.on_change(self._on_claim)

    def _on_claim(self, change: Change) -> None:
        if change.type == "DELETED":
            self._release(change.object)
        else:
            self.controller.on_change(change)

    def _reconcile(self, namespace: str, name: str) -> None:
        claim = self._claims.get(namespace, name)
        if claim is None or (claim.get("status") or {}).get("phase") == "Bound":
            return
        spec, metadata = claim["spec"], claim["metadata"]
        capacity = {"storage": ((spec.get("resources") or {}).get("requests") or {}).get("storage", "1Gi")}
        volume_name = f"pvc-{metadata['uid']}"
        folder = claim_folder(self._root, claim)
        folder.mkdir(parents=True, exist_ok=True)
        modes = spec.get("accessModes") or ["ReadWriteOnce"]
        volume: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {
                "name": volume_name,
                "annotations": {"pv.kubernetes.io/provisioned-by": "springtide.dev/local-folder"},
            },
            "spec": {
                "capacity": capacity,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Delete",
                "storageClassName": spec.get("storageClassName") or "local-folder",
                "volumeMode": "Filesystem",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {
                    "kind": "PersistentVolumeClaim",
                    "namespace": namespace,
                    "name": name,
                    "uid": metadata["uid"],
                },
            },
            "status": {"phase": "Bound"},
        }
        try:
            self._store.create(_VOLUMES, volume)
        except ApiError as error:
            if error.code != 409:
                raise
        self._store.mutate(
            _VOLUMES,
            volume_name,
            None,
            lambda obj: obj.update(status={"phase": "Bound"}),
            subresource="status",
        )
        self._store.mutate(_CLAIMS, name, namespace, lambda obj: obj["spec"].update(volumeName=volume_name))
        status = {"phase": "Bound", "capacity": capacity, "accessModes": modes}
        self._store.mutate(
            _CLAIMS, name, namespace, lambda obj: obj.update(status=status), subresource="status"
        )
        self._events.normal(claim, "ProvisioningSucceeded", f"Successfully provisioned volume {volume_name}")

    def _release(self, claim: Object) -> None:
        name = f"pvc-{claim['metadata']['uid']}"
        try:
            volume = self._store.get(_VOLUMES, name)
            if volume["spec"].get("persistentVolumeReclaimPolicy") == "Retain":
                self._store.mutate(
                    _VOLUMES,
                    name,
                    None,
                    lambda obj: obj.update(status={"phase": "Released"}),
                    subresource="status",
                )
                return
            self._store.delete(_VOLUMES, name)
        except ApiError as error:
            if error.code != 404:
                raise
        shutil.rmtree(claim_folder(self._root, claim), ignore_errors=True)
