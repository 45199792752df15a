"""The spec of a job that names a template: its own fields, and the template's as status keeps it. PURE.

The template is kept as it was when the operator first saw the job (`plan.training_template` writes it), so a
job is the same at each look, whatever becomes of the template. It counts for what the reference names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from springtide_operator.api import names, reasons
from springtide_operator.api.merged_rules import broken
from springtide_operator.api.model import StrategyType, TemplateKind, TrainingJobSpec
from springtide_operator.api.template_limits import at, beyond
from springtide_operator.api.template_merge import main_container, merge
from springtide_operator.api.training_template import TrainingTemplateSpec

Object = dict[str, Any]

_MOST_PROBLEMS = 5


class Reference(NamedTuple):
    """The template that a job names."""

    kind: str
    name: str

    @property
    def label(self) -> str:
        """The template as people call it."""
        return f"{self.kind} {self.name}"


def parse_reference(text: str) -> Reference:
    """Return the template that a command line or a program names.

    Args:
        text: NAME of a ClusterTrainingTemplate, or KIND/NAME.

    Raises:
        ValueError: it is neither.
    """
    kind, slash, name = text.rpartition("/")
    kinds = {one.value.lower(): one.value for one in TemplateKind}
    wanted = kinds.get(kind.lower()) if slash else TemplateKind.CLUSTER_TEMPLATE.value
    if wanted is None or not names.is_name(name):
        raise ValueError(
            f"{text!r} names no template: give the name of a ClusterTrainingTemplate, or KIND/NAME such as"
            " TrainingTemplate/gpu"
        )
    return Reference(wanted, name)


class InvalidJob(Exception):
    """The spec cannot be worked with; the message names the fields. (Most of it the API server refuses.)

    Attributes:
        reason: the reason of the conditions, one CamelCase word.
    """

    def __init__(self, message: str, reason: str = reasons.INVALID_SPEC) -> None:
        super().__init__(message)
        self.reason = reason


def reference(job: Mapping[str, Any]) -> Reference | None:
    """Return the template that a job names; None where it names none.

    Args:
        job: a TrainingJob as the API server gives it.
    """
    said = at(job, "spec.templateRef")
    if not isinstance(said, Mapping) or not isinstance(said.get("name"), str):
        return None
    return Reference(str(said.get("kind") or TemplateKind.CLUSTER_TEMPLATE.value), said["name"])


def template_in_status(job: Mapping[str, Any]) -> Object | None:
    """Return the template's spec that holds for a job, by its status; None where none is kept yet.

    Args:
        job: a TrainingJob as the API server gives it.
    """
    named, found = reference(job), at(job, "status.template")
    if named is None or not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        return None
    if (found.get("kind"), found.get("name")) != named:
        return None
    spec: Object = found["spec"]
    return spec


def merged_spec(job: Mapping[str, Any]) -> Object:
    """Return the fields of a job's spec, its template's included as far as one is kept; nothing is checked.

    Args:
        job: a TrainingJob as the API server gives it.
    """
    own, template = job.get("spec") or {}, template_in_status(job)
    if template is None:
        return dict(own)
    defaults = template.get("defaults")
    merged = merge(defaults if isinstance(defaults, dict) else {}, own)
    # Servers of a template are for jobs that have some: a job cannot take a field away.
    without = (at(merged, "strategy.type") or StrategyType.ALL_REDUCE.value) == StrategyType.ALL_REDUCE.value
    if without and not own.get("parameterServers"):
        merged.pop("parameterServers", None)
    return merged


def effective_spec(job: Mapping[str, Any]) -> TrainingJobSpec:
    """Return the spec that a job has, its template's fields included.

    Args:
        job: a TrainingJob as the API server gives it.

    Raises:
        InvalidJob: it cannot be read, goes beyond the limits of its template, or has no template yet.
    """
    named = reference(job)
    if named is None:
        return _read(job.get("spec") or {}, "")
    template = template_in_status(job)
    if template is None:
        raise InvalidJob(f"the job waits for its template, {named.label}", reasons.TEMPLATE_NOT_FOUND)
    lead = f"with {named.label} of {at(job, 'status.template.time')}: "
    try:
        limits = TrainingTemplateSpec.model_validate(template).limits
        merged = merged_spec(job)
        alone = merge(template.get("defaults") or {}, {})
    except (ValidationError, RecursionError, TypeError) as error:
        raise InvalidJob(f"{lead}the template cannot be read: {str(error)[:400]}") from error
    _check_main_containers(alone, merged, lead)
    spec = _read(merged, lead)
    labels = at(job, "metadata.labels") or {}
    if found := beyond(limits, alone, merged, labels):
        raise InvalidJob(
            f"the job goes beyond what {named.label} allows: {_together(found)}. Nothing is done for it, and"
            " pods that it has train on, until spec is within these limits",
            reasons.TEMPLATE_LIMITS,
        )
    workers = spec.workers
    if limits.max_replicas is not None and workers.max_replicas is None:
        workers = workers.model_copy(update={"max_replicas": limits.max_replicas})
        spec = spec.model_copy(update={"workers": workers})
    if wrong := broken(spec):
        raise InvalidJob(f"{lead}{_together(wrong)}")
    return spec


def _read(spec: Object, lead: str) -> TrainingJobSpec:
    try:
        return TrainingJobSpec.model_validate(spec)
    except ValidationError as error:
        lines = [
            f"spec.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()[:_MOST_PROBLEMS]
        ]
        raise InvalidJob(lead + "; ".join(lines)) from error


def _check_main_containers(template: Object, merged: Object, lead: str) -> None:
    """Refuse a job whose script would run beside the template's container instead of in it."""
    for role in ("workers", "parameterServers"):
        before, after = main_container(template, role), main_container(merged, role)
        if before and after != before:
            raise InvalidJob(
                f"{lead}spec.{role}.template.spec.containers: the template's main container is called"
                f" {before!r}, and the job's {after!r}, so there would be both: give the job's the name"
                f" {before!r}, or none"
            )


def _together(texts: list[str]) -> str:
    more = f"; and {len(texts) - _MOST_PROBLEMS} more" if len(texts) > _MOST_PROBLEMS else ""
    return "; ".join(texts[:_MOST_PROBLEMS]) + more
