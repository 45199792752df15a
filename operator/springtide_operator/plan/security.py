"""Protection of a job from its neighbours: its NetworkPolicy, and TLS.

The NetworkPolicy is there before the pods that it protects. For jobs that do not say whether they want TLS,
the operator's default when it first planned the job is noted in status before the job's first pod, and holds
for good: pods made with and without TLS would not understand each other.
"""

from __future__ import annotations

from dataclasses import replace

from springtide_operator.api.job import Job
from springtide_operator.plan.actions import Action, ApplyNetworkPolicy
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.retry import held_back

ROLE = "networkpolicy"


def decide(observation: Observation, now: float) -> list[Action]:
    """Apply the NetworkPolicy, once by each operator process, which also mends it. A refusal keeps no pod
    from being made.

    Args:
        observation: of the job.
        now: in unix seconds.

    Returns:
        The one action; empty when it was applied, or has to wait.
    """
    if not observation.policy_missing or held_back(observation, ROLE, now):
        return []
    return [ApplyNetworkPolicy("other pods must not reach the job's")]


STATUS = "tls"


def with_encryption(job: Job, observation: Observation) -> Job:
    """Return the job with `status.tls` as it is from now on.

    One that was planned before, and has no note, is from a time before there were any: it is without TLS.

    Args:
        job: with its status.
        observation: of the job.
    """
    planned = "coordinator" in job.status or "generation" in job.status
    if job.spec.security.tls is not None or isinstance(job.status.get(STATUS), bool) or planned:
        return job
    return replace(job, status={**job.status, STATUS: observation.tls_default})
