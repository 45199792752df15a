"""Checks of a pod's spec beyond its types: names, references between its parts, either-or fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.objects import label_problem, quantity, subdomain_problem
from springtide_local.ports import Object

_ENV_SOURCES = ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef")
_ENV_TEXT = "a valid environment variable name must consist only of printable ASCII characters other than '='"
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")
_CHOICES = {
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
}
_CONTAINER_CHOICES = {
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
}
_SHORTEST_TOKEN = 600  # seconds
_FIELD_PATHS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "metadata.labels",
    "metadata.annotations",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
)


def check_pod_spec(spec: Object, path: str, template: bool = False) -> list[FieldError]:
    """Return what is wrong with a pod's spec.

    Args:
        spec: of the pod.
        path: of the spec, for errors.
        template: it is that of a workload, whose pods always restart.
    """
    found: list[FieldError] = []
    volumes = _check_volumes(spec.get("volumes") or [], f"{path}.volumes", found)
    if not spec.get("containers"):
        found.append(errors.field_required(f"{path}.containers"))
    names: set[str] = set()
    for part in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(part) or ()):
            where = f"{path}.{part}[{index}]"
            _check_name(container.get("name"), f"{where}.name", names, found)
            _check_container(container, where, volumes, found)
    _check_choices(spec, path, _CHOICES, found)
    if template and spec.get("restartPolicy") != "Always":
        found.append(
            errors.field_unsupported(f"{path}.restartPolicy", spec.get("restartPolicy"), ("Always",))
        )
    grace = spec.get("terminationGracePeriodSeconds")
    if isinstance(grace, int) and grace < 0:
        found.append(
            errors.field_invalid(
                f"{path}.terminationGracePeriodSeconds", grace, "must be greater than or equal to 0"
            )
        )
    deadline = spec.get("activeDeadlineSeconds")
    if isinstance(deadline, int) and deadline < 1:
        text = "must be between 1 and 2147483647, inclusive"
        found.append(errors.field_invalid(f"{path}.activeDeadlineSeconds", deadline, text))
    for name in ("nodeName", "serviceAccountName", "priorityClassName"):
        problem = subdomain_problem(spec[name]) if spec.get(name) else None
        if problem:
            found.append(errors.field_invalid(f"{path}.{name}", spec[name], problem))
    _check_tolerations(spec.get("tolerations") or [], f"{path}.tolerations", found)
    return found


def _check_name(name: str | None, path: str, names: set[str], found: list[FieldError]) -> None:
    if not name:
        found.append(errors.field_required(path))
        return
    problem = label_problem(name)
    if problem:
        found.append(errors.field_invalid(path, name, problem))
    if name in names:
        found.append(errors.field_duplicate(path, name))
    names.add(name)


def _check_choices(
    obj: Object, path: str, choices: dict[str, tuple[str, ...]], found: list[FieldError]
) -> None:
    for name, supported in choices.items():
        if obj.get(name) and obj[name] not in supported:
            found.append(errors.field_unsupported(f"{path}.{name}", obj[name], supported))


def _check_volumes(volumes: list[Object], path: str, found: list[FieldError]) -> set[str]:
    names: set[str] = set()
    for index, volume in enumerate(volumes):
        where = f"{path}[{index}]"
        _check_name(volume.get("name"), f"{where}.name", names, found)
        sources = [name for name in volume if name != "name"]
        if len(sources) > 1:
            text = "may not specify more than 1 volume type"
            found.append(errors.field_forbidden(f"{where}.{sources[1]}", text))
        claim = volume.get("persistentVolumeClaim")
        if isinstance(claim, dict) and not claim.get("claimName"):
            found.append(errors.field_required(f"{where}.persistentVolumeClaim.claimName"))
        for source, key in (("secret", "secretName"), ("configMap", "name"), ("hostPath", "path")):
            if isinstance(volume.get(source), dict) and not volume[source].get(key):
                found.append(errors.field_required(f"{where}.{source}.{key}"))
        projected: Object = volume.get("projected") or {}
        for number, part in enumerate(projected.get("sources") or ()):
            if isinstance(part.get("serviceAccountToken"), dict):
                place = f"{where}.projected.sources[{number}].serviceAccountToken"
                _check_token(part["serviceAccountToken"], place, found)
    return names


def _check_token(source: Object, path: str, found: list[FieldError]) -> None:
    seconds = source.get("expirationSeconds", _SHORTEST_TOKEN)
    if seconds < _SHORTEST_TOKEN:
        text = "may not specify a duration less than 10 minutes"
        found.append(errors.field_invalid(f"{path}.expirationSeconds", seconds, text))
    elif seconds > 2**32:
        text = "may not specify a duration larger than 2^32 seconds"
        found.append(errors.field_invalid(f"{path}.expirationSeconds", seconds, text))
    name = source.get("path")
    if not name:
        found.append(errors.field_required(f"{path}.path"))
    elif str(name).startswith(("/", "..")) or ".." in str(name).split("/"):
        text = "must be a relative path" if str(name).startswith("/") else "must not contain '..'"
        found.append(errors.field_invalid(f"{path}.path", name, text))


def _check_container(container: Object, path: str, volumes: set[str], found: list[FieldError]) -> None:
    image = container.get("image")
    if not image:
        found.append(errors.field_required(f"{path}.image"))
    elif image != image.strip():
        text = "must not have leading or trailing whitespace"
        found.append(errors.field_invalid(f"{path}.image", image, text))
    _check_choices(container, path, _CONTAINER_CHOICES, found)
    _check_ports(container.get("ports") or [], f"{path}.ports", found)
    _check_env(container.get("env") or [], f"{path}.env", found)
    _check_mounts(container.get("volumeMounts") or [], f"{path}.volumeMounts", volumes, found)
    _check_resources(container.get("resources") or {}, f"{path}.resources", found)
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(name), dict):
            _check_probe(container[name], f"{path}.{name}", name, found)
    lifecycle = container.get("lifecycle") or {}
    for name in ("preStop", "postStart"):
        if isinstance(lifecycle.get(name), dict):
            _check_handler(lifecycle[name], f"{path}.lifecycle.{name}", (*_HANDLERS, "sleep"), found)


def _check_ports(ports: Iterable[Object], path: str, found: list[FieldError]) -> None:
    names: set[str] = set()
    for index, port in enumerate(ports):
        number = port.get("containerPort")
        if not number:
            found.append(errors.field_required(f"{path}[{index}].containerPort"))
        elif not 0 < number < 65536:
            text = "must be between 1 and 65535, inclusive"
            found.append(errors.field_invalid(f"{path}[{index}].containerPort", number, text))
        name = port.get("name")
        if name and name in names:
            found.append(errors.field_duplicate(f"{path}[{index}].name", name))
        if name:
            names.add(name)
        if port.get("protocol") not in ("TCP", "UDP", "SCTP"):
            supported = ("SCTP", "TCP", "UDP")
            found.append(
                errors.field_unsupported(f"{path}[{index}].protocol", port.get("protocol"), supported)
            )


def _check_env(env: Iterable[Object], path: str, found: list[FieldError]) -> None:
    for index, entry in enumerate(env):
        where = f"{path}[{index}]"
        name = entry.get("name")
        if not name:
            found.append(errors.field_required(f"{where}.name"))
        elif "=" in name or any(not " " <= char <= "~" for char in name):
            found.append(errors.field_invalid(f"{where}.name", name, _ENV_TEXT))
        source = entry.get("valueFrom")
        if source is None:
            continue
        given = [key for key in _ENV_SOURCES if source.get(key)]
        if len(given) != 1:
            text = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
            found.append(errors.field_invalid(f"{where}.valueFrom", "", text))
            continue
        if entry.get("value"):
            text = "may not be specified when `value` is not empty"
            found.append(errors.field_invalid(f"{where}.valueFrom", "", text))
        _check_env_source(given[0], source[given[0]], f"{where}.valueFrom.{given[0]}", found)


def _check_env_source(kind: str, ref: Object, path: str, found: list[FieldError]) -> None:
    if kind == "fieldRef":
        field_path = ref.get("fieldPath", "")
        plain = field_path.partition("[")[0]
        if not field_path:
            found.append(errors.field_required(f"{path}.fieldPath"))
        elif plain not in _FIELD_PATHS or (plain in ("metadata.labels", "metadata.annotations")) != (
            "[" in field_path
        ):
            found.append(errors.field_unsupported(f"{path}.fieldPath", field_path, _FIELD_PATHS))
    elif kind in ("configMapKeyRef", "secretKeyRef"):
        for name in ("name", "key"):
            if not ref.get(name):
                found.append(errors.field_required(f"{path}.{name}"))
    elif kind == "resourceFieldRef" and not ref.get("resource"):
        found.append(errors.field_required(f"{path}.resource"))


def _check_mounts(mounts: Iterable[Object], path: str, volumes: set[str], found: list[FieldError]) -> None:
    paths: set[str] = set()
    for index, mount in enumerate(mounts):
        name, target = mount.get("name"), mount.get("mountPath")
        if not name:
            found.append(errors.field_required(f"{path}[{index}].name"))
        elif name not in volumes:
            found.append(errors.field_not_found(f"{path}[{index}].name", name))
        if not target:
            found.append(errors.field_required(f"{path}[{index}].mountPath"))
        elif target in paths:
            found.append(errors.field_invalid(f"{path}[{index}].mountPath", target, "must be unique"))
        if target:
            paths.add(target)


def _check_resources(resources: Object, path: str, found: list[FieldError]) -> None:
    amounts: dict[str, dict[str, Any]] = {}
    for part in ("limits", "requests"):
        amounts[part] = {}
        for name, text in (resources.get(part) or {}).items():
            where = f"{path}.{part}[{name}]"
            try:
                amounts[part][name] = quantity(text)
            except ValueError as problem:
                found.append(errors.field_invalid(where, text, str(problem)))
                continue
            if amounts[part][name] < 0:
                found.append(errors.field_invalid(where, text, "must be greater than or equal to 0"))
    for name, amount in amounts["requests"].items():
        limit = amounts["limits"].get(name)
        if limit is not None and amount > limit:
            text = f"must be less than or equal to {name} limit of {resources['limits'][name]}"
            found.append(errors.field_invalid(f"{path}.requests", str(resources["requests"][name]), text))


def _check_probe(probe: Object, path: str, name: str, found: list[FieldError]) -> None:
    _check_handler(probe, path, _HANDLERS, found)
    for part in (
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ):
        if isinstance(probe.get(part), int) and probe[part] < 0:
            found.append(
                errors.field_invalid(f"{path}.{part}", probe[part], "must be greater than or equal to 0")
            )
    if name != "readinessProbe" and probe.get("successThreshold", 1) != 1:
        found.append(errors.field_invalid(f"{path}.successThreshold", probe["successThreshold"], "must be 1"))


def _check_handler(obj: Object, path: str, handlers: tuple[str, ...], found: list[FieldError]) -> None:
    given = [name for name in handlers if obj.get(name) is not None]
    if not given:
        found.append(errors.field_required(path, "must specify a handler type"))
    elif len(given) > 1:
        text = "may not specify more than 1 handler type"
        found.append(errors.field_forbidden(f"{path}.{given[1]}", text))
    elif given[0] == "exec" and not obj["exec"].get("command"):
        found.append(errors.field_required(f"{path}.exec.command"))


def _check_tolerations(tolerations: Iterable[Object], path: str, found: list[FieldError]) -> None:
    for index, toleration in enumerate(tolerations):
        operator = toleration.get("operator") or "Equal"
        if operator not in ("Equal", "Exists"):
            found.append(errors.field_unsupported(f"{path}[{index}].operator", operator, ("Equal", "Exists")))
        elif operator == "Exists" and toleration.get("value"):
            text = "value must be empty when `operator` is 'Exists'"
            found.append(errors.field_invalid(f"{path}[{index}].operator", toleration["value"], text))
        effect = toleration.get("effect")
        if effect and effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
            supported = ("NoSchedule", "PreferNoSchedule", "NoExecute")
            found.append(errors.field_unsupported(f"{path}[{index}].effect", effect, supported))
