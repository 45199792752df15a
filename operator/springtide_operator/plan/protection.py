"""The job's NetworkPolicy: there before the pods that it protects."""

from __future__ import annotations

from springtide_operator.plan.actions import Action, ApplyNetworkPolicy
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.refused import held_back

ROLE = "networkpolicy"


def decide(observation: Observation, now: float) -> list[Action]:
    """Applied once by each operator process, which also mends it. A refusal keeps no pod from being made."""
    if not observation.policy_missing or held_back(observation, ROLE, now):
        return []
    return [ApplyNetworkPolicy("other pods must not reach the job's")]
