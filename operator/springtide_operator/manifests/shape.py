"""The shape of a pod template, as far as the operator touches it.

The CRD lists and bounds what it can, for jobs that are written under it; what is deeper is open there, and a
template is read long before the API server sees a pod made from it. Checked here, a mistake is one clear
error; unchecked, it would be an error in some line that works with the part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.quantities import quantity
from springtide_operator.manifests.errors import TemplateError

Check = Callable[[str, Any], None]

_MAX_SECONDS = 2**31 - 1


def check_template(where: str, template: Any) -> None:
    """Check a template; what is absent is right.

    Args:
        where: place in the manifest, for errors.
        template: as the manifest has it.

    Raises:
        TemplateError: with the place below `where`.
    """
    _TEMPLATE(where, template)


def _text(where: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TemplateError(f"{where}: must be a string, not {_kind(value)}")


def _name(where: str, value: Any) -> None:
    """Part of a path of the API server, so nothing else passes."""
    _text(where, value)
    if value and not names.is_name(value):
        raise TemplateError(
            f"{where}: {value[:80]!r} is no name of an object: letters a-z, digits, '-' and '.'"
        )


def _truth(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TemplateError(f"{where}: must be true or false, not {_kind(value)}")


def _seconds(where: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= _MAX_SECONDS:
        raise TemplateError(f"{where}: must be a whole number of seconds from 0 to {_MAX_SECONDS}")


def _quantity(where: str, value: Any) -> None:
    try:
        quantity(value)
    except ValueError as error:
        raise TemplateError(f"{where}: {error}") from error


def _scalar(where: str, value: Any) -> None:
    if isinstance(value, dict | list):
        raise TemplateError(f"{where}: must be a string, not {_kind(value)}")


def _any(where: str, value: Any) -> None:
    """Left to the API server."""


def _list(inner: Check) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, list):
            raise TemplateError(f"{where}: must be a list, not {_kind(value)}")
        for index, one in enumerate(value):
            inner(f"{where}[{index}]", one)

    return check


def _map(inner: Check) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise TemplateError(f"{where}: must be an object, not {_kind(value)}")
        for key, one in value.items():
            inner(f"{where}.{str(key)[:80]}", one)

    return check


def _object(fields: Mapping[str, Check]) -> Check:
    def check(where: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise TemplateError(f"{where}: must be an object, not {_kind(value)}")
        for key, inner in fields.items():
            if value.get(key) is not None:
                inner(f"{where}.{key}", value[key])

    return check


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds: tuple[tuple[type, str], ...] = (
        (dict, "an object"),
        (list, "a list"),
        (str, "a string"),
        (int, "a number"),
        (float, "a number"),
    )
    return next((word for kind, word in kinds if isinstance(value, kind)), "null")


_CONTAINER = _object(
    {
        "name": _text,
        "image": _text,
        "restartPolicy": _text,
        "terminationMessagePath": _text,
        "env": _list(_object({"name": _text})),
        "ports": _list(_object({"name": _text})),
        "volumeMounts": _list(_object({"mountPath": _text})),
        "command": _list(_text),
        "args": _list(_text),
        "securityContext": _object({}),
        "resources": _object({"limits": _map(_quantity), "requests": _map(_quantity)}),
    }
)
_TEMPLATE = _object(
    {
        "metadata": _object({"labels": _map(_scalar), "annotations": _map(_scalar)}),
        "spec": _object(
            {
                "containers": _list(_CONTAINER),
                "initContainers": _list(_CONTAINER),
                "volumes": _list(_object({"name": _text})),
                "tolerations": _list(_object({"key": _text})),
                "imagePullSecrets": _list(_object({"name": _text})),
                "topologySpreadConstraints": _list(_object({})),
                "nodeSelector": _map(_scalar),
                "overhead": _map(_quantity),
                "affinity": _object({"nodeAffinity": _object({})}),
                "securityContext": _object({}),
                "schedulerName": _text,
                "priorityClassName": _name,
                "runtimeClassName": _name,
                "restartPolicy": _text,
                "terminationGracePeriodSeconds": _seconds,
                "hostNetwork": _truth,
            }
        ),
    }
)
