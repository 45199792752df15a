"""The schema of pod templates: the fields of a PodSpec, and limits where the operator reads them.

Inlined in full a PodSpec is hundreds of KB, and client-side apply keeps at most 256 in an annotation. So the
fields of a pod and of its containers are listed, for all versions of Kubernetes that are supported; what is
deeper, and not read here, stays as it was written. A field that Kubernetes does not know is refused by name.

In a pod a null is as good as no field, and many tools write some: they may stand here, too.
"""

from __future__ import annotations

from typing import Any

from springtide_operator.api.base import rule
from springtide_operator.api.limits import MAX_QUANTITY_EXPONENT, MAX_QUANTITY_LENGTH, MAX_TEMPLATE_BYTES

Schema = dict[str, Any]

MAX_CONTAINERS = 16
_NAME = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"^({_NAME}(\.{_NAME})*)?$"
_EXPONENT = r"[eE][+-]?0*([0-9]|[12][0-9]|30)"
QUANTITY = rf"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|{_EXPONENT})?$"
assert MAX_QUANTITY_EXPONENT == 30  # as the pattern says

_MAX_PLAIN = 2**53 - 1  # of a number without quotes: what stays the same wherever numbers are floats

_ANYTHING: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def _text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def _subdomain(**more: Any) -> Schema:
    """Describe a name of a cluster's object: the operator asks for some of them by it."""
    return _text(253, pattern=_SUBDOMAIN, nullable=True, **more)


def _number(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most, "nullable": True}


def _list(items: Schema, most: int, **more: Any) -> Schema:
    return {"type": "array", "maxItems": most, "nullable": True, "items": items, **more}


def _map(values: Schema, most: int, **more: Any) -> Schema:
    return {
        "type": "object",
        "maxProperties": most,
        "nullable": True,
        "additionalProperties": values,
        **more,
    }


def _optional(schema: Schema) -> Schema:
    return {**schema, "nullable": True}


def _quantity() -> Schema:
    """Describe a quantity: a string, or a number as it is written without quotes.

    There is no type for both with fractions. So there is none, and what is neither has to be empty.
    """
    return {
        "x-kubernetes-preserve-unknown-fields": True,
        "maxLength": MAX_QUANTITY_LENGTH,
        "pattern": QUANTITY,
        "minimum": -_MAX_PLAIN,
        "maximum": _MAX_PLAIN,
        "maxItems": 0,
        "maxProperties": 0,
    }


_FLAG: Schema = {"type": "boolean", "nullable": True}
_DEEP: Schema = {**_ANYTHING, "nullable": True}
_LABEL_VALUE = _text(63, nullable=True)
_LONG = _text(MAX_TEMPLATE_BYTES, nullable=True)
_LIST = _list(_ANYTHING, 128)
_QUANTITIES = _map(_quantity(), 64)
_RESOURCES: Schema = {
    "type": "object",
    "nullable": True,
    "properties": {"limits": _QUANTITIES, "requests": _QUANTITIES, "claims": _LIST},
}
_ENVIRONMENT = _list(
    {"type": "object", "properties": {"name": _text(1024), "value": _LONG, "valueFrom": _DEEP}}, 1024
)
_PORTS = _list(
    {
        "type": "object",
        "properties": {
            "name": _LABEL_VALUE,
            "containerPort": _number(1, 65535),
            "hostPort": _number(0, 65535),
            "hostIP": _text(64, nullable=True),
            "protocol": _LABEL_VALUE,
        },
    },
    128,
)
_TOLERATIONS = _list(
    {
        "type": "object",
        "properties": {
            "key": _text(317, nullable=True),
            "operator": _LABEL_VALUE,
            "value": _LABEL_VALUE,
            "effect": _LABEL_VALUE,
            "tolerationSeconds": _number(-_MAX_PLAIN, _MAX_PLAIN),
        },
    },
    128,
)


def _container(own_name: str) -> Schema:
    words = _list(_text(MAX_TEMPLATE_BYTES), 1024)
    return {
        "type": "object",
        "properties": {
            "name": _text(63, description=own_name),
            "image": _text(1024, minLength=1, description="Image of the container."),
            "command": words,
            "args": words,
            "env": _ENVIRONMENT,
            "resources": _RESOURCES,
            "ports": _PORTS,
            **dict.fromkeys(("envFrom", "resizePolicy", "restartPolicyRules"), _LIST),
            **dict.fromkeys(("volumeDevices", "volumeMounts"), _LIST),
            **dict.fromkeys(("lifecycle", "securityContext"), _DEEP),
            **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), _DEEP),
            **dict.fromkeys(("stdin", "stdinOnce", "tty"), _FLAG),
            **dict.fromkeys(("imagePullPolicy", "restartPolicy", "terminationMessagePolicy"), _LABEL_VALUE),
            **dict.fromkeys(("terminationMessagePath", "workingDir"), _text(4096, nullable=True)),
        },
    }


def _pod_spec(restart_policy: Schema, containers: Schema, description: str) -> Schema:
    names = ("priorityClassName", "runtimeClassName", "serviceAccount", "serviceAccountName")
    return {
        "type": "object",
        "description": description,
        "properties": {
            "restartPolicy": restart_policy,
            "containers": containers,
            "initContainers": _list(_container("Name of the container."), MAX_CONTAINERS),
            "nodeSelector": _map(_text(63), 64),
            "tolerations": _TOLERATIONS,
            "resources": _RESOURCES,
            "overhead": _QUANTITIES,
            "terminationGracePeriodSeconds": _number(0, 2**31 - 1),
            "activeDeadlineSeconds": _number(1, 2**31 - 1),
            "priority": _number(-(2**31), 2**31 - 1),
            **dict.fromkeys(names, _subdomain()),
            **dict.fromkeys(("schedulerName", "nodeName"), _text(253, nullable=True)),
            **dict.fromkeys(("hostname", "hostnameOverride", "subdomain"), _text(253, nullable=True)),
            **dict.fromkeys(("dnsPolicy", "preemptionPolicy"), _LABEL_VALUE),
            **dict.fromkeys(("affinity", "dnsConfig", "os"), _DEEP),
            **dict.fromkeys(("schedulingGroup", "securityContext", "workloadRef"), _DEEP),
            **dict.fromkeys(("ephemeralContainers", "evictionResponders", "hostAliases"), _LIST),
            **dict.fromkeys(("imagePullSecrets", "readinessGates", "resourceClaims"), _LIST),
            **dict.fromkeys(("schedulingGates", "topologySpreadConstraints", "volumes"), _LIST),
            **dict.fromkeys(("automountServiceAccountToken", "enableServiceLinks", "hostUsers"), _FLAG),
            **dict.fromkeys(("hostIPC", "hostNetwork", "hostPID"), _FLAG),
            **dict.fromkeys(("setHostnameAsFQDN", "shareProcessNamespace"), _FLAG),
        },
    }


def _metadata(description: str) -> Schema:
    return {
        "type": "object",
        "nullable": True,
        "description": description,
        "properties": {
            "labels": _map(_text(63), 64, description="Labels of the pods."),
            "annotations": _map(_text(MAX_TEMPLATE_BYTES), 128, description="Annotations of the pods."),
        },
    }


def worker_template() -> Schema:
    """Return the schema of spec.workers.template.

    A spec, its containers and their images are needed (`spec_rules`), unless the job names a template.
    """
    never = "leave restartPolicy out or say Never: the operator replaces workers that fail"
    restart_policy = _text(
        32,
        description="Never, or left out: workers are replaced by the operator, not restarted.",
        **{"x-kubernetes-validations": [rule("self == 'Never'", never)]},
    )
    containers: Schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CONTAINERS,
        "description": "Containers of a worker pod.",
        "items": _container("Default: worker."),
    }
    spec = _pod_spec(
        restart_policy,
        containers,
        "A PodSpec. The container named 'worker', or else the first one, runs the script.",
    )
    return {
        "type": "object",
        "properties": {
            "metadata": _metadata("Labels and annotations of the worker pods."),
            "spec": spec,
        },
    }


def server_template() -> Schema:
    """Return the schema of spec.parameterServers.template."""
    always = "leave restartPolicy out or say Always: a server that ends comes back in place"
    restart_policy = _text(
        32,
        description="Always, or left out: a server that ends comes back in place.",
        **{"x-kubernetes-validations": [rule("self == 'Always'", always)]},
    )
    containers = _list(
        _container("Default: server."), MAX_CONTAINERS, description="Containers of a server's pod."
    )
    spec = _pod_spec(
        restart_policy,
        containers,
        "Parts of a PodSpec. The container named 'server', or else the first one, is the server; without any,"
        " one is made.",
    )
    return {
        "type": "object",
        "properties": {
            "metadata": _metadata("Labels and annotations of the servers' pods."),
            "spec": _optional(spec),
        },
    }


def resources() -> Schema:
    """Return the schema of a container's resources."""
    return _RESOURCES


def quantities() -> Schema:
    """Return the schema of quantities by the name of their resource."""
    return _QUANTITIES


def tolerations() -> Schema:
    """Return the schema of a pod's tolerations."""
    return _TOLERATIONS


def node_selector() -> Schema:
    """Return the schema of a pod's node selector."""
    return _map(_text(63), 64)


def affinity() -> Schema:
    """Return the schema of a pod's affinity."""
    return _DEEP


def without_nulls(value: Any) -> Any:
    """Return a template without its nulls: in a pod a null is as good as no field."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
