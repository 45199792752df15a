"""The Pod Security Standard `restricted`, for the fields that our pods use."""

from __future__ import annotations

from typing import Any

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def restricted_violations(spec: dict[str, Any]) -> list[str]:
    """Return the fields of a PodSpec that `restricted` forbids."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    pod = spec.get("securityContext", {})
    for volume in spec.get("volumes", []):
        found += [f"volume {volume['name']}" for key in volume if key != "name" and key not in _VOLUMES]
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation")
        if "ALL" not in own.get("capabilities", {}).get("drop", []):
            found.append("capabilities.drop")
        if not own.get("runAsNonRoot", pod.get("runAsNonRoot")):
            found.append("runAsNonRoot")
        if own.get("runAsUser", pod.get("runAsUser")) == 0:
            found.append("runAsUser")
        profile = own.get("seccompProfile", pod.get("seccompProfile", {})).get("type")
        if profile not in {"RuntimeDefault", "Localhost"}:
            found.append("seccompProfile")
    return found
