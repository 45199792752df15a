"""Pod security standards, `baseline` and `restricted`: what a pod's spec violates, in the words of
Kubernetes' own check.

Source: "Pod Security Standards" in the Kubernetes documentation. Left out are the controls that processes of
this machine cannot have anyway (SELinux, AppArmor, sysctls, procMount, Windows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from springtide_local.api.objects import lookup
from springtide_local.ports import Object

LEVELS = ("privileged", "baseline", "restricted")
LABEL = "pod-security.kubernetes.io/"
_DEFAULT_CAPABILITIES = (
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
)
_RESTRICTED_VOLUMES = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)


def violations(spec: Object, level: str) -> list[str]:
    """Return the violations of a level by a pod's spec; empty when it is allowed.

    Args:
        spec: of the pod.
        level: `privileged`, `baseline` or `restricted`.
    """
    found: list[str] = []
    if level in ("baseline", "restricted"):
        found += _baseline(spec, hosts_paths=level == "baseline")
    if level == "restricted":
        found += _restricted(spec)
    return found


def _all_containers(spec: Object) -> list[Object]:
    parts = ("initContainers", "containers", "ephemeralContainers")
    return [container for part in parts for container in spec.get(part) or ()]


def _context(container: Object, *path: str) -> Any:
    return lookup(container, "securityContext", *path)


def _added(container: Object) -> set[str]:
    return set(_context(container, "capabilities", "add") or ())


def _named(containers: Iterable[Object], wrong: Callable[[Object], bool]) -> str:
    names = [container["name"] for container in containers if wrong(container)]
    if not names:
        return ""
    return ("container " if len(names) == 1 else "containers ") + ", ".join(f'"{name}"' for name in names)


def _baseline(spec: Object, hosts_paths: bool) -> list[str]:
    found = []
    containers = _all_containers(spec)
    shared = [f"{name}=true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)]
    if shared:
        found.append(f"host namespaces ({', '.join(shared)})")
    names = _named(containers, lambda c: bool(_context(c, "privileged")))
    if names:
        found.append(f"privileged ({names} must not set securityContext.privileged=true)")
    added = {cap for c in containers for cap in _added(c)}
    extra = sorted(added - set(_DEFAULT_CAPABILITIES))
    if extra and hosts_paths:
        names = _named(containers, lambda c: bool(_added(c) & set(extra)))
        listed = ", ".join(f'"{cap}"' for cap in extra)
        found.append(
            f"non-default capabilities ({names} must not include {listed} in "
            "securityContext.capabilities.add)"
        )
    paths = [volume["name"] for volume in spec.get("volumes") or () if "hostPath" in volume]
    if paths and hosts_paths:
        word = "volume" if len(paths) == 1 else "volumes"
        found.append(f"hostPath volumes ({word} {', '.join(f'{chr(34)}{name}{chr(34)}' for name in paths)})")
    ports = sorted({p["hostPort"] for c in containers for p in c.get("ports") or () if p.get("hostPort")})
    if ports:
        names = _named(containers, lambda c: any(p.get("hostPort") for p in c.get("ports") or ()))
        word = "hostPort" if len(ports) == 1 else "hostPorts"
        found.append(f"hostPort ({names} uses {word} {', '.join(map(str, ports))})")
    return found


def _restricted(spec: Object) -> list[str]:
    found = []
    containers = _all_containers(spec)
    pod = spec.get("securityContext") or {}
    names = _named(containers, lambda c: _context(c, "allowPrivilegeEscalation") is not False)
    if names:
        text = f"{names} must set securityContext.allowPrivilegeEscalation=false"
        found.append(f"allowPrivilegeEscalation != false ({text})")
    names = _named(containers, lambda c: "ALL" not in (_context(c, "capabilities", "drop") or ()))
    if names:
        found.append(
            f'unrestricted capabilities ({names} must set securityContext.capabilities.drop=["ALL"])'
        )
    added = {cap for c in containers for cap in _added(c)}
    extra = sorted(added - {"NET_BIND_SERVICE"})
    if extra:
        listed = ", ".join(f'"{cap}"' for cap in extra)
        names = _named(containers, lambda c: bool(_added(c) & set(extra)))
        text = f"{names} must not include {listed} in securityContext.capabilities.add"
        found.append(f"unrestricted capabilities ({text})")
    wrong = [
        (volume["name"], kind)
        for volume in spec.get("volumes") or ()
        for kind in volume
        if kind != "name" and kind not in _RESTRICTED_VOLUMES
    ]
    for name, kind in wrong:
        found.append(f'restricted volume types (volume "{name}" uses restricted volume type "{kind}")')
    found += _users(pod, containers)
    names = _named(containers, lambda c: _profile(c, pod) not in ("RuntimeDefault", "Localhost"))
    if names:
        choices = '"RuntimeDefault" or "Localhost"'
        found.append(
            f"seccompProfile (pod or {names} must set securityContext.seccompProfile.type to {choices})"
        )
    return found


def _profile(container: Object, pod: Object) -> str:
    own = _context(container, "seccompProfile", "type")
    return str(own or lookup(pod, "seccompProfile", "type") or "")


def _users(pod: Object, containers: list[Object]) -> list[str]:
    found = []

    def may_be_root(container: Object) -> bool:
        own = _context(container, "runAsNonRoot")
        return own is not True if own is not None else pod.get("runAsNonRoot") is not True

    names = _named(containers, may_be_root)
    if names:
        found.append(f"runAsNonRoot != true (pod or {names} must set securityContext.runAsNonRoot=true)")
    if pod.get("runAsUser") == 0:
        found.append("runAsUser=0 (pod must not set runAsUser=0)")
    names = _named(containers, lambda c: _context(c, "runAsUser") == 0)
    if names:
        found.append(f"runAsUser=0 ({names} must not set runAsUser=0)")
    return found
