"""Namespaces, nodes, secrets, claims, events and other plain kinds of the core group."""

from __future__ import annotations

import base64
import binascii

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.api.objects import quantity
from springtide_local.ports import Object

_KEY_TEXT = (
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or "
    "'KEY_NAME',  or "
    "'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
)
_SIZE_LIMIT = 1024 * 1024


class Namespaces(Kind):
    def default(self, obj: Object) -> None:
        meta = obj["metadata"]
        if meta.get("name"):
            labels = meta.get("labels") or {}
            meta["labels"] = {**labels, "kubernetes.io/metadata.name": meta["name"]}

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin as active, with the finalizer of the system.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["spec"] = {"finalizers": ["kubernetes"]}
        obj["status"] = {"phase": "Active"}

    def prepare_update(self, store: Reader, obj: Object, old: Object, subresource: str | None) -> None:
        """Keep the finalizers, which a subresource of its own changes.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        if subresource != "finalize":
            obj["spec"] = old.get("spec", {})


class Nodes(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("spec", {})
        status = obj.get("status")
        if isinstance(status, dict) and "allocatable" not in status and "capacity" in status:
            status["allocatable"] = dict(status["capacity"])


def _check_keys(data: Object, path: str, found: list[FieldError]) -> None:
    for key in data:
        if (
            not key
            or len(key) > 253
            or any(not (char.isascii() and (char.isalnum() or char in "-._")) for char in key)
        ):
            found.append(errors.field_invalid(f"{path}[{key}]", key, _KEY_TEXT))


class ConfigMaps(Kind):
    def check(self, obj: Object) -> list[FieldError]:
        found: list[FieldError] = []
        _check_keys(obj.get("data") or {}, "data", found)
        _check_keys(obj.get("binaryData") or {}, "binaryData", found)
        for key in obj.get("binaryData") or {}:
            if key in (obj.get("data") or {}):
                text = "duplicate of key present in data"
                found.append(errors.field_invalid(f"binaryData[{key}]", key, text))
        size = sum(len(value.encode()) for value in (obj.get("data") or {}).values())
        if size > _SIZE_LIMIT:
            found.append(
                errors.FieldError("", errors.TOO_LONG, f"Too long: may not be more than {_SIZE_LIMIT} bytes")
            )
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error for each field that is changed although the object is immutable.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        if not old.get("immutable"):
            return []
        text = "field is immutable when `immutable` is set"
        names = ("immutable", "data", "binaryData")
        return [errors.field_forbidden(name, text) for name in names if obj.get(name) != old.get(name)]


class Secrets(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("type", "Opaque")
        texts = obj.pop("stringData", None)
        if texts:
            data = obj.setdefault("data", {})
            for key, text in texts.items():
                data[key] = base64.b64encode(str(text).encode()).decode()

    def check(self, obj: Object) -> list[FieldError]:
        found: list[FieldError] = []
        _check_keys(obj.get("data") or {}, "data", found)
        for key, value in (obj.get("data") or {}).items():
            try:
                base64.b64decode(value, validate=True)
            except (binascii.Error, ValueError):
                found.append(errors.field_invalid(f"data[{key}]", value, "must be base64 encoded"))
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error for a changed type, and for data that are changed although the object is immutable.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        found = []
        if obj.get("type") != old.get("type"):
            found.append(errors.field_invalid("type", obj.get("type"), "field is immutable"))
        if old.get("immutable") and (obj.get("data") != old.get("data") or not obj.get("immutable")):
            found.append(errors.field_forbidden("data", "field is immutable when `immutable` is set"))
        return found


class Claims(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("spec", {}).setdefault("volumeMode", "Filesystem")

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin as pending.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {"phase": "Pending"}

    def check(self, obj: Object) -> list[FieldError]:
        spec, found = obj["spec"], []
        if not spec.get("accessModes"):
            found.append(errors.field_required("spec.accessModes", "at least 1 access mode is required"))
        storage = ((spec.get("resources") or {}).get("requests") or {}).get("storage")
        if storage is None:
            found.append(errors.field_required("spec.resources[storage]"))
        else:
            try:
                quantity(storage)
            except ValueError as problem:
                found.append(errors.field_invalid("spec.resources.requests[storage]", storage, str(problem)))
        return found

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error if anything but the requests is changed.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        fixed = ("accessModes", "storageClassName", "selector", "volumeMode")
        if all(obj["spec"].get(name) == old["spec"].get(name) for name in fixed):
            return []
        text = (
            "spec is immutable after creation except resources.requests and volumeAttributesClassName "
            "for bound claims"
        )
        return [errors.field_forbidden("spec", text)]


class Volumes(Kind):
    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("persistentVolumeReclaimPolicy", "Retain")
        spec.setdefault("volumeMode", "Filesystem")

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin as available.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {"phase": "Available"}


class Events(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("source", {})
        obj.setdefault("firstTimestamp", None)
        obj.setdefault("lastTimestamp", None)
        obj.setdefault("eventTime", None)
        obj.setdefault("reportingComponent", (obj.get("source") or {}).get("component", ""))
        obj.setdefault("reportingInstance", "")

    def check(self, obj: Object) -> list[FieldError]:
        involved = (obj.get("involvedObject") or {}).get("namespace", "")
        namespace = obj["metadata"].get("namespace", "")
        if involved and involved != namespace:
            text = "does not match event.namespace"
            return [errors.field_invalid("involvedObject.namespace", involved, text)]
        if not involved and namespace != "default":
            text = "does not match event.namespace"
            return [errors.field_invalid("involvedObject.namespace", involved, text)]
        return []


class PriorityClasses(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("preemptionPolicy", "PreemptLowerPriority")

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        """Return an error if the value is changed, which may not be.

        Args:
            obj: the object as it is to be stored.
            old: the object as it is stored; it is left as it is.
            subresource: that the write goes to; None: the object itself.
        """
        if obj.get("value") != old.get("value"):
            return [errors.field_forbidden("value", "may not be changed in an update.")]
        return []


class Leases(Kind):
    def check(self, obj: Object) -> list[FieldError]:
        duration = (obj.get("spec") or {}).get("leaseDurationSeconds")
        if duration is not None and duration <= 0:
            return [errors.field_invalid("spec.leaseDurationSeconds", duration, "must be greater than 0")]
        return []


class Quotas(Kind):
    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin without a status.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {}


class StorageClasses(Kind):
    def default(self, obj: Object) -> None:
        obj.setdefault("reclaimPolicy", "Delete")
        obj.setdefault("volumeBindingMode", "Immediate")
