"""The template that a job names: it is read once, and kept in the job's status. PURE.

A job without its template waits: nothing of it exists, and it goes on by itself when the template comes. A
job that has it needs it no more: an edit of the template, and its end, concern jobs that are seen later.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from springtide_operator.api import reasons
from springtide_operator.api.effective_spec import Reference, reference, template_in_status
from springtide_operator.api.limits import MAX_SNAPSHOT_BYTES, MAX_TEMPLATE_DEPTH
from springtide_operator.api.training_template import TrainingTemplateSpec
from springtide_operator.plan.actions import Event, Plan
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.only_said import only_said
from springtide_operator.plan.values import timestamp

Object = dict[str, Any]
Status = dict[str, Any]

STATUS = "template"


def wanted(job: Object) -> Reference | None:
    """Return the template that has to be read for a job before anything is decided; None where none has.

    Args:
        job: a TrainingJob as the API server gives it.
    """
    status = job.get("status") or {}
    if "deletionTimestamp" in job["metadata"] or status.get("completionTime"):
        return None
    return None if template_in_status(job) is not None else reference(job)


def take(job: Object, named: Reference, found: Object, now: float) -> Plan:
    """Return the plan that keeps a template in the job's status, or says why it cannot be used.

    Args:
        job: a TrainingJob as the API server gives it.
        named: its template.
        found: the template as the API server gives it.
        now: unix seconds.
    """
    meta, spec = found.get("metadata") or {}, found.get("spec") or {}
    if wrong := _wrong(spec):
        text = f"{named.label} cannot be used: {wrong}; the job waits until it is corrected"
        return wait(job, reasons.TEMPLATE_UNREADABLE, text, now)
    snapshot = {
        "kind": named.kind,
        "name": named.name,
        "uid": str(meta.get("uid") or ""),
        "generation": int(meta.get("generation") or 0),
        "time": timestamp(now),
        "spec": spec,
    }
    status = {**(job.get("status") or {}), STATUS: snapshot}
    text = (
        f"the job is made from {named.label}, generation {snapshot['generation']}; later edits of it change"
        " nothing for this job"
    )
    return Plan(status, (), (Event(reasons.EVENT_TEMPLATE, text),))


def lack(job: Object, named: Reference, code: int, message: str, now: float) -> Plan:
    """Return the plan for a job whose template the API server does not give.

    Args:
        job: a TrainingJob as the API server gives it.
        named: its template.
        code: of the answer.
        message: the server's own words.
        now: unix seconds.
    """
    where = "" if named.kind.startswith("Cluster") else f" in namespace {job['metadata']['namespace']}"
    if code == 404:
        text = (
            f"there is no {named.label}{where}: the job waits for it, and begins when it is there (create it,"
            " or delete the job and name another one)"
        )
        return wait(job, reasons.TEMPLATE_NOT_FOUND, text, now)
    text = f"{named.label} cannot be read, and the job waits until it can: {message}"
    if code == 403:
        text += (
            ". The operator lacks the right to get it: an operator of named namespaces has that for"
            " ClusterTrainingTemplates unless the chart's rbac.clusterTemplates is false"
        )
    return wait(job, reasons.TEMPLATE_UNREADABLE, text, now)


def wait(job: Object, reason: str, text: str, now: float) -> Plan:
    """Return the plan for a job that waits for its template: it only says so.

    Args:
        job: a TrainingJob as the API server gives it.
        reason: of the conditions.
        text: why, in a sentence.
        now: unix seconds.
    """
    text = text[:4096]
    status, generation = job.get("status") or {}, int(job["metadata"].get("generation", 1))
    truths = {
        reasons.DEGRADED: Truth(True, reason, text),
        # Not stalled: it goes on without anybody touching the job, as where both are applied together.
        reasons.READY: Truth(False, reason, text),
        reasons.RECONCILING: Truth(True, reason, text),
        reasons.STALLED: Truth(False, reason, "the job goes on by itself when its template is there"),
    }
    return only_said(status, generation, truths, now)


def _wrong(spec: Any) -> str:
    """Return why a template cannot be used; "" where it can."""
    try:
        text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return f"it is nested more than {MAX_TEMPLATE_DEPTH} levels deep"
    size = len(text.encode(errors="replace"))
    if size > MAX_SNAPSHOT_BYTES:
        return (
            f"its spec has {size:,} bytes of JSON, and jobs keep at most {MAX_SNAPSHOT_BYTES:,}: put large"
            " values into a ConfigMap"
        )
    if _depth(spec) > MAX_TEMPLATE_DEPTH:
        return f"it is nested more than {MAX_TEMPLATE_DEPTH} levels deep"
    try:
        TrainingTemplateSpec.model_validate(spec)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5]]
        return "; ".join(lines)
    return ""


def _depth(value: Any) -> int:
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level:
        below = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [inner for one in below for inner in one if isinstance(inner, dict | list)]
        depth += 1
    return depth
