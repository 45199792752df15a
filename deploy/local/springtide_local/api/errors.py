"""Refusals in the form and the words that Kubernetes clients know.

Every function returns an `ApiError`; `status()` turns one into the `Status` object that goes over the wire.
The texts follow apimachinery's `pkg/api/errors`, because kubectl, kopf and their users match on them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from springtide_local.api.rbac import Attributes
from springtide_local.ports import ApiError, Object

REQUIRED = "FieldValueRequired"
INVALID = "FieldValueInvalid"
TYPE_INVALID = "FieldValueTypeInvalid"
NOT_SUPPORTED = "FieldValueNotSupported"
DUPLICATE = "FieldValueDuplicate"
FORBIDDEN = "FieldValueForbidden"
TOO_LONG = "FieldValueTooLong"
TOO_MANY = "FieldValueTooMany"
NOT_FOUND = "FieldValueNotFound"


@dataclass(frozen=True, slots=True)
class FieldError:
    """One thing wrong with one field: `path` as `spec.a[0].b`, `reason` a cause type, `message` without
    the path.
    """

    path: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"


def shown(value: Any) -> str:
    """A value as Kubernetes prints it in field errors: strings quoted, the rest as JSON."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        value = int(value)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    if not isinstance(value, str):  # Go escapes for HTML what it writes as JSON
        for char in "<>&":
            text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def field_required(path: str, detail: str = "") -> FieldError:
    """Return the error of a field that is missing.

    Args:
        path: of the field, as `spec.names[0]`.
        detail: why it is needed; "" for nothing more to say.
    """
    return FieldError(path, REQUIRED, "Required value" + (f": {detail}" if detail else ""))


def field_invalid(path: str, value: Any, detail: str) -> FieldError:
    """Return the error of a value that cannot be.

    Args:
        path: of the field, as `spec.names[0]`.
        value: that the field has.
        detail: what is wrong with it.
    """
    return FieldError(path, INVALID, f"Invalid value: {shown(value)}: {detail}")


def field_unsupported(path: str, value: Any, supported: Sequence[Any]) -> FieldError:
    """Return the error of a value that is none of those that are known.

    Args:
        path: of the field, as `spec.names[0]`.
        value: that the field has.
        supported: those that are.
    """
    listed = ", ".join(shown(choice) for choice in supported)
    return FieldError(path, NOT_SUPPORTED, f"Unsupported value: {shown(value)}: supported values: {listed}")


def field_forbidden(path: str, detail: str) -> FieldError:
    """Return the error of a field that must not be set, or not be changed.

    Args:
        path: of the field, as `spec.names[0]`.
        detail: why.
    """
    return FieldError(path, FORBIDDEN, f"Forbidden: {detail}")


def field_duplicate(path: str, value: Any) -> FieldError:
    """Return the error of a value that must not be there twice.

    Args:
        path: of the field, as `spec.names[0]`.
        value: that the field has.
    """
    return FieldError(path, DUPLICATE, f"Duplicate value: {shown(value)}")


def field_not_found(path: str, value: Any) -> FieldError:
    """Return the error of a value that names something that is not there.

    Args:
        path: of the field, as `spec.names[0]`.
        value: that the field has.
    """
    return FieldError(path, NOT_FOUND, f"Not found: {shown(value)}")


def qualified(group: str, name: str) -> str:
    """Return a resource's name with its group, as messages have it.

    Args:
        group: of the API; "" for core.
        name: plural of the resource.
    """
    return f"{name}.{group}" if group else name


def not_found(group: str, plural: str, name: str) -> ApiError:
    """Return the refusal, 404, of an object that is not there.

    Args:
        group: of the API; "" for core.
        plural: the resource's name.
        name: of the object.
    """
    message = f'{qualified(group, plural)} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(group, plural, name))


def no_such_path() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """Return the refusal, 409, of a name that is taken.

    Args:
        group: of the API; "" for core.
        plural: the resource's name.
        name: of the object.
    """
    message = f'{qualified(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    """Return the refusal, 409, of a write that does not fit what is stored.

    Args:
        group: of the API; "" for core.
        plural: the resource's name.
        name: of the object.
        why: in words.
    """
    message = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(group, plural, name))


def modified(group: str, plural: str, name: str) -> ApiError:
    """Return the refusal, 409, of a write onto an older version of the object.

    Args:
        group: of the API; "" for core.
        plural: the resource's name.
        name: of the object.
    """
    why = "the object has been modified; please apply your changes to the latest version and try again"
    return conflict(group, plural, name, why)


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Object] = ()) -> ApiError:
    """Return the refusal, 403, of something that a policy is against.

    Args:
        group: of the API; "" for core.
        plural: the resource's name.
        name: of the object.
        why: in words.
        causes: one object for each reason, for `details.causes`.
    """
    message = f'{qualified(group, plural)} "{name}" is forbidden: {why}'
    details = _details(group, plural, name)
    if causes:
        details["causes"] = list(causes)
    return ApiError(403, "Forbidden", message, details)


def not_allowed(user: str, asked: Attributes, reason: str = "") -> ApiError:
    """Return the refusal, 403, of a request that the user has no right to.

    Args:
        user: the name.
        asked: what the request wants to do.
        reason: in words; "" for nothing more to say.
    """
    if asked.resource:
        place = f'in the namespace "{asked.namespace}"' if asked.namespace else "at the cluster scope"
        about = f'resource "{asked.combined}" in API group "{asked.group}" {place}'
    else:
        about = f'path "{asked.path}"'
    text = f'User "{user}" cannot {asked.verb} {about}' + (f": {reason}" if reason else "")
    details: Object = {"name": asked.name, "group": asked.group, "kind": asked.resource}
    known = {name: value for name, value in details.items() if value}
    if not asked.resource:
        return ApiError(403, "Forbidden", f"forbidden: {text}", known)
    what = qualified(asked.group, asked.resource) + (f' "{asked.name}"' if asked.name else "")
    return ApiError(403, "Forbidden", f"{what} is forbidden: {text}", known)


def invalid(group: str, kind: str, name: str, errors: Sequence[FieldError]) -> ApiError:
    """Return the refusal, 422, with one cause for each wrong field; kubectl prints the causes.

    Args:
        group: of the API; "" for core.
        kind: of the object.
        name: of the object.
        errors: at least one; equal ones are told once.
    """
    texts = list(dict.fromkeys(str(error) for error in errors))
    joined = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    message = f'{qualified(group, kind)} "{name}" is invalid: {joined}'
    details = _details(group, kind, name)
    details["causes"] = [{"reason": e.reason, "message": e.message, "field": e.path} for e in errors]
    return ApiError(422, "Invalid", message, details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def unauthorized() -> ApiError:
    return ApiError(401, "Unauthorized", "Unauthorized")


def method_not_allowed(what: str = "") -> ApiError:
    message = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", message + (f": {what}" if what else ""))


def not_acceptable(message: str) -> ApiError:
    return ApiError(406, "NotAcceptable", message)


def unsupported_media_type(message: str) -> ApiError:
    return ApiError(415, "UnsupportedMediaType", message)


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def too_large_resource_version(asked: int, current: int) -> ApiError:
    """Return the refusal, 504, of a resource version of the future.

    Args:
        asked: the one that the client named.
        current: the server's newest.
    """
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return ApiError(504, "Timeout", message, {"causes": causes, "retryAfterSeconds": 1})


def too_many_requests(message: str, cause: str) -> ApiError:
    """Return the refusal, 429, of an eviction that a disruption budget is against.

    Args:
        message: of the answer.
        cause: which budget, and what it needs.
    """
    return ApiError(
        429, "TooManyRequests", message, {"causes": [{"reason": "DisruptionBudget", "message": cause}]}
    )


def internal(message: str) -> ApiError:
    return ApiError(500, "InternalError", f"Internal error occurred: {message}")


def status(error: ApiError) -> Object:
    """The `Status` object of a refusal."""
    body: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    body["message"] = error.message
    if error.reason:
        body["reason"] = error.reason
    if error.details:
        body["details"] = error.details
    body["code"] = error.code
    return body


def _details(group: str, kind: str, name: str) -> Object:
    details: Object = {"name": name, "kind": kind}
    if group:
        details["group"] = group
    return details
