"""Deployments, ReplicaSets, disruption budgets, autoscalers: defaults and checks."""

from __future__ import annotations

from springtide_local.api import errors
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds import pod_checks
from springtide_local.api.kinds.base import Kind, Reader
from springtide_local.api.kinds.pods import default_pod_spec
from springtide_local.api.selectors import selector_of
from springtide_local.ports import Object


def _check_template(spec: Object, path: str) -> list[FieldError]:
    found: list[FieldError] = []
    template = spec.get("template") or {}
    selector = spec.get("selector")
    if not selector:
        found.append(errors.field_required(f"{path}.selector"))
    elif not selector.get("matchLabels") and not selector.get("matchExpressions"):
        found.append(
            errors.field_invalid(f"{path}.selector", selector, "empty selector is invalid for deployment")
        )
    elif not selector_of(selector).matches(template.get("metadata", {}).get("labels")):
        labels = template.get("metadata", {}).get("labels")
        text = "`selector` does not match template `labels`"
        found.append(errors.field_invalid(f"{path}.template.metadata.labels", labels or {}, text))
    if isinstance(spec.get("replicas"), int) and spec["replicas"] < 0:
        text = "must be greater than or equal to 0"
        found.append(errors.field_invalid(f"{path}.replicas", spec["replicas"], text))
    pod_spec = template.get("spec") or {}
    found += pod_checks.check_pod_spec(pod_spec, f"{path}.template.spec", template=True)
    return found


class _Workload(Kind):
    def default(self, obj: Object) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("replicas", 1)
        template = spec.setdefault("template", {})
        template.setdefault("metadata", {}).setdefault("creationTimestamp", None)
        default_pod_spec(template.setdefault("spec", {}))

    def prepare_create(self, store: Reader, obj: Object) -> None:
        obj["status"] = {}

    def check(self, obj: Object) -> list[FieldError]:
        return _check_template(obj["spec"], "spec")

    def check_update(self, obj: Object, old: Object, subresource: str | None) -> list[FieldError]:
        if obj["spec"].get("selector") == old["spec"].get("selector"):
            return []
        return [errors.field_invalid("spec.selector", obj["spec"].get("selector"), "field is immutable")]


class Deployments(_Workload):
    def default(self, obj: Object) -> None:
        super().default(obj)
        spec = obj["spec"]
        spec.setdefault("revisionHistoryLimit", 10)
        spec.setdefault("progressDeadlineSeconds", 600)
        strategy = spec.setdefault("strategy", {})
        if strategy.setdefault("type", "RollingUpdate") == "RollingUpdate":
            rolling = strategy.setdefault("rollingUpdate", {})
            rolling.setdefault("maxUnavailable", "25%")
            rolling.setdefault("maxSurge", "25%")


class ReplicaSets(_Workload):
    def default(self, obj: Object) -> None:
        super().default(obj)
        spec = obj["spec"]
        labels = spec["template"]["metadata"].get("labels")
        if not spec.get("selector") and labels:
            spec["selector"] = {"matchLabels": dict(labels)}

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin without replicas.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {"replicas": 0}


class DisruptionBudgets(Kind):
    def check(self, obj: Object) -> list[FieldError]:
        spec = obj.get("spec") or {}
        if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
            text = "minAvailable and maxUnavailable cannot be both set"
            return [errors.field_invalid("spec", spec, text)]
        found: list[FieldError] = []
        for name in ("minAvailable", "maxUnavailable"):
            value = spec.get(name)
            if isinstance(value, int) and value < 0:
                found.append(
                    errors.field_invalid(f"spec.{name}", value, "must be greater than or equal to 0")
                )
            elif isinstance(value, str) and not (value.endswith("%") and value[:-1].isdigit()):
                text = "a valid percent string must be a numeric string followed by an ending '%'"
                found.append(errors.field_invalid(f"spec.{name}", value, text))
        return found

    def prepare_create(self, store: Reader, obj: Object) -> None:
        """Begin without pods.

        Args:
            store: for reading other objects.
            obj: the object as it is to be stored; it is changed in place.
        """
        obj["status"] = {"currentHealthy": 0, "desiredHealthy": 0, "disruptionsAllowed": 0, "expectedPods": 0}


class Autoscalers(Kind):
    """Stored and checked; nothing scales by them here."""

    def default(self, obj: Object) -> None:
        obj.setdefault("spec", {}).setdefault("minReplicas", 1)

    def check(self, obj: Object) -> list[FieldError]:
        spec = obj["spec"]
        low, high = spec.get("minReplicas", 1), spec.get("maxReplicas", 0)
        if high < max(low, 1):
            return [
                errors.field_invalid(
                    "spec.maxReplicas", high, "must be greater than or equal to `minReplicas`"
                )
            ]
        return []
