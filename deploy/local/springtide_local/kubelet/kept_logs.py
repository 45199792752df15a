"""Logs of pods that are gone, as NAMESPACE_POD_UID/CONTAINER/START.log: the names in /var/log/pods.

Kept are those of a container's last two starts, counted from 0; `.old` is what was rotated out.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from springtide_local.kubelet.launch import ContainerFolder

Object = dict[str, Any]


def keep_logs(pod: Object, folder: Path, root: Path) -> None:
    """Move the logs of a pod that has ended out of its folder.

    Args:
        pod: the Pod.
        folder: of the pod, with one folder a container.
        root: of all kept logs.

    Raises:
        OSError: they cannot be moved.
    """
    about, spec = pod["metadata"], pod["spec"]
    kept = root / f"{about['namespace']}_{about['name']}_{about['uid']}"
    for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
        own = ContainerFolder(folder / container["name"])
        for path in (*own.root.glob("*.log"), *own.root.glob("*.old")):
            target = kept / container["name"] / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
