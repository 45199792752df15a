"""A container's environment, built from nothing: what its pod declares, its services, and the little that
every process needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from springtide_local.quantities import parse_quantity, units

Object = dict[str, Any]
Lookup = Callable[[str, str], Object | None]
_REFERENCE = re.compile(r"\$(\$|\(([^()$]+)\))")
_ENV_NAME = re.compile(r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")


class ConfigError(Exception):
    """Something the container refers to is missing: CreateContainerConfigError. Trying again helps once it
    is there.
    """


def expand(text: str, known: Mapping[str, str]) -> str:
    """Expand references: `$(NAME)` is replaced by its value, `$$` by `$`; an unknown name stays as it is.

    Args:
        text: with references.
        known: values by name.
    """

    def replace(match: re.Match[str]) -> str:
        name = match.group(2)
        if name is None:
            return "$"
        return known.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)


def field_value(pod: Object, path: str) -> str:
    """Return the value of a `fieldRef`.

    Args:
        pod: the Pod, with its addresses in status.
        path: as `metadata.labels['app']`.

    Raises:
        ConfigError: pods do not offer the path.
    """
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    if match:
        return str((metadata.get(match.group(1)) or {}).get(match.group(2), ""))
    if path in ("metadata.labels", "metadata.annotations"):
        entries = metadata.get(path.removeprefix("metadata.")) or {}
        return "\n".join(f'{name}="{_escape(str(value))}"' for name, value in sorted(entries.items()))
    values = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata.get("namespace", ""),
        "metadata.uid": metadata.get("uid", ""),
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": status.get("podIP", ""),
        "status.podIPs": ",".join(ip["ip"] for ip in status.get("podIPs") or []),
        "status.hostIP": status.get("hostIP", ""),
        "status.hostIPs": ",".join(ip["ip"] for ip in status.get("hostIPs") or []),
    }
    if path not in values:
        raise ConfigError(f"unsupported fieldPath: {path}")
    return str(values[path])


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def resource_value(reference: Object, container: Object, allocatable: Mapping[str, str]) -> str:
    """Return the value of a `resourceFieldRef`: limits fall back to the node's allocatable, requests to
    limits.

    Args:
        reference: the `resourceFieldRef`; the amount is divided by its `divisor` and rounded up.
        container: whose resources are meant.
        allocatable: of the node, by resource, as quantities.

    Raises:
        ConfigError: it is neither a limit nor a request.
    """
    kind, _, resource = str(reference["resource"]).partition(".")
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if kind not in ("limits", "requests"):
        raise ConfigError(f"unsupported container resource : {reference['resource']}")
    value = limits.get(resource, allocatable.get(resource, "0"))
    if kind == "requests":
        value = requests.get(resource, limits.get(resource, "0"))
    divisor = str(reference.get("divisor") or "0")
    if parse_quantity(divisor) == 0:
        return str(math.ceil(parse_quantity(value)))
    scale = units(resource, divisor)
    return str(-(-units(resource, value) // scale))


def declared_environment(
    container: Object,
    pod: Object,
    config_map: Lookup,
    secret_data: Callable[[str, str], Mapping[str, bytes] | None],
    allocatable: Mapping[str, str],
    services: Mapping[str, str],
) -> dict[str, str]:
    """Return a container's environment: `services`, then `envFrom`, then `env` in order, each value expanded
    with what stands before it.

    Args:
        container: of the pod's spec.
        pod: the Pod, with its addresses in status.
        config_map: returns the ConfigMap of (namespace, name), or None.
        secret_data: returns the data of the Secret of (namespace, name), or None.
        allocatable: of the node, by resource, as quantities.
        services: variables of the namespace's Services.

    Raises:
        ConfigError: a source or a key of it is not there.
    """
    namespace = pod["metadata"]["namespace"]
    env: dict[str, str] = dict(services)
    own: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix") or ""
        for name, value in _whole_source(source, namespace, config_map, secret_data).items():
            if _ENV_NAME.match(prefix + name):
                own[prefix + name] = value
    for entry in container.get("env") or []:
        if entry.get("valueFrom"):
            found = _value_from(entry["valueFrom"], container, pod, config_map, secret_data, allocatable)
            if found is None:
                continue
            own[entry["name"]] = found
        else:
            own[entry["name"]] = expand(str(entry.get("value") or ""), {**env, **own})
    return {**env, **own}


def _whole_source(
    source: Object,
    namespace: str,
    config_map: Lookup,
    secret_data: Callable[[str, str], Mapping[str, bytes] | None],
) -> dict[str, str]:
    if reference := source.get("configMapRef"):
        found = config_map(namespace, reference["name"])
        if found is not None:
            return dict(found.get("data") or {})
        kind = "configmap"
    else:
        reference = source.get("secretRef") or {"name": "", "optional": True}
        data = secret_data(namespace, reference["name"])
        if data is not None:
            return {name: value.decode(errors="replace") for name, value in data.items()}
        kind = "secret"
    if not reference.get("optional"):
        raise ConfigError(f'{kind} "{reference["name"]}" not found')
    return {}


def _value_from(
    source: Object,
    container: Object,
    pod: Object,
    config_map: Lookup,
    secret_data: Callable[[str, str], Mapping[str, bytes] | None],
    allocatable: Mapping[str, str],
) -> str | None:
    """Return the value of one `valueFrom`; None when the source is optional and not there."""
    namespace = pod["metadata"]["namespace"]
    if reference := source.get("fieldRef"):
        return field_value(pod, reference["fieldPath"])
    if reference := source.get("resourceFieldRef"):
        containers = [*pod["spec"]["containers"], *(pod["spec"].get("initContainers") or [])]
        name = reference.get("containerName")
        target = next((c for c in containers if c["name"] == name), container)
        return resource_value(reference, target, allocatable)
    found: Mapping[str, Any] | None
    if reference := source.get("configMapKeyRef"):
        kind = "ConfigMap"
        holder = config_map(namespace, reference["name"])
        found = None if holder is None else holder.get("data") or {}
    elif reference := source.get("secretKeyRef"):
        kind = "Secret"
        found = secret_data(namespace, reference["name"])
    else:
        raise ConfigError(f"unsupported valueFrom: {', '.join(source)}")
    if found is not None and reference["key"] in found:
        value = found[reference["key"]]
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    if reference.get("optional"):
        return None
    if found is None:
        raise ConfigError(f'{kind.lower()} "{reference["name"]}" not found')
    raise ConfigError(f"couldn't find key {reference['key']} in {kind} {namespace}/{reference['name']}")


def service_environment(services: Iterable[Object]) -> dict[str, str]:
    """The variables by which Kubernetes announces Services (those with a cluster address) to containers."""
    env: dict[str, str] = {}
    for service in services:
        spec = service["spec"]
        host, ports = spec.get("clusterIP"), spec.get("ports") or []
        if not host or host == "None" or not ports:
            continue
        prefix = service["metadata"]["name"].upper().replace("-", "_")
        env[f"{prefix}_SERVICE_HOST"] = host
        env[f"{prefix}_SERVICE_PORT"] = str(ports[0]["port"])
        env[f"{prefix}_PORT"] = f"{ports[0].get('protocol', 'TCP').lower()}://{host}:{ports[0]['port']}"
        for port in ports:
            protocol, number = port.get("protocol", "TCP"), port["port"]
            if port.get("name"):
                env[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(number)
            link = f"{prefix}_PORT_{number}_{protocol}"
            env[link] = f"{protocol.lower()}://{host}:{number}"
            env[f"{link}_PROTO"] = protocol.lower()
            env[f"{link}_PORT"] = str(number)
            env[f"{link}_ADDR"] = host
    return env
