"""Templates that cannot be used: by the operator's own check, or since the API server finds the pod invalid.

A job that has not trained fails at once: asking again cannot help. A job that has trained was edited, and
that costs it nothing: its pods stay, no new ones of that kind are made, and the condition says so until it is
corrected. It fails when none of them is left, but not while it is suspended.
"""

from __future__ import annotations

import math
from dataclasses import replace

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan.observation import Observation, Problem, Refusal

ROLES = ("worker", "coordinator", "server")
_PODS = {"worker": "worker pod", "coordinator": "coordinator pod", "server": "parameter server's pod"}


def with_template_problems(job: Job, observation: Observation) -> Observation:
    """Return the observation with a refusal for each role of which no pod can be made from this template.

    Args:
        job: with its template.
        observation: is copied.
    """
    found = {}
    try:
        worker_pod(job, 0, 0, "")
    except TemplateError as error:
        found["worker"] = str(error)
    if job.spec.servers:
        try:
            server_pod(job, 0, 0, "")
        except TemplateError as error:
            found["server"] = str(error)
    if not found:
        return observation
    refusals = {role: Refusal(422, text, math.inf, 0.0, ours=True) for role, text in found.items()}
    return replace(observation, refusals={**observation.refusals, **refusals})


def fatal(job: Job, observation: Observation) -> str | None:
    """Return the reason with which the job fails; None while every template can be used, or the job goes on
    without.

    Args:
        job: with its templates.
        observation: with the refusals.
    """
    for role, text in _wrong(observation):
        if not _goes_on(job, observation, role):
            return text
    return None


def problems(job: Job, observation: Observation) -> list[Problem]:
    """Return the problems of a job that goes on with the pods it has, or that is suspended.

    Args:
        job: with its templates.
        observation: with the refusals.
    """
    lead = "the job goes on with the pods that it has, and none of them can be replaced"
    if job.halted:
        lead = "the job cannot go on like this when it is resumed"
    return [
        Problem(reasons.INVALID_TEMPLATE, f"{lead}: {text[:1000]}; correct spec, or take the last edit back")
        for role, text in _wrong(observation)
        if _goes_on(job, observation, role)
    ]


def _wrong(observation: Observation) -> list[tuple[str, str]]:
    """(role, what is wrong)."""
    result = []
    for role in ROLES:
        refusal = observation.refusals.get(role)
        if refusal is None or not refusal.invalid:
            continue
        text = refusal.message
        if not refusal.ours:
            text = f"the API server refuses the {_PODS[role]} as invalid: {text}"
        result.append((role, text))
    return result


def _goes_on(job: Job, observation: Observation, role: str) -> bool:
    """Whether it has trained, so that earlier pods were accepted, and some are left, or none is wanted, or
    one was only made to go since the template had been edited.
    """
    pods = observation.servers if role == "server" else observation.workers
    slots = job.status.get("serverSlots" if role == "server" else "slots") or {}
    edited = any(slot.get("edited") for slot in slots.values())
    left = edited or any(pod.live for pod in pods)
    return bool(job.status.get("generation")) and (bool(job.halted) or left)
